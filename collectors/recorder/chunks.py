"""The chunk files of one capture as `PyRecorder` writes them. The native helper's are in `native/chunks.hpp`.

A chunk is made on a thread of its own that lives for no longer than that, never in a hook: the first when the capture
is opened, each later one while the one before it is half full. A hook that needs one which is not there yet waits for a
moment at most, without a lock; then its record is dropped and counted. At the size limit each new chunk takes the place
of the oldest but those at the beginning, which are kept.
"""

from __future__ import annotations

import _thread
import itertools
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from dsprof import ondisk, permissions

from ..hooking.forks import renew_in_child
from ..hooking.signals import by_handler
from ..system.clock import now_ns
from .counters import Counters
from .record import PATIENCE_S

CHUNK_BYTES: Final = ondisk.CHUNK_HEADER_BYTES + ondisk.CHUNK_RECORDS * ondisk.RECORD_BYTES
LONGEST_WRITE_S: Final = 60.0
"""After that nobody is about to write the record whose slot is empty in a chunk that is full: it was dropped."""

_STATE: Final = ondisk.offset(ondisk.Family.SPAN, "state")
_EMPTY: Final = int(ondisk.State.EMPTY)
_RECORDS: Final = ondisk.CHUNK_RECORDS
_HALF: Final = _RECORDS // 2
_STEPS: Final = struct.Struct("<Q")
_STEPS_AT: Final = ondisk.CHUNK_HEADER.size + ondisk.CHUNK_PLACE.size - _STEPS.size


class Chunks:
    """Slots for records in files that are reserved and mapped ahead. Thread-safe; never raises."""

    def __init__(
        self,
        folder: int,
        limit_bytes: int,
        counters: Counters,
        copied: bool = False,
        patience_s: float = PATIENCE_S,
        make: Callable[[int, int, int, int], mmap.mmap] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """In the directory `folder` (a descriptor), which may be renamed later; the descriptor is closed by `close`.

        copied: somebody copies the chunks elsewhere, and removes those that are marked as finished
        patience_s: how long a hook waits for a chunk; then the records of all are dropped until it is there
        make: `make_chunk`, or what stands for it
        """
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
        self._oldest = self._kept
        """The first chunk that was not given up, behind those that are kept."""
        self._slots = itertools.count()
        self._unplaced = itertools.count()
        """Slots taken for which there was no chunk."""
        self._drops = itertools.count()
        self._copied, self._patience_s, self._clock = copied, patience_s, clock
        self._make_file = make or make_chunk
        self._making = threading.Lock()
        """Of the threads that make chunks; no hook takes it."""
        renew_in_child(self, "_making")
        self._under_way: dict[str, _thread.LockType] = {}
        """What is free when the chunk that is being made is there; empty: none is being made."""
        self._late = False
        """A hook has waited for it in vain."""
        self._unfinished: dict[int, float] = {}
        """Of a capture that is copied: what is full, and may be written into yet; since when."""
        self._finished: set[int] = set()
        """What was handed over to who copies it."""
        if self._make(0) is None:
            self.full = True

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
            self._start_making(index + 1, needed=False)
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

    def _obtain(self, index: int) -> mmap.mmap | None:
        """A chunk that is not mapped: waited for, if that takes no longer than a moment."""
        if self._late:
            return None
        began = now_ns()
        until = began + int(self._patience_s * 1e9)
        while (gate := self._start_making(index, needed=True)) is not None:
            left_s = (until - now_ns()) / 1e9
            if gate.acquire(timeout=max(left_s, 0.0)):
                gate.release()
                continue
            self._late = True
            if not self._under_way:  # it came in this very moment
                self._late = False
            break
        self._counters.add("waits")
        self._counters.add("wait_ns", now_ns() - began)
        return self._chunks.get(index)

    def _start_making(self, index: int, *, needed: bool) -> _thread.LockType | None:
        """Have a chunk made on a thread of its own, unless one is being made: what is free when that is there; None:
        there is nothing to wait for. `needed`: not being able to make it is the end of the capture."""
        if self.full or index < self._made:
            return None
        gate, started = _thread.allocate_lock(), False
        gate.acquire()
        try:
            current = self._under_way.setdefault("", gate)
            if current is not gate:
                return current
            _thread.start_new_thread(self._make_beside, (index, needed, gate))
            started = True
            return gate
        except RuntimeError:  # no thread can be had: the next one that needs it tries again
            return None
        finally:  # what a signal's handler raises may come anywhere
            if not started and self._under_way.get("") is gate:
                self._made_one(gate)

    def _make_beside(self, index: int, needed: bool, gate: _thread.LockType) -> None:
        try:
            with self._making:
                made = self._make(index) is not None
            if needed and not made and index >= self._made:
                self.full = True
        except Exception as error:
            self._counters.count_error("making a chunk", f"{type(error).__name__}: {error}")
            self.full = True
        finally:
            self._made_one(gate)

    def _made_one(self, gate: _thread.LockType) -> None:
        """Whoever waits goes on. It may be told twice: a signal's handler can raise when the thread has just begun."""
        if self._under_way.get("") is gate:
            del self._under_way[""]
        self._late = False
        with suppress(RuntimeError):  # it is free
            gate.release()

    def _make(self, index: int) -> mmap.mmap | None:
        """Make a chunk if there is none yet; None where it was given up or cannot be made. Of one thread at a time."""
        if index < self._made:
            return self._chunks.get(index)
        if self.full or (index >= self._kept and not self._ring):
            return None
        began = now_ns()
        oldest = max(index - self._ring + 1, self._kept)
        try:
            chunk = self._make_file(self._folder, index, self._kept, oldest - self._kept)
        except (OSError, ValueError):
            return None
        given_up = range(self._oldest, oldest)
        mapped = {i: c for i, c in self._chunks.items() if i >= index - 2 and i not in given_up}
        self._chunks = {**mapped, index: chunk}
        self._made = index + 1
        self._oldest = oldest
        gone = [number for number in given_up if _remove(self._folder, number) or number in self._finished]
        self._counters.add("given_up", len(gone))
        if self._copied:
            self._hand_over(index, given_up)
        self._counters.add("prepared")
        self._counters.add("prepare_ns", now_ns() - began)
        return chunk

    def _hand_over(self, made: int, given_up: range) -> None:
        """Mark the full chunks in which all has ended as finished: who copies them removes them."""
        now = self._clock()
        if made >= 3:
            self._unfinished[made - 3] = now
        for number, since in list(self._unfinished.items()):
            if number in given_up or _finish(self._folder, number, now - since > LONGEST_WRITE_S):
                del self._unfinished[number]
                self._finished.add(number)


def make_chunk(folder: int, index: int, kept: int, given_up: int) -> mmap.mmap:
    """Make, reserve and map the chunk file `index` in the directory `folder` (a descriptor).

    Space is reserved first: on a full disk a sparse mapping would end the job with SIGBUS. What may wait for the disk
    are calls that let go of the interpreter's lock: the header is no store, and what is read is then in memory. Raises
    OSError.
    """
    name = ondisk.chunk_name(index)
    file = permissions.create(name, os.O_RDWR, dir_fd=folder)
    try:
        os.posix_fallocate(file, 0, CHUNK_BYTES)
        os.pread(file, CHUNK_BYTES, 0)
        header = ondisk.CHUNK_HEADER.pack(
            ondisk.CHUNK_MAGIC, ondisk.FORMAT_VERSION, ondisk.RECORD_BYTES, ondisk.CHUNK_RECORDS, index, os.getpid()
        )
        os.pwrite(file, header + ondisk.CHUNK_PLACE.pack(kept, given_up, 0), 0)
        return mmap.mmap(file, CHUNK_BYTES, flags=mmap.MAP_SHARED)
    except BaseException:
        os.unlink(name, dir_fd=folder)
        raise
    finally:
        os.close(file)


def _finish(folder: int, index: int, old: bool) -> bool:
    """Mark a full chunk as finished, unless a record in it has not ended. `old`: what is empty will stay so. Whether it
    is finished, or gone."""
    try:
        file = os.open(ondisk.chunk_name(index), os.O_RDWR, dir_fd=folder)
    except OSError:
        return True
    try:
        states = os.pread(file, CHUNK_BYTES, 0)[ondisk.CHUNK_HEADER_BYTES + _STATE :: ondisk.RECORD_BYTES]
        if int(ondisk.State.BEGUN) in states or (_EMPTY in states and not old):
            return False
        os.pwrite(file, ondisk.CHUNK_FINISHED.pack(1), ondisk.CHUNK_FINISHED_AT)
        return True
    except OSError:
        return False
    finally:
        os.close(file)


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
