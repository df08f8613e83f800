"""`dsprof runs`: which runs there are. And for the other commands: saying what is wrong with a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

from dsprof import regular_files
from dsprof.launch.hints import one_line
from dsprof.run import DEFAULT_PARENT, RunError, RunFolder, began, find_run, find_runs

USAGE: Final = 2
UNREADABLE: Final = 3

__all__ = ["UNREADABLE", "USAGE", "RunArgument", "command", "fail", "find_run", "find_runs", "reading"]

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder, or the folder above: then its newest run.")
]


@contextmanager
def reading(folder: RunFolder) -> Iterator[None]:
    """Have whatever goes wrong with the content of a run be a RunError: it may be damaged, or made up by somebody. The
    traceback is kept in the run folder."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        said, kept = one_line(f"{type(error).__name__}: {error}"), ""
        with suppress(OSError):
            folder.log_error()
            kept = f"; the traceback is in {folder.error_log}"
        raise RunError(f"{folder.path}: cannot be analyzed ({said}); its content may be damaged{kept}") from error


def fail(message: object, status: int) -> NoReturn:
    """End with one line on stderr."""
    print(f"[dsprof] error: {message}", file=sys.stderr)
    raise typer.Exit(status)


def command(
    parent: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A run folder, or the folder that runs lie in.")
    ] = Path(DEFAULT_PARENT),
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """List the runs below a folder, the newest last: how many ranks, how the job ended, and the verdict.

    A job that still runs has no status, nor has one that dsprof did not launch.
    """
    try:
        runs = [_describe(folder) for folder in sorted(find_runs(parent), key=began)]
    except RunError as error:
        fail(error, UNREADABLE)
    if as_json:
        print(json.dumps(runs, indent=1))
        return
    width = max(len(run["run"]) for run in runs)
    for run in runs:
        ranks = "" if run["ranks"] is None else f"{run['ranks']} ranks" if run["ranks"] != 1 else "1 rank"
        state = "no status" if run["status"] is None else f"status {run['status']}"
        print(f"{run['run']:{width}}  {ranks:>8}  {state:10}  {run['verdict']:12}  {run['headline']}".rstrip())


def _describe(folder: RunFolder) -> dict[str, Any]:
    """One line of the list. A run that cannot be read says so in it."""
    found: dict[str, Any] = {
        "run": str(folder.path), "started": "", "ended": "", "ranks": None, "status": None, "verdict": "",
        "headline": "",
    }  # fmt: skip
    try:
        info = folder.read_info()
        found |= {"started": info.started, "ended": info.ended, "ranks": info.world_size, "status": info.status}
    except RunError as error:
        return {**found, "verdict": "unreadable", "headline": str(error)}
    try:
        verdict = regular_files.read_json(folder.findings_json)["verdict"]
        found |= {"verdict": str(verdict["status"]), "headline": str(verdict["headline"])}
    except (OSError, ValueError, KeyError, TypeError):  # not analyzed yet
        found["headline"] = "" if info.status is None else f"dsprof analyze {folder.path}"
    return found
