"""The chunk files of one capture as `PyRecorder` writes them. The native helper's are in `native/recorder.hpp`."""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import threading
from typing import Final

from dsprof import schema

CHUNK_BYTES: Final = schema.CHUNK_HEADER_BYTES + schema.CHUNK_RECORDS * schema.RECORD_BYTES


_STATE: Final = schema.offset(schema.Family.SPAN, "state")
_EMPTY: Final = int(schema.State.EMPTY)


class Chunks:
    """Slots for records in files that are reserved and mapped as they are needed. Thread-safe; never raises."""

    def __init__(self, folder: int, limit_bytes: int) -> None:
        """In the directory `folder` (a descriptor), which may be renamed later; the descriptor is closed by `close`."""
        self.full = False
        """The size limit was reached, or the disk is full: nothing is written any more."""
        self.muted = False
        """Nothing is to be written for now."""
        self.closed = False
        self.errors = 0
        """Records and fields that could not be written."""
        self._folder = folder
        self._max_chunks = limit_bytes // CHUNK_BYTES
        self._chunks: dict[int, mmap.mmap] = {}
        """The last three, mapped; older ones are written with `pwrite`, as each mapping holds a file descriptor."""
        self._made: set[int] = set()
        self._slots = itertools.count()
        self._drops = itertools.count()
        self._lock = threading.RLock()
        self._mapping = False

    @property
    def records(self) -> int:
        return min(_taken(self._slots), len(self._made) * schema.CHUNK_RECORDS)

    @property
    def dropped(self) -> int:
        return _taken(self._drops)

    def write(
        self, layout: struct.Struct, family: int, kind: int, state: int, flags: int, name: int, start_ns: int,
        end_ns: int, *fields: float,
    ) -> int:  # fmt: skip
        """Write a record of this thread, with the fields of its family in their order; a handle for `store`, 0 if it
        was not written."""
        if self.muted:
            return 0
        if self.full:
            if not self.closed:
                next(self._drops)
            return 0
        slot = next(self._slots)
        chunk = self._chunks.get(slot // schema.CHUNK_RECORDS) or self._map(slot // schema.CHUNK_RECORDS)
        if chunk is None:
            next(self._drops)
            return 0
        at = schema.CHUNK_HEADER_BYTES + slot % schema.CHUNK_RECORDS * schema.RECORD_BYTES
        thread = threading.get_native_id()
        try:
            layout.pack_into(chunk, at, start_ns, end_ns, thread, name, kind, _EMPTY, flags, family, *fields)
        except struct.error:  # a number out of range: the slot stays empty
            self.errors += 1
            return 0
        chunk[at + _STATE] = state
        return slot + 1

    def store(self, handle: int, offset: int, fields: struct.Struct, *values: float) -> None:
        """Overwrite fields of a record. Handle 0: nothing to do."""
        if handle == 0 or self.closed:
            return
        index, slot = divmod(handle - 1, schema.CHUNK_RECORDS)
        at = schema.CHUNK_HEADER_BYTES + slot * schema.RECORD_BYTES + offset
        try:
            chunk = self._chunks.get(index)
            if chunk is not None:
                fields.pack_into(chunk, at, *values)
                return
            file = os.open(schema.chunk_name(index), os.O_WRONLY, dir_fd=self._folder)
            try:
                os.pwrite(file, fields.pack(*values), at)
            finally:
                os.close(file)
        except (OSError, struct.error):
            self.errors += 1

    def abandon(self) -> None:
        """In a forked child: never write again."""
        self.full = self.closed = True
        self._chunks = {}

    def close(self) -> None:
        with self._lock:
            if self.closed:
                return
            self.full = self.closed = True
            self._chunks = {}  # not closed: another thread may be writing
            os.close(self._folder)

    def _map(self, index: int) -> mmap.mmap | None:
        with self._lock:
            if index in self._chunks:
                return self._chunks[index]
            if self._mapping:  # by this thread, in which a signal's handler came in between: its record is dropped
                return None
            if index >= self._max_chunks or self.full:
                self.full = True
                return None
            self._mapping = True
            try:
                if index in self._made:  # this thread slept through two chunks
                    return _reopen_chunk(self._folder, index)
                chunk = _make_chunk(self._folder, index)
            except (OSError, ValueError):
                self.full = True
                return None
            finally:
                self._mapping = False
            self._made.add(index)
            self._chunks = {**{i: c for i, c in self._chunks.items() if i > index - 3}, index: chunk}
            return chunk


def _make_chunk(folder: int, index: int) -> mmap.mmap:
    """Make, reserve and map the chunk file `index` in the directory `folder` (a descriptor).

    Space is reserved first: on a full disk a sparse mapping would end the job with SIGBUS. Raises OSError.
    """
    name = schema.chunk_name(index)
    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=folder)
    try:
        os.posix_fallocate(file, 0, CHUNK_BYTES)
        chunk = mmap.mmap(file, CHUNK_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except (OSError, ValueError):
        os.unlink(name, dir_fd=folder)
        raise
    finally:
        os.close(file)
    header = schema.CHUNK_HEADER.pack(
        schema.CHUNK_MAGIC, schema.FORMAT_VERSION, schema.RECORD_BYTES, schema.CHUNK_RECORDS, index, os.getpid()
    )
    chunk[: len(header)] = header
    return chunk


def _reopen_chunk(folder: int, index: int) -> mmap.mmap:
    file = os.open(schema.chunk_name(index), os.O_RDWR, dir_fd=folder)
    try:
        return mmap.mmap(file, CHUNK_BYTES)
    finally:
        os.close(file)


def _taken(counter: itertools.count[int]) -> int:
    """How many numbers a `count()` has given: its repr is the only view that does not take another."""
    return int(repr(counter)[len("count(") : -1])
