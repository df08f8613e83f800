"""What dsprof's own engine tells: its communications, waits, copies and marks, and where a step's work really ends.

Each fact is recorded once. While a communication of the engine is under way on a thread, the c10d calls that it makes
there are passed over. Forward is seen by `modules`; backward and step of the engine hold more than the autograd engine
and the optimizer do (buckets that are still under way, the norm, weights sent back), so its spans take their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from dsprof.engine.hooks import BUCKET, FETCH, Span, sizes, subscribe
from dsprof.ondisk import LARGEST_PLACE, Flag
from dsprof.schema import DTYPES, SHARDING, Kind

from ..capture import facts
from ..capture.open_capture import OpenCapture
from ..hooking.uninstall import Uninstall
from ..loop import checkpoints, optimizers, phases
from ..recorder.record import CALLS, CALLS_AND_WAITS, NOTHING

if TYPE_CHECKING:
    from ..recorder.record import Recorder

KINDS: Final = {kind.name.lower(): int(kind) for kind in Kind}
DTYPE_NUMBERS: Final[dict[str | None, int]] = {name: number for number, name in enumerate(DTYPES)}
FOR_SHARDS: Final = (BUCKET, FETCH)
"""Spans of what the engine itself works for shards and buckets."""
INSTANTS: Final = ("mark", "gauge", "mem")
"""Kinds that are told at their end alone."""
MOST_PARAMETERS: Final = 2000
"""Whose sizes are told one by one."""
TOLD: Final = int(Flag.ENGINE)
TOLD_BESIDE: Final = int(Flag.ENGINE | Flag.START_MEASURED | Flag.ASYNC)
"""A communication's that runs beside the computation."""


def install(capture: OpenCapture) -> list[Uninstall]:
    """Record what the engine tells; each of its steps ends a training step."""
    return [watch(capture.recorder, capture.step_ended)]


def watch(recorder: Recorder, on_step: Callable[[], None]) -> Uninstall:
    """Record what the engine tells from now on, and call `on_step` after each of its steps."""
    return subscribe(EngineEvents(recorder, on_step))


class EngineEvents:
    """A listener of `dsprof.engine.hooks`. Spans that began before it listened are left to the other collectors."""

    def __init__(self, recorder: Recorder, on_step: Callable[[], None]) -> None:
        self._recorder = recorder
        self._on_step = on_step
        self._ids: dict[str | None, int] = {None: 0}
        self._open: dict[int, int] = {}
        """id of a span under way -> its record's handle."""
        self._ahead: dict[str, int] = {}
        """Process group -> how far its numbering is ahead of the engine's, which counts its own calls only."""
        self._told_of_model = False

    def begin(self, span: Span) -> None:
        try:
            self._begin(span)
        except Exception as error:
            self._recorder.count_error("engine events", error)

    def end(self, span: Span) -> None:
        try:
            self._end(span)
        except Exception as error:
            self._recorder.count_error("engine events", error)

    def _begin(self, span: Span) -> None:
        if span.kind == "comm":
            beside = span.lane.startswith("comm.")
            # Beside the computation nobody stands still for it; on its thread, c10d's own wait is where it does.
            self._recorder.pass_over(CALLS_AND_WAITS if beside else CALLS)
            self._open[id(span)] = self._record_comm(span, TOLD_BESIDE if beside else TOLD)
        elif span.kind == "launch":  # the communication itself is told when the device has ended it
            self._recorder.pass_over(CALLS_AND_WAITS)
            self._open[id(span)] = self._record(span, span.name)
        elif span.kind == "phase":
            name = self._enter(span.name)
            if name is not None:
                self._open[id(span)] = self._record(span, name)
        else:
            self._open[id(span)] = self._record(span, SHARDING if span.name in FOR_SHARDS else span.name)

    def _end(self, span: Span) -> None:
        if span.kind in ("comm", "launch"):
            self._recorder.pass_over(NOTHING)
        handle = self._open.pop(id(span), None)
        if handle is None:
            if span.kind in INSTANTS:
                self._record(span, span.name)
            return
        seq = -1
        if span.kind == "wait" and span.group is not None and span.seq is not None:
            # What it waited for has begun by now, and is the last of its group: a lane keeps its order. Messages have
            # numbers of their own.
            seq = span.seq + (self._ahead.get(span.group, 0) if span.peer is None else 0)
        self._recorder.span_end(handle, span.start_ns, span.end_ns or 0, seq)
        if span.kind == "phase":
            self._leave(span.name)

    # --- phases that other collectors see too

    def _enter(self, phase: str) -> str | None:
        """The name under which a phase is recorded; None if somebody else records it."""
        if phase == "backward":
            if self._recorder.enter_backward() == 1:  # the autograd engine's own is now part of this one
                phases.backward_begins(self._recorder)
            return "backward"
        if phase == "step":
            optimizers.enter_engine_step(states=True)
            return "optimizer"
        if phase == "optimizer":  # of a step it is one of several tiles, each with an optimizer's step of its own
            return "tile" if optimizers.in_engine_step() else None
        if phase == "checkpoint":
            checkpoints.enter()  # torch.save is now part of this one
        return None if phase == "forward" else phase

    def _leave(self, phase: str) -> None:
        if phase == "backward":
            self._recorder.leave_backward()
        elif phase == "step":
            optimizers.leave_engine_step()
            self._on_step()
            if not self._told_of_model:
                self._told_of_model = True
                every = sizes()
                trained = [elements for elements, is_trained in every if is_trained]
                frozen = sum(elements for elements, is_trained in every if not is_trained)
                each = {"of_parameters": trained} if len(trained) <= MOST_PARAMETERS else {}
                facts.state({"fact": "trained", "elements": sum(trained), "largest": max(trained, default=0),
                             "frozen": frozen, **each})  # fmt: skip
        elif phase == "checkpoint":
            checkpoints.leave()

    # --- records

    def _record_comm(self, span: Span, flags: int) -> int:
        group = span.group or span.lane
        if span.peer is not None:
            return self._write_comm(span, group, -1 if span.seq is None else span.seq, flags)
        seq = self._recorder.number(group)
        if span.seq is not None:
            self._ahead[group] = seq - span.seq
        return self._write_comm(span, group, seq, flags)

    def _write_comm(self, span: Span, group: str, seq: int, flags: int) -> int:
        """A communication, or a wait for one, whose number is known at its end."""
        ids, start_ns, issue_ns = self._ids, span.start_ns, span.issue_ns
        return self._recorder.comm(
            KINDS[span.kind],
            ids.get(span.name) or self._id(span.name),
            start_ns,
            span.end_ns or 0,
            start_ns if issue_ns is None else issue_ns,
            -1 if span.bytes is None else span.bytes,
            self._recorder.group(group),
            seq,
            -1 if span.peer is None else span.peer,
            DTYPE_NUMBERS.get(span.dtype, 0),
            flags,
            min(span.stage, LARGEST_PLACE),
            min(span.microbatch, LARGEST_PLACE),
            ids.get(span.module) or self._id(span.module),
            ids.get(span.purpose) or self._id(span.purpose),
        )

    def _record(self, span: Span, name: str) -> int:
        if span.kind == "wait" and span.group is not None:
            return self._write_comm(span, span.group, -1, TOLD)
        ids = self._ids
        return self._recorder.span(
            KINDS[span.kind],
            ids.get(name) or self._id(name),
            span.start_ns,
            span.end_ns or 0,
            span.issue_ns or 0,
            span.value,
            -1 if span.bytes is None else span.bytes,
            TOLD,
            0 if span.kind == "wait" or span.lane == "main" else self._id(span.lane),
            min(span.stage, LARGEST_PLACE),
            min(span.microbatch, LARGEST_PLACE),
            ids.get(span.module) or self._id(span.module),
            ids.get(span.purpose) or self._id(span.purpose),
            -1 if span.corr is None else span.corr,
        )

    def _id(self, name: str | None) -> int:
        number = self._ids.get(name)
        if number is None:
            number = self._ids[name] = self._recorder.intern(str(name))
        return number
