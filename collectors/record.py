"""Writing records: what a recorder is, and the one in Python (the native one is `native/recorder.hpp`).

A recorder never raises into the training job and never slows down for long: when a name or a record
cannot be written (the disk is full, the capture reached its size limit) it stops and counts what it drops.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from typing import Final, Protocol

from dsprof import schema

from .chunks import Chunks, offset
from .groups import Groups
from .targets import Target, Targets

LIMIT_BYTES: Final = 2 << 30
"""Default size limit of one rank's capture."""

MAX_NAMES: Final = 65_536
TOO_MANY_NAMES: Final = "(too many names)"
"""Every further name is recorded as this one."""

MAX_HOST_NS: Final = 2**32 - 1

_BEGUN, _DONE = int(schema.State.BEGUN), int(schema.State.DONE)
_COMM, _WAIT = int(schema.Kind.COMM), int(schema.Kind.WAIT)
_P2P = int(schema.Flag.P2P)
_INT64, _DOUBLE, _UINT32, _UINT8, _PLACE = (struct.Struct("<" + code) for code in ("q", "d", "I", "B", "IIii"))

_START_NS, _END_NS, _AUX, _BYTES, _SEQ, _HOST_NS, _STATE, _NAME, _GROUP, _FLAGS = map(
    offset, ("start_ns", "end_ns", "aux", "bytes", "seq", "host_ns", "state", "name", "group", "flags")
)

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

    def begin_wait(self, name: int, waited: object, /) -> int:
        """Record that this thread begins to wait now; a handle for `end`, 0 if it was not recorded.

        `waited` is a c10d work, or what `target` gave of one. Where it is known the record names it, and bears its
        name in place of `name`.
        """

    def target(self, work: object, /) -> object | None:
        """What a wait for this c10d work waits for, for `begin_wait`; None where nobody knows. Of None: the collective
        that this thread issued last."""

    def stands_for_issued(self, work: object, /) -> None:
        """A work that no c10d operator returned: it is of the collective that this thread issued last."""

    def enter_blocking(self) -> None:
        """This thread enters a call that waits inside C++ for the collectives it issues. From the first of them on it
        waits, always for the last; where it issues none, nothing is recorded. Calls may nest."""

    def leave_blocking(self) -> None:
        """It left the innermost one."""

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
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._names = os.open("names.txt", flags, 0o644, dir_fd=directory)
        except OSError:
            os.close(directory)
            raise
        self._chunks = Chunks(directory, limit_bytes)
        self._write, self._store = self._chunks.write, self._chunks.store
        self._errors = 0
        self._lock = threading.Lock()
        self._ids: dict[str, int] = {}
        self.groups = Groups(self.intern)
        self.passed_over = PassedOver()
        self.targets = Targets()

    @property
    def records(self) -> int:
        return self._chunks.records

    @property
    def dropped(self) -> int:
        return self._chunks.dropped

    @property
    def errors(self) -> int:
        return self._errors + self._chunks.errors

    def count_error(self) -> None:
        self._errors += 1

    def intern(self, name: str, /) -> int:
        known = self._ids.get(name)
        if known is not None:
            return known
        if self._chunks.closed:
            return 0
        with self._lock:
            if len(self._ids) >= MAX_NAMES:
                name = TOO_MANY_NAMES
            if name in self._ids:
                return self._ids[name]
            number = len(self._ids) + 1
            line = f"{number}\t{schema.escape_name(name)}\n".encode(errors="backslashreplace")
            try:
                if not self._chunks.full and os.write(self._names, line) != len(line):
                    self._chunks.full = True
            except OSError:
                self._chunks.full = True
            self._ids[name] = number
            return number

    def begin(self, kind: int, name: int, bytes: int = -1, value: float | None = None, /) -> int:
        if kind == _WAIT and self.passed_over.what == CALLS_AND_WAITS:
            return 0
        bits = 0 if value is None else _bits(value)
        seq = schema.NO_SEQ if kind == _WAIT else 0
        return self._write(time.perf_counter_ns(), 0, bits, bytes, name, 0, seq, -1, -1, kind, _BEGUN, 0, 0)

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
        seq = schema.NO_SEQ if kind == _WAIT else 0
        self._write(start_ns, end_ns, bits, bytes, name, 0, seq, -1, -1, kind, _DONE, 0, 0)

    def mark(self, kind: int, name: int, value: float | None = None, bytes: int = -1, /) -> None:
        now = time.perf_counter_ns()
        self.put(kind, name, now, now, value, bytes)

    def begin_wait(self, name: int, waited: object, /) -> int:
        target = waited if isinstance(waited, Target) else self.targets.of_work(waited)
        return self.wait_begin(name, target, time.perf_counter_ns())

    def wait_begin(self, name: int, target: Target | None, now: int, /) -> int:
        """This thread waits for `target` from now on; `name` is for a wait whose target is unknown."""
        if self.passed_over.what == CALLS_AND_WAITS:
            return 0
        name, group, seq, peer, tag, flags = target or (name, 0, schema.NO_SEQ, -1, -1, 0)
        return self._write(now, 0, 0, -1, name, group, seq, peer, tag, _WAIT, _BEGUN, 0, flags)

    def target(self, work: object, /) -> Target | None:
        return self.targets.here.issued if work is None else self.targets.of_work(work)

    def stands_for_issued(self, work: object, /) -> None:
        issued = self.targets.here.issued
        if issued is not None:
            self.targets.remember_work(work, issued)

    def enter_blocking(self) -> None:
        self.targets.here.blocking += 1

    def leave_blocking(self) -> None:
        here = self.targets.here
        here.blocking -= 1
        if not here.blocking:
            self.end(here.wait)
            here.wait, here.inside = 0, []

    def comm_begin(
        self, name: int, group: int, seq: int, peer: int, tag: int, bytes: int, dtype: int, flags: int, /
    ) -> int:
        """A collective is issued now."""
        now = time.perf_counter_ns()
        handle = self._write(now, 0, now, bytes, name, group, seq, peer, tag, _COMM, _BEGUN, dtype, flags)
        here, p2p = self.targets.here, flags & _P2P
        target = here.issued = Target(name, group, seq, peer if p2p else -1, tag if p2p else -1, p2p)
        if here.wait:
            self._store(here.wait, _NAME, _UINT32, name)
            self._store(here.wait, _GROUP, _PLACE, group, seq, target.peer, target.tag)
            self._store(here.wait, _FLAGS, _UINT8, p2p)
        elif here.blocking:
            here.wait = self.wait_begin(0, target, now)
        return handle

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
        if kind == _COMM:
            p2p = flags & _P2P
            self.targets.here.told = Target(name, group, seq & schema.NO_SEQ, module if p2p else -1, -1, p2p)
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
        self.targets.here.told = None

    def disarm_after_fork(self) -> None:
        self._chunks.abandon()

    def close(self) -> None:
        with self._lock:
            if not self._chunks.closed:
                self._chunks.close()
                os.close(self._names)


def _bits(value: float) -> int:
    """The double's bits; those of 0.0, which mean "no value", become those of -0.0."""
    return int.from_bytes(_DOUBLE.pack(value or -0.0), "little", signed=True)
