"""Huge pages for large storages that come and go in host memory.

malloc maps 32 MiB or more anew each time, and to have that page by page costs several times what is written to it.
Where the kernel gives huge pages to who asks (`/sys/kernel/mm/transparent_hugepage/enabled` says `madvise`), ask.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Final

import torch

LEAST: Final = 32 << 20
"""Bytes. What is smaller lies among other things, whose pages are not to be changed (M_MMAP_THRESHOLD, mallopt(3))."""
_ADVICE: Final = getattr(mmap, "MADV_HUGEPAGE", None)
_madvise: Final = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def use_huge_pages(storage: torch.UntypedStorage) -> None:
    """Of a storage in host memory, before it is first written to. Where it is small nothing happens."""
    if _madvise is None or _ADVICE is None or storage.nbytes() < LEAST:
        return
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = storage.data_ptr() + storage.nbytes() - begin
    _madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _ADVICE)  # advice: that it is not taken is no error
