"""`dsprof analyze`: the verdict of a run that has ended."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dsprof.run import DEFAULT_PARENT, RunError

from .progress import progress
from .runs import UNREADABLE, RunArgument, fail, find_run, reading


def command(
    run: RunArgument = Path(DEFAULT_PARENT),
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings.json instead of the verdict.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the verdict's one sentence only.")] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            metavar="N",
            min=1,
            show_default=False,
            help="Processes that analyze ranks. Default: one for a small trace, one a core for a large one.",
        ),
    ] = None,
) -> None:
    """Print the verdict on a run: what is slow, why, what to change, and how much that helps.

    Merges the captures where no launcher of dsprof did, and brings findings.json up to date.
    """
    from dsprof import reports

    try:
        folder = find_run(run)
        with reading(folder):
            analysis = reports.finish(folder, report=False, jobs=jobs, observer=None if quiet else progress())
            findings = reports.findings_json(analysis).decode() if as_json else ""
    except RunError as error:
        fail(error, UNREADABLE)
    if as_json:
        sys.stdout.write(findings)
    elif quiet:
        print(analysis.verdict.headline)
    else:
        from dsprof.reports import terminal

        terminal.render(analysis, sys.stdout)
