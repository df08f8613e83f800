"""The recorder in Python, for where there is no native helper. What it promises is in `record.py`."""

from __future__ import annotations

import functools
import itertools
import os
import struct
import threading
from collections.abc import Callable
from typing import Final, NamedTuple, cast

from dsprof import ondisk, permissions, schema
from dsprof.ondisk import Family

from ..hooking.forks import renew_in_child
from ..hooking.signals import by_handler
from ..system.clock import now_ns
from .chunks import Chunks
from .counters import Counters
from .groups import Groups
from .record import CALLS_AND_WAITS, LIMIT_BYTES, NOTHING, PATIENCE_S, Context, SharedParts
from .wait_targets import Target, Targets

MAX_HOST_NS: Final = 2**32 - 1

_BEGUN, _DONE = int(ondisk.State.BEGUN), int(ondisk.State.DONE)
_COMM, _WAIT = int(schema.Kind.COMM), int(schema.Kind.WAIT)
_SPAN, _COLLECTIVE, _P2P, _KERNEL, _SAMPLE = map(int, Family)
_LAYOUT: Final = {int(family): ondisk.layout(family) for family in Family}
_FAMILY: Final = {int(kind): int(ondisk.USUAL_FAMILY.get(kind, Family.SPAN)) for kind in schema.Kind}
"""Of each kind; a wait may have another."""

_INT64, _DOUBLE, _UINT32, _UINT16, _UINT8 = (struct.Struct("<" + code) for code in "qdIHB")
_START_NS, _END_NS, _NAME, _STATE, _FAMILY_AT, _BYTES = map(
    functools.partial(ondisk.offset, Family.SPAN), ("start_ns", "end_ns", "name", "state", "family", "bytes")
)
_OWN: Final = ondisk.offset(Family.SPAN, "lane")
"""Where the fields begin that differ by family."""
_OWN_FIELDS: Final = {
    int(family): struct.Struct("<" + "".join(code for _, code in ondisk.FAMILY_FIELDS[family])) for family in Family
}
_VALUE: Final = ondisk.offset(Family.SPAN, "value")
assert all(ondisk.offset(family, "bytes") == _BYTES for family in Family)
_SEQ, _HOST_NS = (ondisk.offset(Family.COLLECTIVE, field) for field in ("seq", "host_ns"))
assert ondisk.offset(Family.P2P, "seq") == _SEQ

NAN: Final = float("nan")
"""A value that is none."""


class CallContext(NamedTuple):
    """What a thread communicates for."""

    stage: int = -1
    microbatch: int = -1
    module: int = 0
    """Id of a name, 0: none; so is `purpose`."""
    purpose: int = 0


class PassedOver(threading.local):
    """What of c10d is passed over on this thread."""

    what: int = NOTHING


class Purposes(threading.local):
    """What this thread communicates for."""

    context: CallContext = CallContext()


class PyRecorder(SharedParts):
    """A `Recorder` in Python: 1 to 2 us a record."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        limit_bytes: int = LIMIT_BYTES,
        copied: bool = False,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Write into `folder`, which may be renamed later; `copied`: a copier takes full chunks from there. Raises
        OSError when it cannot be opened."""
        super().__init__()
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._names = permissions.open_to_append("names.txt", dir_fd=directory)
        except OSError:
            os.close(directory)
            raise
        self._counters = Counters(directory)
        self._chunks = Chunks(directory, limit_bytes, self._counters, copied, patience_s)
        self._write, self._store = self._chunks.write, self._chunks.store
        self.note_error = self._counters.count_error
        self._lock = threading.RLock()  # a signal's handler may come in between
        renew_in_child(self, "_lock")
        self._ids: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self.groups = Groups(self.intern)
        self.passed_over = PassedOver()
        self.purposes = Purposes()
        self.targets = Targets()
        self.note_call: Callable[[int, int, int, int], None] = lambda name, bytes, dtype, issue_ns: None
        """Called with name, bytes and dtype before a communication is numbered (`call_sites`)."""

    @property
    def records(self) -> int:
        return self._chunks.records

    @property
    def dropped(self) -> int:
        return self._chunks.dropped

    @property
    def errors(self) -> int:
        return self._counters.errors

    def failures(self) -> list[tuple[str, int, str]]:
        return self._counters.failures()

    def count_step(self) -> None:
        self._counters.add("steps")
        self.targets.here.work = None  # whoever issued it has got it by now

    def intern(self, name: str, /) -> int:
        known = self._ids.get(name)
        if known is not None:
            return known
        if self._chunks.closed:
            return 0
        with self._lock:
            if len(self._ids) >= ondisk.MAX_NAMES - 1:
                name = ondisk.TOO_MANY_NAMES
            if name in self._ids:
                return self._ids[name]
            number = next(self._numbers)
            line = f"{number}\t{ondisk.escape_name(name)}\n".encode(errors="backslashreplace")
            try:
                if not self._chunks.full and os.write(self._names, line) != len(line):
                    self._chunks.full = True
            except OSError as error:
                if by_handler(error):
                    raise
                self._chunks.full = True
            self._ids[name] = number
            return number

    def begin(self, kind: int, name: int, bytes: int = -1, value: float | None = None, /) -> int:
        if kind == _WAIT and self.passed_over.what == CALLS_AND_WAITS:
            return 0
        return self._write_span(kind, _BEGUN, 0, name, now_ns(), 0, value, bytes)

    def end(self, handle: int, value: float | None = None, bytes: int = -1, /) -> None:
        now = now_ns()
        if value is not None:
            self._store(handle, _VALUE, _DOUBLE, value)
        if bytes != -1:
            self._store(handle, _BYTES, _INT64, bytes)
        self.comm_end(handle, now)

    def put(
        self, kind: int, name: int, start_ns: int, end_ns: int, value: float | None = None, bytes: int = -1, /
    ) -> None:
        self._write_span(kind, _DONE, 0, name, start_ns, end_ns, value, bytes)

    def _write_span(
        self, kind: int, state: int, flags: int, name: int, start_ns: int, end_ns: int, value: float | None,
        bytes: int, issue_ns: int = 0, lane: int = 0, stage: int = -1, microbatch: int = -1, module: int = 0,
        purpose: int = 0, corr: int = -1, site: int = 0,
    ) -> int:  # fmt: skip
        """A record of any family but those of communications."""
        family = _FAMILY[kind]
        number = NAN if value is None else value
        if family == _KERNEL:
            fields: tuple[float, ...] = (issue_ns, bytes, corr, module, purpose, number)
        elif family == _SAMPLE:
            fields = (number, bytes, module, purpose)
        else:
            fields = (number, bytes, corr, module, purpose, site)
        head = (_LAYOUT[family], family, kind, state, flags, name, start_ns, end_ns)
        return self._write(*head, lane, stage, microbatch, *fields)

    def mark(self, kind: int, name: int, value: float | None = None, bytes: int = -1, /) -> None:
        now = now_ns()
        self.put(kind, name, now, now, value, bytes)

    def begin_wait(self, name: int, waited: object, /) -> int:
        target = waited if isinstance(waited, Target) else self.targets.of_work(waited)
        return self.wait_begin(name, target, now_ns())

    def wait_begin(self, name: int, target: Target | None, now: int, /) -> int:
        """This thread waits for `target` from now on; `name` is for a wait whose target is unknown."""
        if self.passed_over.what == CALLS_AND_WAITS:
            return 0
        context = self.purposes.context
        if target is None:
            return self._write_span(_WAIT, _BEGUN, 0, name, now, 0, None, -1, 0, 0, *context)
        family, fields = _comm_fields(target, 0, -1, 0, context)
        return self._write(_LAYOUT[family], family, _WAIT, _BEGUN, 0, target.name, now, 0, *fields)

    def target(self, work: object, /) -> Target | None:
        return self.targets.here.issued if work is None else self.targets.of_work(work)

    def stands_for_issued(self, work: object, /) -> None:
        issued = self.targets.here.issued
        if issued is not None:
            self.targets.remember_work(work, issued)

    def begin_coalescing(self) -> None:
        """What a device does is not timed here."""

    issue_coalesced = end_coalescing = begin_coalescing

    def enter_blocking(self) -> None:
        self.targets.here.blocking += 1

    def leave_blocking(self) -> None:
        here = self.targets.here
        here.blocking -= 1
        if not here.blocking:
            self.end(here.wait)
            here.wait, here.inside = 0, []

    def comm_begin(
        self, name: int, group: int, seq: int, peer: int, tag: int, bytes: int, dtype: int, flags: int, p2p: bool, /
    ) -> int:
        """A communication is issued now. `peer` is the root of a collective that has one."""
        now = now_ns()
        here = self.targets.here
        target = here.issued = Target(name, group, seq, peer if p2p else -1, tag if p2p else -1, p2p)
        family, fields = _comm_fields(target, now, bytes, dtype, self.purposes.context, root=peer)
        handle = self._write(_LAYOUT[family], family, _COMM, _BEGUN, flags, name, now, 0, *fields)
        if here.wait:
            self._waits_for(here.wait, target)
        elif here.blocking:
            here.wait = self.wait_begin(0, target, now)
        return handle

    def _waits_for(self, handle: int, target: Target) -> None:
        """Have the record of a wait under way name another communication."""
        family, fields = _comm_fields(target, 0, -1, 0, self.purposes.context)
        self._store(handle, _NAME, _UINT16, target.name)
        self._store(handle, _FAMILY_AT, _UINT8, family)
        self._store(handle, _OWN, _OWN_FIELDS[family], *fields)

    def comm_issued(self, handle: int, host_ns: int, /) -> None:
        """The call that issued this collective, which is no send or receive, took `host_ns`."""
        self._store(handle, _HOST_NS, _UINT32, min(host_ns, MAX_HOST_NS))

    def comm_end(self, handle: int, end_ns: int, /) -> None:
        """It ended; `end_ns` 0: nobody will tell when."""
        self._store(handle, _END_NS, _INT64, end_ns)
        self._store(handle, _STATE, _UINT8, _DONE)

    def group(self, name: str, /) -> int:
        return self.groups.named(name).id

    def number(self, group: str, /) -> int:
        return next(self.groups.named(group).numbers)

    def comm(
        self, kind: int, name: int, start_ns: int, end_ns: int, issue_ns: int, bytes: int, group: int, seq: int,
        peer: int, dtype: int, flags: int, stage: int, microbatch: int, module: int, purpose: int, /,
    ) -> int:  # fmt: skip
        target = Target(name, group, seq & ondisk.NO_SEQ, peer, -1, peer != -1)
        if kind == _COMM:
            self.note_call(name, bytes, dtype, issue_ns)
            self.targets.here.told = target
        context = CallContext(stage, microbatch, module, purpose)
        family, fields = _comm_fields(target, issue_ns, bytes, dtype, context)
        state = _DONE if end_ns else _BEGUN
        return self._write(_LAYOUT[family], family, kind, state, flags, name, start_ns, end_ns, *fields)

    def span(
        self, kind: int, name: int, start_ns: int, end_ns: int, issue_ns: int, value: float | None, bytes: int,
        flags: int, lane: int, stage: int, microbatch: int, module: int, purpose: int, corr: int = -1, site: int = 0, /,
    ) -> int:  # fmt: skip
        state = _DONE if end_ns else _BEGUN
        place = (issue_ns, lane, stage, microbatch, module, purpose, corr, site)
        return self._write_span(kind, state, flags, name, start_ns, end_ns, value, bytes, *place)

    def span_end(self, handle: int, start_ns: int, end_ns: int, seq: int, /) -> None:
        self._store(handle, _START_NS, _INT64, start_ns)
        if seq != -1:
            self._store(handle, _SEQ, _UINT32, seq)
        self.comm_end(handle, end_ns)

    def make_context(self, stage: int, microbatch: int, module: int, purpose: int, /) -> Context:
        return Context(CallContext(stage, microbatch, module, purpose))

    def context(self) -> Context:
        return Context(self.purposes.context)

    def set_context(self, context: Context, /) -> None:
        self.purposes.context = cast(CallContext, context)

    def pass_over(self, what: int, /) -> None:
        self.passed_over.what = what
        self.targets.here.told = None

    def mute(self, muted: bool, /) -> None:
        self._chunks.muted = muted

    def disarm_after_fork(self) -> None:
        self._chunks.abandon()
        self._counters.abandon()

    def close(self) -> None:
        with self._lock:
            if not self._chunks.closed:
                self._chunks.close()
                os.close(self._names)


def _comm_fields(
    target: Target, issue_ns: int, bytes: int, dtype: int, context: CallContext, root: int = -1
) -> tuple[int, tuple[int, ...]]:
    """Family of the record of a communication, or of a wait for one, and that family's fields."""
    stage, microbatch, module, purpose = context
    if target.p2p:
        place = (target.seq, target.group, target.peer, target.tag, stage, microbatch)
        return _P2P, (dtype, module, purpose, issue_ns, bytes, *place)
    of = (stage, microbatch, module, purpose)
    return _COLLECTIVE, (dtype, 0, issue_ns, bytes, target.seq, target.group, root, *of)
