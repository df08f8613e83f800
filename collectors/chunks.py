"""The chunk files of one capture as `PyRecorder` writes them. The native helper's are in `native/chunks.hpp`.

The next chunk is prepared while the one before it is half full, on a thread of its own that lives for no longer than
that. At the size limit each new chunk takes the place of the oldest but those at the beginning, which are kept.
"""

from __future__ import annotations

import _thread
import itertools
import mmap
import os
import struct
import threading
import time
from typing import Final

from dsprof import ondisk, permissions

from .counters import Counters
from .forks import renew_in_child
from .interrupts import by_handler

CHUNK_BYTES: Final = ondisk.CHUNK_HEADER_BYTES + ondisk.CHUNK_RECORDS * ondisk.RECORD_BYTES
PATIENCE_S: Final = 2.0
"""How long a hook waits for a chunk that is not ready. If that is not enough, the records of all are dropped until it
is."""

_STATE: Final = ondisk.offset(ondisk.Family.SPAN, "state")
_EMPTY: Final = int(ondisk.State.EMPTY)
_RECORDS: Final = ondisk.CHUNK_RECORDS
_HALF: Final = _RECORDS // 2
_STEPS: Final = struct.Struct("<Q")
_STEPS_AT: Final = ondisk.CHUNK_HEADER.size + ondisk.CHUNK_PLACE.size - _STEPS.size


class Chunks:
    """Slots for records in files that are reserved and mapped ahead. Thread-safe; never raises."""

    def __init__(self, folder: int, limit_bytes: int, counters: Counters) -> None:
        """In the directory `folder` (a descriptor), which may be renamed later; the descriptor is closed by `close`."""
        self.full = False
        """The size limit was reached and nothing can be given up, or the disk is full: nothing is written any more."""
        self.muted = False
        """Nothing is to be written for now."""
        self.closed = False
        self._folder = folder
        self._counters = counters
        limit = limit_bytes // CHUNK_BYTES
        self._kept = ondisk.kept_chunks(limit)
        self._ring = limit - self._kept
        """How many of the newest chunks there are at the limit."""
        self._chunks: dict[int, mmap.mmap] = {}
        """The newest, mapped; older ones are written with `pwrite`, as each mapping holds a file descriptor."""
        self._made = 0
        """The number behind the last chunk that was made."""
        self._tried = -1
        """The last chunk that was begun."""
        self._oldest = self._kept
        """The first chunk that was not given up, behind those that are kept."""
        self._slots = itertools.count()
        self._unplaced = itertools.count()
        """Slots taken for which there was no chunk."""
        self._drops = itertools.count()
        self._making = threading.RLock()
        renew_in_child(self, "_making")
        self._inside = False
        """A thread is making a chunk; asked under the lock, it is the asking one."""
        self._late = False
        """A hook has waited for a chunk in vain."""

    @property
    def records(self) -> int:
        return _taken(self._slots) - _taken(self._unplaced)

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
                self._drop()
            return 0
        slot = next(self._slots)
        index, at = divmod(slot, _RECORDS)
        chunk = self._chunks.get(index) or self._obtain(index)
        if chunk is None:
            next(self._unplaced)
            self._drop()
            return 0
        if not at:
            _STEPS.pack_into(chunk, _STEPS_AT, self._counters["steps"])
        elif at == _HALF:
            self._prepare(index + 1)
        place = ondisk.CHUNK_HEADER_BYTES + at * ondisk.RECORD_BYTES
        thread = threading.get_native_id()
        try:
            layout.pack_into(chunk, place, start_ns, end_ns, thread, name, kind, _EMPTY, flags, family, *fields)
        except struct.error as error:  # a number out of range: the slot stays empty
            self._counters.count_error("a record", f"{type(error).__name__}: {error}")
            return 0
        chunk[place + _STATE] = state
        return slot + 1

    def store(self, handle: int, offset: int, fields: struct.Struct, *values: float) -> None:
        """Overwrite fields of a record. Handle 0, or of a record that was given up: nothing to do."""
        if handle == 0 or self.closed:
            return
        index, slot = divmod(handle - 1, _RECORDS)
        at = ondisk.CHUNK_HEADER_BYTES + slot * ondisk.RECORD_BYTES + offset
        try:
            packed = fields.pack(*values)
            chunk = self._chunks.get(index)
            if chunk is not None:
                chunk[at : at + len(packed)] = packed  # `pack_into` writes zeros first: a kill would leave them
                return
            file = os.open(ondisk.chunk_name(index), os.O_WRONLY, dir_fd=self._folder)
            try:
                os.pwrite(file, packed, at)
            finally:
                os.close(file)
        except (OSError, struct.error) as error:
            if by_handler(error):
                raise
            if isinstance(error, FileNotFoundError):
                return  # given up
            self._counters.count_error("the end of a record", f"{type(error).__name__}: {error}")

    def abandon(self) -> None:
        """In a forked child: never write again."""
        self.full = self.closed = True
        self._chunks = {}

    def close(self) -> None:
        if self.closed:
            return
        self.full = self.closed = True
        if not self._making.acquire(timeout=1):
            return  # a disk that does not answer: its thread may go on using the folder
        try:
            for index in range(-(-_taken(self._slots) // _RECORDS), self._made):  # prepared in vain
                _remove(self._folder, index)
            self._chunks = {}  # not closed: another thread may be writing
            os.close(self._folder)
        finally:
            self._making.release()

    def _drop(self) -> None:
        self._counters.store("dropped", next(self._drops) + 1)

    def _prepare(self, index: int) -> None:
        """Have a chunk made on a thread of its own."""
        try:
            _thread.start_new_thread(self._make_ahead, (index,))
        except RuntimeError:  # no thread can be had: it is made when it is needed
            return

    def _make_ahead(self, index: int) -> None:
        with self._making:
            self._make(index)
            self._late = False

    def _obtain(self, index: int) -> mmap.mmap | None:
        """A chunk that is not mapped: made now, unless that takes long."""
        if self._late:
            return None
        began = time.perf_counter_ns()
        if not self._making.acquire(timeout=PATIENCE_S):
            self._late = True
            return None
        try:
            self._counters.add("waits")
            self._counters.add("wait_ns", time.perf_counter_ns() - began)
            if self._inside:  # this thread, in which a signal's handler came in between: its record is dropped
                return None
            chunk = self._make(index)
            if chunk is None and index >= self._made:
                self.full = True
            return chunk
        finally:
            self._late = False
            self._making.release()

    def _make(self, index: int) -> mmap.mmap | None:
        """Make a chunk if there is none yet; None where it was given up or cannot be made. Under the lock."""
        if index < self._made:
            return self._chunks.get(index)  # this thread may have slept through several chunks
        if self.full or (index >= self._kept and not self._ring):
            return None
        self._inside = True
        began = time.perf_counter_ns()
        oldest = max(index - self._ring + 1, self._kept)
        try:
            if self._tried == index:  # what a signal's handler raised has ended that, anywhere in it
                _remove(self._folder, index)
            self._tried = index
            chunk = _make_chunk(self._folder, index, self._kept, oldest - self._kept)
            given_up = range(self._oldest, oldest)
            mapped = {i: c for i, c in self._chunks.items() if i >= index - 2 and i not in given_up}
            self._chunks = {**mapped, index: chunk}
            self._made = index + 1
            self._oldest = oldest
            self._counters.add("given_up", sum(_remove(self._folder, gone) for gone in given_up))
            self._counters.add("prepared")
            self._counters.add("prepare_ns", time.perf_counter_ns() - began)
            return chunk
        except (OSError, ValueError) as error:
            if by_handler(error):
                raise
            return None
        finally:
            self._inside = False


def _make_chunk(folder: int, index: int, kept: int, given_up: int) -> mmap.mmap:
    """Make, reserve and map the chunk file `index` in the directory `folder` (a descriptor).

    Space is reserved first: on a full disk a sparse mapping would end the job with SIGBUS. Raises OSError.
    """
    name = ondisk.chunk_name(index)
    file = permissions.create(name, os.O_RDWR, dir_fd=folder)
    try:
        os.posix_fallocate(file, 0, CHUNK_BYTES)
        chunk = mmap.mmap(file, CHUNK_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except BaseException:
        os.unlink(name, dir_fd=folder)
        raise
    finally:
        os.close(file)
    ondisk.CHUNK_PLACE.pack_into(chunk, ondisk.CHUNK_HEADER.size, kept, given_up, 0)
    header = ondisk.CHUNK_HEADER.pack(
        ondisk.CHUNK_MAGIC, ondisk.FORMAT_VERSION, ondisk.RECORD_BYTES, ondisk.CHUNK_RECORDS, index, os.getpid()
    )
    chunk[: len(header)] = header
    return chunk


def _remove(folder: int, index: int) -> bool:
    """Whether the chunk file was there."""
    try:
        os.unlink(ondisk.chunk_name(index), dir_fd=folder)
    except OSError:
        return False
    return True


def _taken(counter: itertools.count[int]) -> int:
    """How many numbers a `count()` has given: its repr is the only view that does not take another."""
    return int(repr(counter)[len("count(") : -1])
