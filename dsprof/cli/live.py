"""`dsprof live`: a job while it runs, from another terminal."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dsprof import permissions
from dsprof.collectors.capture import scratch
from dsprof.run import DEFAULT_PARENT, RunError, RunFolder
from dsprof.settings import load as load_settings

from .runs import UNREADABLE, RunArgument, fail, find_run, reading

if TYPE_CHECKING:
    from dsprof.reports.live import LiveLook

SHARE: Final = 0.2
"""Of one core, at most, that looking takes."""
NICE: Final = 10


def command(
    run: RunArgument = Path(DEFAULT_PARENT),
    *,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.5, help="How often to look, at most.")] = 5.0,
    once: Annotated[bool, typer.Option("--once", metavar="", help="Look once, and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print findings.json of each look on a line of stdout.")
    ] = False,
) -> None:
    """Watch a job while it runs: steps a second, where its steps go, memory, and the verdict so far.

    The newest steps of each rank are read and judged, as `dsprof analyze` judges all of them in the end. The job is not
    touched, and nothing is written. It works on the machine that the job runs on, and on any that sees the run folder.
    Leave with q or Ctrl-C; it ends when the job does.
    """
    try:
        folder = find_run(run)
        folder.read_info()
    except RunError as error:
        fail(error, UNREADABLE)
    with suppress(OSError):
        os.nice(NICE)
    show = _as_json if as_json else _on_screen if sys.stdout.isatty() and not once else _as_lines
    with _keys() as pressed, suppress(KeyboardInterrupt):
        for look in looks(folder, every, once=once, wait=pressed):
            show(look)


def looks(folder: RunFolder, every_s: float, *, once: bool, wait: Callable[[float], bool]) -> Iterator[LiveLook]:
    """One look after the other until the job has ended, or `wait`, which waits so many seconds, says to leave."""
    from dsprof.reports import live as reports

    places = _written_first(folder)
    while True:
        began = time.monotonic()
        ended = folder.read_info().ended is not None
        try:
            with reading(folder):
                analysis = reports.examine(folder, places)
        except RunError as error:
            fail(error, UNREADABLE)
        yield reports.LiveLook(folder, analysis, ended)
        if ended or once:
            return
        took = time.monotonic() - began
        if wait(max(every_s - took, took / SHARE - took)):
            return


def _written_first(folder: RunFolder) -> tuple[Path, ...]:
    """Folders of this host, and of this user, in which the ranks of the run may write first."""
    found = []
    for place in scratch.places(folder.path, load_settings(environ=os.environ).scratch):
        with suppress(OSError):  # there is none, or it is somebody else's
            permissions.check_own(place.parent)
            found.append(place)
    return tuple(found)


# --- the terminal ---------------------------------------------------------------------------------


def _as_json(look: LiveLook) -> None:
    from dsprof import reports

    found = None if look.analysis is None else json.loads(reports.findings_json(look.analysis))
    print(json.dumps({"ended": look.ended, "findings": found}), flush=True)


def _as_lines(look: LiveLook) -> None:
    from dsprof.reports import live

    sys.stdout.write(live.text(look.folder.path.name, look.analysis, sys.stdout, ended=look.ended, height=None))
    sys.stdout.flush()


def _on_screen(look: LiveLook) -> None:
    """In place of the last look; what ends stays on the screen."""
    from dsprof.reports import live

    size = os.get_terminal_size()
    said = live.text(look.folder.path.name, look.analysis, sys.stdout, ended=look.ended, height=size.lines - 1)
    sys.stdout.write(f"\x1b[H\x1b[J{said}")
    sys.stdout.flush()


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """A function that waits so many seconds, or until q is pressed: then it is true."""

    def sleep(seconds: float) -> bool:
        time.sleep(seconds)
        return False

    if not sys.stdin.isatty() or not sys.stdout.isatty():
        yield sleep
        return
    import termios
    import tty

    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)

    def pressed(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([file], [], [], left)[0] and os.read(file, 1) in (b"q", b"Q", b""):
                return True
        return False

    try:
        tty.setcbreak(file)
        yield pressed
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)
