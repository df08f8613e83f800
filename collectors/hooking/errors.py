"""Errors inside the profiler: they must not reach the job, and must not be hidden either."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dsprof.permissions import make_named_folder, open_to_append
from dsprof.redact import redact_text

from ..capture import identity
from . import private
from .signals import by_handler

LONGEST_LIST: Final = 20

Sink = Callable[[str, str], None]

noted: list[tuple[str, str]] = []
"""Before there is a capture: where, and what."""
_sink: Sink | None = None


def count_error(where: str, error: BaseException) -> None:
    """Count an error that a hook has caught, in the capture under way or to come. Raises it again if it is not ours but
    a signal handler's of the job."""
    if by_handler(error):
        raise error
    private.told_of(error)
    if _sink is not None:
        _sink(where, describe(error))
    elif len(noted) < LONGEST_LIST:
        noted.append((where, describe(error)))


def send_to(sink: Sink | None) -> None:
    """Count errors with `sink` from now on, those noted so far first; None notes again."""
    global _sink
    _sink = sink
    if sink is not None:
        for where, said in noted:
            sink(where, said)
        noted.clear()


def describe(error: BaseException) -> str:
    """In a line, and without secrets: it may be an error of the job's."""
    return redact_text(f"{type(error).__name__}: {error}".partition("\n")[0])


def report_failure(doing: str, error: BaseException) -> None:
    """A failure after which there may be no capture to note it in: leave a word in the run folder, never on stderr.
    Raises what is a signal handler's again."""
    count_error(doing, error)
    leave_word(f"{doing}: {describe(error)}")


def leave_word(text: str) -> None:
    """Leave a line in the run folder, for where there is no capture that could say it. Never raises."""
    try:
        given = identity.setting("DSPROF_RUN")
        folder = Path(given) if given else _own_folder()
        with os.fdopen(open_to_append(folder / f"error.{os.getpid()}.txt"), "a") as file:
            file.write(f"{text}\n")
    except Exception:
        pass  # the folder is gone or the disk full: the launcher reports the missing rank


@functools.cache
def _own_folder() -> Path:
    """The run folder of a process without a launcher, in which no capture could be begun. Raises OSError."""
    folder = identity.run_folder(identity.identify())
    make_named_folder(folder)
    return folder
