"""A limit on what searches by somebody's regular expressions may take: one of repeats inside repeats, such as
`(a+)+$`, takes years on a name of forty letters."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Final

SEARCH_S: Final = 20.0
"""Seconds that the searches of one file may take in all; a million usual ones take two."""


class SearchTooLongError(Exception):
    """The searches took longer than they may."""


class SearchLimit:
    """A block in which patterns are searched for. All blocks together may take `seconds` of the process's CPU time;
    then the search that runs is ended by a SearchTooLongError. Only in the main thread can it be: elsewhere nothing is
    limited."""

    def __init__(self, seconds: float = SEARCH_S) -> None:
        self._left_s = seconds

    def __enter__(self) -> None:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGVTALRM, _end_search)
            signal.setitimer(signal.ITIMER_VIRTUAL, max(self._left_s, 1e-3))

    def __exit__(self, *_: object) -> None:
        if self._main:
            self._left_s = signal.setitimer(signal.ITIMER_VIRTUAL, 0)[0]
            signal.signal(signal.SIGVTALRM, self._before)


def _end_search(number: int, frame: FrameType | None) -> None:
    raise SearchTooLongError
