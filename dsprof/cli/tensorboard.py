"""`dsprof tensorboard`: the curves and the verdict of one run or several in TensorBoard."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from dsprof import regular_files
from dsprof.permissions import LINK
from dsprof.run import DEFAULT_PARENT, RunError, RunFolder

from .runs import UNREADABLE, USAGE, fail, find_runs, reading


def command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder, or the folder above: then all of its runs.")
    ] = Path(DEFAULT_PARENT),
    *,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve on; 0 takes a free one.")] = 6006,
    host: Annotated[str, typer.Option(help="Address to serve on; 0.0.0.0 lets other machines in.")] = "localhost",
    serve: Annotated[bool, typer.Option("--serve/--no-serve", help="Only write the event files.")] = True,
) -> None:
    """Show runs in TensorBoard: their steps, their budget, and the verdict. Ctrl-C ends it."""
    try:
        folders = find_runs(run)
    except RunError as error:
        fail(error, UNREADABLE)
    failures = [failure for folder in folders if (failure := _bring_up_to_date(folder)) is not None]
    if len(failures) == len(folders):
        fail(failures[0], UNREADABLE)
    for failure in failures:
        print(f"[dsprof] warning: {failure}", file=sys.stderr)
    for folder in folders:
        link = next(_links(folder.tensorboard), None)
        if link is not None and serve:
            fail(f"{link}: {LINK}, and TensorBoard would; remove it", UNREADABLE)
    logdir = folders[0].tensorboard if len(folders) == 1 else run
    if serve:
        _serve(logdir, host, port)
    else:
        print(logdir)


def _bring_up_to_date(folder: RunFolder) -> str | None:
    """Write the event files unless they are newer than the capture; what went wrong, if anything."""
    if not _stale(folder):
        return None
    from dsprof import reports

    try:
        with reading(folder):
            analysis = reports.examine(folder)
        reports.write_tensorboard(analysis, folder)
    except RunError as error:
        return str(error)
    except OSError as error:
        return f"{folder.tensorboard}: cannot be written ({error.strerror or error}); copy the run to a folder of yours"
    return None


def _links(folder: Path) -> Iterator[Path]:
    """What below the folder, or the folder itself, is a link."""
    if folder.is_symlink():
        yield folder
    for parent, folders, files in os.walk(folder):
        yield from (path for name in (*folders, *files) if (path := Path(parent, name)).is_symlink())


def _stale(folder: RunFolder) -> bool:
    below = [
        path for run in regular_files.folders(folder.tensorboard) for path in regular_files.files(run, "*tfevents*")
    ]
    written = [path.stat().st_mtime_ns for path in below]
    return not written or min(written) < folder.changed_ns


def _serve(logdir: Path, host: str, port: int) -> None:
    """Run TensorBoard until it is interrupted."""
    import threading

    from tensorboard import program

    server = program.TensorBoard(plugins=_plugins())
    server.configure(logdir=str(logdir), host=host, port=port, reload_interval=30, load_fast="false")
    try:
        url = server.launch()
    except program.TensorBoardServerException as error:
        fail(f"TensorBoard does not start: {error}; choose another with --port or --host", USAGE)
    print(f"TensorBoard on {logdir}: {url}#dsprof (Ctrl-C ends it)", flush=True)
    if host == "localhost" and os.environ.get("SSH_CONNECTION"):
        print(_from_elsewhere(url), flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        return


def _plugins() -> list[Any]:
    """TensorBoard's own and those that are installed, the tab among them."""
    from tensorboard import default

    from dsprof.reports.tab.loader import TabLoader

    plugins = default.get_plugins()
    return plugins if TabLoader in plugins else [*plugins, TabLoader]  # a checkout has no entry point


def _from_elsewhere(url: str) -> str:
    """What to type on the machine that one sits at."""
    port = url.rstrip("/").rpartition(":")[2]
    return f"from your own machine: ssh -L {port}:localhost:{port} {socket.gethostname()}, then open {url}#dsprof there"
