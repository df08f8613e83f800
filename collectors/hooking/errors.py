"""Errors inside the profiler: they must not reach the job, and must not be hidden either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dsprof.redact import redact_text

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
