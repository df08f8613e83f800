"""The counters of one capture as `PyRecorder` keeps them: in a mapped file, so that they outlive a SIGKILL. The native
helper's are in `native/counters.hpp`."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
from typing import Final

from dsprof import ondisk, permissions

from ..hooking.forks import renew_in_child

_AT: Final = {name: ondisk.COUNTERS_HEADER.size + 8 * i for i, name in enumerate(ondisk.COUNTERS)}
_COUNT: Final = struct.Struct("<Q")
_UNLISTED: Final = struct.Struct("<I")
_UNLISTED_AT: Final = ondisk.COUNTERS_HEADER.size - _UNLISTED.size


class Counters:
    """Thread-safe; never raises. Where the file cannot be made they count in memory alone."""

    def __init__(self, folder: int) -> None:
        """In the directory `folder` (a descriptor)."""
        self._page: mmap.mmap | bytearray = bytearray(ondisk.COUNTERS_BYTES)
        with contextlib.suppress(OSError, ValueError):
            self._page = _make_page(folder)
        self._lock = threading.RLock()  # a signal's handler may come in between
        renew_in_child(self, "_lock")
        self._entries: dict[str, int] = {}
        """Hook -> where its entry is."""

    def __getitem__(self, name: str) -> int:
        return int(_COUNT.unpack_from(self._page, _AT[name])[0])

    def store(self, name: str, total: int) -> None:
        """Without a lock."""
        self._put(_AT[name], _COUNT, total)

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._put(_AT[name], _COUNT, self[name] + amount)

    @property
    def errors(self) -> int:
        listed = sum(int(_COUNT.unpack_from(self._page, at)[0]) for at in self._entries.values())
        return listed + int(_UNLISTED.unpack_from(self._page, _UNLISTED_AT)[0])

    def failures(self) -> list[tuple[str, int, str]]:
        """Hook, how often, what the first error said."""
        entries = [ondisk.ERROR_ENTRY.unpack_from(self._page, at) for at in list(self._entries.values())]
        return [(ondisk.counter_text(hook), int(count), ondisk.counter_text(said)) for count, hook, said in entries]

    def count_error(self, hook: str, said: str) -> None:
        """One more error of this hook; what the first one said is kept."""
        with self._lock:
            at = self._entries.get(hook)
            if at is not None:
                self._put(at, _COUNT, _COUNT.unpack_from(self._page, at)[0] + 1)
            elif len(self._entries) < ondisk.MOST_ERRORS:
                at = ondisk.ERROR_TABLE + len(self._entries) * ondisk.ERROR_ENTRY.size
                texts = (text.encode(errors="backslashreplace") for text in (hook, said))
                ondisk.ERROR_ENTRY.pack_into(self._page, at, 0, *texts)
                self._put(at, _COUNT, 1)  # last: a reader never sees half an entry
                self._entries[hook] = at
            else:
                self._put(_UNLISTED_AT, _UNLISTED, _UNLISTED.unpack_from(self._page, _UNLISTED_AT)[0] + 1)

    def _put(self, at: int, field: struct.Struct, value: int) -> None:
        packed = field.pack(value)
        self._page[at : at + len(packed)] = packed  # `pack_into` writes zeros first: a kill would leave them

    def abandon(self) -> None:
        """In a forked child: the file is the parent's."""
        self._page = bytearray(self._page)


def _make_page(folder: int) -> mmap.mmap:
    file = permissions.create(ondisk.COUNTERS_NAME, os.O_RDWR, dir_fd=folder)
    try:
        os.posix_fallocate(file, 0, ondisk.COUNTERS_BYTES)
        page = mmap.mmap(file, ondisk.COUNTERS_BYTES)
    except (OSError, ValueError):
        os.unlink(ondisk.COUNTERS_NAME, dir_fd=folder)
        raise
    finally:
        os.close(file)
    ondisk.COUNTERS_HEADER.pack_into(page, 0, ondisk.COUNTERS_MAGIC, 1, 0)
    return page
