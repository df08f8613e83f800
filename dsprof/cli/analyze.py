"""`dsprof analyze`: the verdict of a run that has ended."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from dsprof.run import DEFAULT_PARENT, RunError

from .progress import progress
from .runs import UNREADABLE, USAGE, RunArgument, fail, find_run, reading


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
    dask: Annotated[
        str | None,
        typer.Option(
            "--dask",
            metavar="ADDRESS",
            show_default=False,
            help="Have the workers of a Dask cluster analyze ranks: its scheduler (tcp://HOST:8786, or tls://), or the "
            "path of its scheduler file.",
        ),
    ] = None,
) -> None:
    """Print the verdict on a run: what is slow, why, what to change, and how much that helps.

    Merges the captures where no launcher of dsprof did, and brings findings.json up to date.
    """
    from dsprof import reports
    from dsprof.trace.dask_cluster import ClusterError, cluster

    if dask is not None and jobs is not None:
        fail("--jobs are processes of this machine, and --dask names other workers: give one of them", USAGE)
    try:
        folder = find_run(run)
        with nullcontext() if dask is None else cluster(dask, folder, _tell) as executor, reading(folder):
            analysis = reports.finish(
                folder, report=False, jobs=jobs, observer=None if quiet else progress(), executor=executor
            )
            findings = reports.findings_json(analysis).decode() if as_json else ""
    except ClusterError as error:
        fail(error, USAGE)
    except RunError as error:
        fail(error, UNREADABLE)
    if as_json:
        sys.stdout.write(findings)
    elif quiet:
        print(analysis.verdict.headline)
    else:
        from dsprof.reports import terminal

        terminal.render(analysis, sys.stdout)


def _tell(text: str) -> None:
    print(f"[dsprof] {text}", file=sys.stderr)
