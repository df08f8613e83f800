"""Memory that was freed, and that the C library keeps."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

M_MMAP_THRESHOLD: Final = -3
LARGE_BYTES: Final = 1 << 20


def large_apart() -> None:
    """From now on let what is large lie apart, so that it is the operating system's again as soon as it is freed.

    With each large array that is freed, glibc takes larger ones for small, up to 32 MB: arrays as large as a graph's
    come to lie between others, which keep the room of those that were freed. To stop that cannot be undone, and what
    makes and frees large arrays all the time takes longer then: it is for a process that does nothing but analyze.
    """
    library = _library()
    if library is not None and hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def give_back() -> None:
    """Let the operating system have what is free.

    Of each rank small arrays are made, of which some stay and most are freed, and what is free between those that stay
    glibc gives back when it is asked to, and not before: of 512 ranks that is a quarter of all that is held. Other C
    libraries give it back by themselves.
    """
    library = _library()
    if library is not None and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


@cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
