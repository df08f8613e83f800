"""Memory that was freed, and that the C library keeps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def give_back() -> None:
    """Let the operating system have what is free.

    Of each rank small arrays are made, of which some stay and most are freed, and what is free between those that stay
    glibc gives back when it is asked to, and not before: of 512 ranks that is a quarter of all that is held. Other C
    libraries give it back by themselves.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return found
