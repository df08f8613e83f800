"""Writing records: what a recorder is, and the one in Python (the native one is `native/recorder.hpp`).

A recorder never raises into the training job and never slows down for long: when a name or a record
cannot be written (the disk is full, the capture reached its size limit) it stops and counts what it drops.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import threading
import time
from typing import Final, Protocol

from dsprof import schema

from .groups import Groups

LIMIT_BYTES: Final = 2 << 30
"""Default size limit of one rank's capture."""

MAX_NAMES: Final = 65_536
TOO_MANY_NAMES: Final = "(too many names)"
"""Every further name is recorded as this one."""

CHUNK_BYTES: Final = schema.CHUNK_HEADER_BYTES + schema.CHUNK_RECORDS * schema.RECORD_BYTES

MAX_HOST_NS: Final = 2**32 - 1

_BEGUN, _DONE = int(schema.State.BEGUN), int(schema.State.DONE)
_COMM, _WAIT = int(schema.Kind.COMM), int(schema.Kind.WAIT)
_INT64, _DOUBLE, _UINT32, _UINT8 = (struct.Struct("<" + code) for code in "qdIB")


def _offset(field: str) -> int:
    codes = {name: code for name, code, _, _ in schema.RECORD_FIELDS}
    before = "".join(codes.values())[: list(codes).index(field)]
    return struct.calcsize("<" + before)


_END_NS, _AUX, _BYTES, _SEQ, _HOST_NS, _STATE = map(_offset, ("end_ns", "aux", "bytes", "seq", "host_ns", "state"))
_START_NS: Final = 0

NOTHING, CALLS, CALLS_AND_WAITS = 0, 1, 2
"""What of c10d is passed over on a thread, because the engine tells of it."""


class Recorder(Protocol):
    """One rank's capture, open for writing. Thread-safe. Arguments are positional: some are C functions.

    `name` is an id from `intern`; times are ns of the monotonic clock; `bytes` -1 and `value` None mean "none".
    """

    @property
    def records(self) -> int:
        """Records written."""

    @property
    def dropped(self) -> int:
        """Records not written since the capture became full."""

    @property
    def errors(self) -> int:
        """Errors inside the hooks, caught and of no consequence to the job."""

    def intern(self, name: str, /) -> int:
        """The id of a name, from 1. Its line is in names.txt when this returns."""

    def begin(self, kind: int, name: int, bytes: int = -1, value: float | None = None, /) -> int:
        """Record that something begins now; a handle for `end`, 0 if it was not recorded. A wait may be passed over."""

    def end(self, handle: int, value: float | None = None, bytes: int = -1, /) -> None:
        """It ended now. `value` and `bytes` replace what the record has, where given. Handle 0: nothing to do."""

    def put(
        self, kind: int, name: int, start_ns: int, end_ns: int, value: float | None = None, bytes: int = -1, /
    ) -> None:
        """Record something that is over; `end_ns` is not 0."""

    def mark(self, kind: int, name: int, value: float | None = None, bytes: int = -1, /) -> None:
        """Record an instant or a sample: it begins and ends now."""

    def group(self, name: str, /) -> int:
        """The id of the process group that has this name now."""

    def number(self, group: str, /) -> int:
        """Take the next number of a process group's collectives, whoever makes them."""

    def span(
        self, kind: int, name: int, start_ns: int, end_ns: int, issue_ns: int, value: float | None, bytes: int,
        group: int, seq: int, dtype: int, flags: int, place: int, module: int, purpose: int, /,
    ) -> int:  # fmt: skip
        """Record what the engine tells (schema.Flag.ENGINE); a handle for `span_end`, 0 if it was not recorded.

        `end_ns` 0: it is under way. `issue_ns` is of a comm, `value` of anything else; `seq` -1: no number; `place` is
        stage << 16 | micro-batch; `module` and `purpose` are ids, 0: none.
        """

    def span_end(self, handle: int, start_ns: int, end_ns: int, seq: int, /) -> None:
        """It ended, and began when it turned out to have begun. `seq` -1: as it was. Handle 0: nothing to do."""

    def pass_over(self, what: int, /) -> None:
        """On this thread, from now on: NOTHING, CALLS of c10d, or CALLS_AND_WAITS are not recorded, nor numbered."""

    def count_error(self) -> None:
        """Count an error that a hook caught."""

    def enter_backward(self) -> int:
        """This thread enters a backward pass: how many it is in now (more than 1: re-entrant checkpointing)."""

    def leave_backward(self) -> None:
        """It left the innermost one."""

    def disarm_after_fork(self) -> None:
        """In a forked child: never write again, as the files are the parent's."""

    def close(self) -> None:
        """Stop recording; the counters stay readable."""


class BackwardDepth:
    """How many backward passes each thread is in: the part of a `Recorder` that both kinds share."""

    def __init__(self) -> None:
        self._local = threading.local()

    def enter_backward(self) -> int:
        depth = self._local.depth = getattr(self._local, "depth", 0) + 1
        return int(depth)

    def leave_backward(self) -> None:
        self._local.depth -= 1


class PassedOver(threading.local):
    """What of c10d is passed over on this thread."""

    what: int = NOTHING


class PyRecorder(BackwardDepth):
    """A `Recorder` in Python: 1 to 2 us a record."""

    def __init__(self, folder: str | os.PathLike[str], limit_bytes: int = LIMIT_BYTES) -> None:
        """Write into `folder`, which may be renamed later. Raises OSError when it cannot be opened."""
        super().__init__()
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._names = os.open("names.txt", flags, 0o644, dir_fd=self._folder)
        except OSError:
            os.close(self._folder)
            raise
        self._max_chunks = limit_bytes // CHUNK_BYTES
        self._chunks: dict[int, mmap.mmap] = {}
        """The last three, mapped; older ones are written with `pwrite`, as each mapping holds a file descriptor."""
        self._made: set[int] = set()
        self._slots = itertools.count()
        self._drops = itertools.count()
        self._full = False
        self._closed = False
        self._errors = 0
        self._lock = threading.Lock()
        self._ids: dict[str, int] = {}
        self.groups = Groups(self.intern)
        self.passed_over = PassedOver()

    @property
    def records(self) -> int:
        return min(_taken(self._slots), len(self._made) * schema.CHUNK_RECORDS)

    @property
    def dropped(self) -> int:
        return _taken(self._drops)

    @property
    def errors(self) -> int:
        return self._errors

    def count_error(self) -> None:
        self._errors += 1

    def intern(self, name: str, /) -> int:
        known = self._ids.get(name)
        if known is not None:
            return known
        if self._closed:
            return 0
        with self._lock:
            if len(self._ids) >= MAX_NAMES:
                name = TOO_MANY_NAMES
            if name in self._ids:
                return self._ids[name]
            number = len(self._ids) + 1
            line = f"{number}\t{schema.escape_name(name)}\n".encode(errors="backslashreplace")
            try:
                if not self._full and os.write(self._names, line) != len(line):
                    self._full = True
            except OSError:
                self._full = True
            self._ids[name] = number
            return number

    def begin(self, kind: int, name: int, bytes: int = -1, value: float | None = None, /) -> int:
        if kind == _WAIT and self.passed_over.what == CALLS_AND_WAITS:
            return 0
        bits = 0 if value is None else _bits(value)
        return self._write(time.perf_counter_ns(), 0, bits, bytes, name, 0, 0, -1, -1, kind, _BEGUN, 0, 0)

    def end(self, handle: int, value: float | None = None, bytes: int = -1, /) -> None:
        now = time.perf_counter_ns()
        if value is not None:
            self._store(handle, _AUX, _DOUBLE, value or -0.0)
        if bytes != -1:
            self._store(handle, _BYTES, _INT64, bytes)
        self.comm_end(handle, now)

    def put(
        self, kind: int, name: int, start_ns: int, end_ns: int, value: float | None = None, bytes: int = -1, /
    ) -> None:
        bits = 0 if value is None else _bits(value)
        self._write(start_ns, end_ns, bits, bytes, name, 0, 0, -1, -1, kind, _DONE, 0, 0)

    def mark(self, kind: int, name: int, value: float | None = None, bytes: int = -1, /) -> None:
        now = time.perf_counter_ns()
        self.put(kind, name, now, now, value, bytes)

    def comm_begin(
        self, name: int, group: int, seq: int, peer: int, tag: int, bytes: int, dtype: int, flags: int, /
    ) -> int:
        """A collective is issued now."""
        now = time.perf_counter_ns()
        return self._write(now, 0, now, bytes, name, group, seq, peer, tag, _COMM, _BEGUN, dtype, flags)

    def comm_issued(self, handle: int, host_ns: int, /) -> None:
        """The call that issued it took `host_ns`."""
        self._store(handle, _HOST_NS, _UINT32, min(host_ns, MAX_HOST_NS))

    def comm_end(self, handle: int, end_ns: int, /) -> None:
        """It ended; `end_ns` 0: nobody will tell when."""
        self._store(handle, _END_NS, _INT64, end_ns)
        self._store(handle, _STATE, _UINT8, _DONE)

    def group(self, name: str, /) -> int:
        with self.groups.lock:
            return self.groups.named(name).id

    def number(self, group: str, /) -> int:
        with self.groups.lock:
            found = self.groups.named(group)
            number, found.next = found.next, found.next + 1
            return number

    def span(
        self, kind: int, name: int, start_ns: int, end_ns: int, issue_ns: int, value: float | None, bytes: int,
        group: int, seq: int, dtype: int, flags: int, place: int, module: int, purpose: int, /,
    ) -> int:  # fmt: skip
        aux = issue_ns if kind == _COMM else 0 if value is None else _bits(value)
        state = _DONE if end_ns else _BEGUN
        return self._write(
            start_ns, end_ns, aux, bytes, name, group, seq & schema.NO_SEQ, place, module, kind, state, dtype, flags,
            purpose,
        )  # fmt: skip

    def span_end(self, handle: int, start_ns: int, end_ns: int, seq: int, /) -> None:
        self._store(handle, _START_NS, _INT64, start_ns)
        if seq != -1:
            self._store(handle, _SEQ, _UINT32, seq)
        self.comm_end(handle, end_ns)

    def pass_over(self, what: int, /) -> None:
        self.passed_over.what = what

    def disarm_after_fork(self) -> None:
        self._full = self._closed = True
        self._chunks = {}

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._full = self._closed = True
            self._chunks = {}  # not closed: another thread may be writing
            os.close(self._folder)
            os.close(self._names)

    def _write(
        self,
        start_ns: int,
        end_ns: int,
        aux: int,
        bytes: int,
        name: int,
        group: int,
        seq: int,
        peer: int,
        tag: int,
        kind: int,
        state: int,
        dtype: int,
        flags: int,
        host_ns: int = 0,
    ) -> int:
        if self._full:
            if not self._closed:
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
            schema.RECORD.pack_into(
                chunk, at, start_ns, end_ns, aux, bytes, name, thread, group, seq, peer, tag, host_ns, kind, 0, dtype,
                flags,
            )  # fmt: skip
        except struct.error:  # a number out of range: the slot stays empty
            self._errors += 1
            return 0
        chunk[at + _STATE] = state
        return slot + 1

    def _store(self, handle: int, offset: int, field: struct.Struct, value: float) -> None:
        if handle == 0 or self._closed:
            return
        index, slot = divmod(handle - 1, schema.CHUNK_RECORDS)
        at = schema.CHUNK_HEADER_BYTES + slot * schema.RECORD_BYTES + offset
        try:
            chunk = self._chunks.get(index)
            if chunk is not None:
                field.pack_into(chunk, at, value)
                return
            file = os.open(schema.chunk_name(index), os.O_WRONLY, dir_fd=self._folder)
            try:
                os.pwrite(file, field.pack(value), at)
            finally:
                os.close(file)
        except (OSError, struct.error):
            self._errors += 1

    def _map(self, index: int) -> mmap.mmap | None:
        with self._lock:
            if index in self._chunks:
                return self._chunks[index]
            if index >= self._max_chunks or self._full:
                self._full = True
                return None
            try:
                if index in self._made:  # this thread slept through two chunks
                    return _reopen_chunk(self._folder, index)
                chunk = _make_chunk(self._folder, index)
            except (OSError, ValueError):
                self._full = True
                return None
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


def _bits(value: float) -> int:
    """The double's bits; those of 0.0, which mean "no value", become those of -0.0."""
    return int.from_bytes(_DOUBLE.pack(value or -0.0), "little", signed=True)


def _taken(counter: itertools.count[int]) -> int:
    """How many numbers a `count()` has given: its repr is the only view that does not take another."""
    return int(repr(counter)[len("count(") : -1])
