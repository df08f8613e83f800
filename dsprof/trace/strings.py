"""How pandas holds strings while dsprof works: as Python's own, and not in Arrow's arrays.

The names of a table's columns are such an array, too, and every selection of columns reads them. Of tables as small as
those of an analysis, Arrow's take longer for that than all the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pandas as pd

OPTION: Final = "mode.string_storage"


class _Threads:
    """The threads that are within `plain_strings`: the option is one for the whole process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: Any = None

    def enter(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = pd.get_option(OPTION)
                pd.set_option(OPTION, "python")
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                pd.set_option(OPTION, self._before)


_THREADS: Final = _Threads()


@contextmanager
def plain_strings() -> Iterator[None]:
    """Within, strings that pandas makes lie in numpy's arrays of Python objects. The results are the same."""
    _THREADS.enter()
    try:
        yield
    finally:
        _THREADS.leave()
