"""`dsprof export`: a run for other tools."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from dsprof.atomic import replacing
from dsprof.ranges import parse_ranks, parse_steps
from dsprof.run import DEFAULT_PARENT, RunError

from .runs import UNREADABLE, USAGE, RunArgument, fail, find_run, reading

ENDINGS: Final = {"perfetto": ".pftrace", "chrome": ".trace.json", "parquet": ".parquet", "sarif": ".sarif"}


def command(
    run: RunArgument = Path(DEFAULT_PARENT),
    *,
    to: Annotated[
        Literal["perfetto", "chrome", "parquet", "sarif"],
        typer.Option(
            "--to",
            help="perfetto: for ui.perfetto.dev; chrome: JSON like torch.profiler's; parquet: one table of all ranks; "
            "sarif: findings at the lines they blame, for code scanning.",
        ),
    ] = "perfetto",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", show_default=False, help="By default the run's name, here."),
    ] = None,
    ranks: Annotated[
        str, typer.Option(metavar="LIST", show_default=False, help="These ranks only, such as 0,2-3.")
    ] = "",
    steps: Annotated[
        str, typer.Option(metavar="A:B", show_default=False, help="These steps only: from A on, before B.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", metavar="", help="Replace the file if it is there.")] = False,
) -> None:
    """Write a run for other tools: all ranks on one clock, with what dsprof found where the format can hold it."""
    try:
        folder = find_run(run)
        wanted = parse_ranks(ranks) if ranks else None
        first, last = parse_steps(steps) if steps else (0, None)
    except RunError as error:
        fail(error, UNREADABLE)
    except ValueError as error:
        fail(error, USAGE)
    if to == "sarif" and (ranks or steps):
        fail("--to sarif writes findings, which are of all ranks and steps: leave --ranks and --steps out", USAGE)
    target = output or Path(folder.path.resolve().name + ENDINGS[to])
    if target.exists() and not force:
        fail(f"{target} exists: name another file with -o, or add --force to replace it", USAGE)
    from dsprof import reports
    from dsprof.reports import export

    try:
        with reading(folder):
            analysis = reports.examine(folder)
    except RunError as error:
        fail(error, UNREADABLE)
    there = tuple(rank for rank in analysis.trace.ranks if wanted is None or any(rank in part for part in wanted))
    if not there:
        fail(f"--ranks {ranks}: the run has captures of the ranks {', '.join(map(str, analysis.trace.ranks))}", USAGE)
    selection = export.Selection(there, (first, sys.maxsize if last is None else last) if steps else None)
    try:
        with replacing(target) as temporary, temporary.open("wb") as file:
            count = export.write(to, analysis, file, selection)
            if not count and to != "sarif":
                fail(f"{folder.path}: nothing in it is of these ranks and steps", USAGE)
    except export.MissingPackage as error:
        fail(error, USAGE)
    except OSError as error:
        fail(f"{target}: cannot be written ({error.strerror})", USAGE)
    if to == "sarif":
        print(f"{target}: {count} finding{'s' * (count != 1)} with a line")
        return
    print(f"{target}: {count:,} {'rows' if to == 'parquet' else 'events'} of {len(there)} rank{'s' * (len(there) > 1)}")
    if to == "perfetto":
        print("open it at https://ui.perfetto.dev (it is not uploaded)")
