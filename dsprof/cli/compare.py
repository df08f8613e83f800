"""`dsprof compare`: what changed from one run, or set of runs, to another; for continuous integration too."""

from __future__ import annotations

import glob
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dsprof import regular_files
from dsprof.atomic import write_atomically
from dsprof.run import RunError, RunFolder

from .runs import UNREADABLE, USAGE, fail, find_runs, reading

if TYPE_CHECKING:
    from dsprof.compare import MeasuredRun

BASELINE: Final = "dsprof-baseline"
"""The key that a baseline file has around its runs, by which it is told from other JSON."""


def command(
    before: Annotated[
        Path, typer.Argument(metavar="A", help="A run, a folder of runs, a pattern in quotes, or a baseline file.")
    ],
    after: Annotated[Path, typer.Argument(metavar="B", help="Likewise: what is held against A.")],
    *,
    fail_on_regression: Annotated[
        str,
        typer.Option(
            metavar="PERCENT", show_default=False, help="Exit with 1 if a step of B is slower by more, such as 3%."
        ),
    ] = "",
    within: Annotated[
        str,
        typer.Option(
            metavar="PERCENT",
            show_default=False,
            help="A smaller difference counts as none. By default what --fail-on-regression allows, or 2%.",
        ),
    ] = "",
    accept: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PERCENT",
            show_default=False,
            help="A regression that was agreed to, with its name in the output: B may be slower by so much more.",
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Write what was measured of B there, to be A some day."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", metavar="", help="Replace the file that --save names.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", metavar="", help="For a pull request.")] = False,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="All of it as JSON, on stdout.")] = False,
) -> int:
    """Say whether steps of B are slower or faster than those of A, by how much, and which part of the step changed.

    Noise is told by the runs: with several a side, made in turns (A B A B), small differences are found. With one run
    a side only large ones are certain.

    The exit status is 0 for faster, same, and slower by less than is allowed; 1 for a regression; 4 for not certain.
    """
    limit, near = _share(fail_on_regression, "--fail-on-regression"), _share(within, "--within")
    accepted = dict(_accepted(item) for item in accept or ())
    if markdown and as_json:
        fail("--markdown and --json are both given: choose one", USAGE)
    if save is not None and save.exists() and not force:
        fail(f"{save} exists: name another file, or add --force to replace it", USAGE)
    if before.resolve() == after.resolve():
        fail(f"{before} is given twice: name two different runs, or folders of runs", USAGE)
    from dsprof.compare import NothingToCompare, compare

    try:
        a, b = measured(before), measured(after)
    except (RunError, NothingToCompare) as error:
        fail(error, UNREADABLE)
    comparison = compare(a, b, limit=limit, within=near, accepted=accepted)
    if save is not None:
        content = {BASELINE: [run.to_dict() for run in b]}
        try:
            write_atomically(save, (json.dumps(content, indent=1) + "\n").encode())
        except OSError as error:
            fail(f"{save}: cannot be written ({error.strerror})", USAGE)
    if as_json:
        print(json.dumps(comparison.to_dict(), indent=1))
    else:
        from dsprof.reports import comparison as reports

        sys.stdout.write(reports.markdown(comparison) if markdown else reports.text(comparison))
    return comparison.status


def measured(side: Path) -> list[MeasuredRun]:
    """The runs of one side. Raises RunError where one cannot be read, NothingToCompare where it has no steps."""
    from dsprof import reports
    from dsprof.compare import MeasuredRun, NothingToCompare

    if regular_files.is_file(side):
        try:
            runs = regular_files.read_json(side)[BASELINE]
            return [MeasuredRun.from_dict(run, str(side)) for run in runs]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise NothingToCompare(
                f"{side}: a run is a folder, and this is no baseline that `dsprof compare --save` wrote"
            ) from error
    found = []
    for folder in _runs(side):
        with reading(folder):
            analysis = reports.examine(folder)
        found.append(MeasuredRun.of(analysis, str(folder.path)))
    return found


def _runs(side: Path) -> list[RunFolder]:
    """The run that is named, those of the folder, or of the pattern, which the shell may have left alone."""
    if side.exists() or not glob.has_magic(str(side)):
        return find_runs(side)
    places = [Path(place) for place in sorted(glob.glob(str(side))) if Path(place).is_dir()]
    if not places:
        raise RunError(f"{side}: no folder has such a name")
    return [folder for place in places for folder in find_runs(place)]


def _share(text: str, flag: str) -> float | None:
    """`3%` or `3` as 0.03; None where nothing was given."""
    if not text:
        return None
    try:
        share = float(text.strip().removesuffix("%")) / 100
        if not 0 <= share < 10:
            raise ValueError
    except ValueError:
        fail(f"{flag} {text}: a percentage from 0 to 1000 is wanted, such as 3%", USAGE)
    return share


def _accepted(item: str) -> tuple[str, float]:
    name, _, text = item.rpartition("=")
    if not name:
        fail(f"--accept {item}: a name and a percentage are wanted, such as --accept 'new tokenizer=5%'", USAGE)
    return name, _share(text, f"--accept {name}=") or 0.0
