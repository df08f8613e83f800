"""`dsprof report`: the HTML bottleneck report of a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsprof.atomic import write_atomically
from dsprof.ranges import parse_ranks
from dsprof.run import DEFAULT_PARENT, RunError

from .runs import UNREADABLE, USAGE, RunArgument, fail, find_run, reading

if TYPE_CHECKING:
    from dsprof.analyzer.analysis import Analysis


def command(
    run: RunArgument = Path(DEFAULT_PARENT),
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", show_default=False, help="Default: report.html in the run folder."
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", show_default=False, help="The step that the timeline is of, from 0."),
    ] = None,
    ranks: Annotated[
        str,
        typer.Option("--ranks", metavar="LIST", show_default=False, help="Ranks that it shows first, such as 0,2-3."),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    open_it: Annotated[bool, typer.Option("--open/--no-open", help="Open the report in a browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the path and the verdict as JSON.")] = False,
) -> None:
    """Write the HTML report of a run, one file that needs no network, and print its path."""
    from dsprof import reports

    try:
        folder = find_run(run)
        wanted = parse_ranks(ranks)
    except RunError as error:
        fail(error, UNREADABLE)
    except ValueError as error:
        fail(f"--ranks: {error}", USAGE)
    target = folder.report_html if output is None else output
    if output is not None:
        if target.is_dir():
            fail(f"{target}: is a folder; name a file in it", USAGE)
        if target.exists() and not force and not _same(target, folder.report_html):
            fail(f"{target}: exists; choose another name, or --force to overwrite it", USAGE)
    try:
        with reading(folder):
            analysis = reports.examine(folder)
        _refuse_missing(analysis, step, wanted)
        with reading(folder):
            from dsprof.reports import html

            page = html.render(analysis, step=step, ranks=tuple(rank for part in wanted for rank in part))
    except RunError as error:
        fail(error, UNREADABLE)
    try:
        write_atomically(target, page)
    except OSError as error:
        fail(f"{target}: cannot be written ({error.strerror}); name another file with -o", USAGE)
    if as_json:
        sys.stdout.write(json.dumps({"report": str(target), "verdict": analysis.verdict.headline}) + "\n")
    else:
        print(target)
    if open_it:
        import webbrowser

        webbrowser.open(target.resolve().as_uri())


def _refuse_missing(analysis: Analysis, step: int | None, ranks: Sequence[range]) -> None:
    """A step and ranks to show must have been captured."""
    numbers = analysis.steps["step"]
    if step is not None and step not in set(numbers):
        there = f"; captured are {numbers.min()} to {numbers.max()}" if len(numbers) else ""
        fail(f"--step {step}: this run has no such step{there}", USAGE)
    captured = sorted(analysis.ranks_captured)
    # A range is looked through no further than to the first that is missing: it may be of any length.
    missing = next((rank for part in ranks for rank in part if rank not in analysis.ranks_captured), None)
    if missing is not None:
        there = f"; captured are {captured[0]} to {captured[-1]}" if captured else ""
        fail(f"--ranks: rank {missing} was not captured{there}", USAGE)


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()
