"""`dsprof report`: the HTML bottleneck report of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from dsprof.atomic import write_atomically
from dsprof.run import DEFAULT_PARENT, RunError

from .runs import UNREADABLE, USAGE, RunArgument, fail, find_run, reading


def command(
    run: RunArgument = Path(DEFAULT_PARENT),
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", show_default=False, help="Default: report.html in the run folder."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    open_it: Annotated[bool, typer.Option("--open/--no-open", help="Open the report in a browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the path and the verdict as JSON.")] = False,
) -> None:
    """Write the HTML report of a run, one file that needs no network, and print its path."""
    from dsprof import reports

    try:
        folder = find_run(run)
    except RunError as error:
        fail(error, UNREADABLE)
    target = folder.report_html if output is None else output
    if output is not None:
        if target.is_dir():
            fail(f"{target}: is a folder; name a file in it", USAGE)
        if target.exists() and not force and not _same(target, folder.report_html):
            fail(f"{target}: exists; choose another name, or --force to overwrite it", USAGE)
    try:
        with reading(folder):
            analysis = reports.examine(folder)
            from dsprof.reports import html

            page = html.render(analysis)
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


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()
