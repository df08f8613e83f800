"""What the engine reports to listeners, one span for each thing it does; and, asked, what its memory is for.

The engine knows nothing of its listeners. The collectors subscribe when a run is profiled, the engine's own debugging
sections (wall_clock_breakdown, comms_logger, ...) when they are switched on. With nobody listening a span costs one
`if`.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypedDict, Unpack

Kind = Literal["phase", "comm", "launch", "wait", "module", "pipe", "copy", "mem", "mark", "gauge"]
"""Of the trace's kinds (docs/trace.md), those that an engine can report."""

Purpose = Literal[
    "gradient", "parameter", "activation", "tensor-parallel", "context-parallel", "pipeline", "norm", "barrier",
    "optimizer", "checkpoint", "other",
]  # fmt: skip


MemoryPart = Literal["parameters", "gradients", "optimizer_states"]

Position = tuple[int, int, int]
"""Step, micro-batch and pipeline stage."""


@dataclass(slots=True)
class Span:
    """One thing that happened, or is under way as long as `end_ns` is None. Times are CLOCK_MONOTONIC nanoseconds."""

    kind: Kind
    name: str
    lane: str
    """`main`, `autograd`, `comm.<lane>`, `io.nvme`: spans of one lane nest or are disjoint."""
    step: int
    """Optimizer steps taken before this one; the first is 0."""
    microbatch: int
    """Number of the micro-batch within the step."""
    stage: int
    """Pipeline stage that it is of; 0 without a pipeline."""
    start_ns: int
    end_ns: int | None = None
    issue_ns: int | None = None
    """When a communication was submitted to its lane."""
    module: str | None = None
    purpose: Purpose | None = None
    group: str | None = None
    seq: int | None = None
    """Number of a collective in its group: the same on every rank of the group. The engine's groups are its own; in
    those without a lane, whose calls are made one after the other, spans are numbered as they are opened."""
    bytes: int | None = None
    """As nccl-tests' S: the larger of the total input and output of one rank."""
    dtype: str | None = None
    value: float | None = None
    peer: int | None = None
    """The other side of a send or a receive, a rank of `group`; `seq` counts those of the same way between the two."""
    corr: int | None = None
    """Of a copy beside the computation and of the waits for it, the same number, which no other copy has."""

    @property
    def dur_ns(self) -> int:
        """Nanoseconds it took; 0 while it is under way."""
        return 0 if self.end_ns is None else self.end_ns - self.start_ns


class Attributes(TypedDict, total=False):
    """What a span is about: its fields of these names."""

    module: str | None
    purpose: Purpose | None
    group: str | None
    seq: int | None
    bytes: int | None
    dtype: str | None
    value: float | None
    peer: int | None
    corr: int | None


class Listener(Protocol):
    """Who wants to know. It is called on the thread where the thing happens, and must be quick."""

    def begin(self, span: Span) -> None:
        """`span` has begun; `end_ns` is None."""

    def end(self, span: Span) -> None:
        """`span`, the same object, has ended. A mark or a gauge comes here alone."""


class HoldsMemory(Protocol):
    """A part of an engine that has tensors which no parameter of the script's leads to."""

    def memory(self) -> Iterable[tuple[MemoryPart, object]]:
        """What each of them is for, and the tensor. Of two in one storage the first counts."""

    def sizes(self) -> Iterable[tuple[int, bool]]:
        """Elements of each parameter, whole, as this rank has it, and whether it is trained; nothing of what has
        buffers alone."""


_listeners: tuple[Listener, ...] = ()

_holders: weakref.WeakSet[HoldsMemory] = weakref.WeakSet()

BUCKET: Final = "(bucket)"
"""Name of the `module` spans in which the engine works for buckets of gradients in backward: it copies gradients in,
launches what is complete, and waits for what is to be waited for. No module of a model can have it."""
FETCH: Final = "(fetch)"
"""The same of those in which it has a module's parameters whole, before its forward and its backward, and lets go of
them after its forward."""

DEADLOCK: Final = "deadlock: "
"""Begins the name of the mark for a deadlock that was proved; then comes what is raised."""

FAILURES: Final[list[str]] = []
"""Errors raised by listeners, the first few: reporting must not stop the training."""


def subscribe(listener: Listener) -> Callable[[], None]:
    """Report every span of every engine of this process to `listener`; call the result to stop that."""
    global _listeners
    _listeners = (*_listeners, listener)

    def unsubscribe() -> None:
        global _listeners
        _listeners = tuple(other for other in _listeners if other is not listener)

    return unsubscribe


def holds_memory(holder: HoldsMemory) -> None:
    """Have `memory_held` tell of what `holder` has, as long as it lives."""
    _holders.add(holder)


def memory_held() -> Iterator[tuple[MemoryPart, object]]:
    """What the engines of this process have, each tensor with what it is for."""
    for holder in list(_holders):
        yield from holder.memory()


def sizes() -> list[tuple[int, bool]]:
    """Elements of each parameter that engines of this process have, and whether it is trained."""
    return [size for holder in list(_holders) for size in holder.sizes()]


class Hooks:
    """One engine's side: where its training stands, and the spans of what it does."""

    def __init__(self, stage: int = 0, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.step = 0
        self.microbatch = 0
        self.stage = stage
        self._clock = clock
        self._seqs: dict[str, int] = {}
        self._own: tuple[Listener, ...] = ()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Report the spans of this engine alone to `listener`; call the result to stop that."""
        self._own = (*self._own, listener)

        def unsubscribe() -> None:
            self._own = tuple(other for other in self._own if other is not listener)

        return unsubscribe

    @property
    def listening(self) -> bool:
        """Whether anybody is."""
        return bool(_listeners or self._own)

    @property
    def position(self) -> Position:
        """Where training stands: step, micro-batch and pipeline stage."""
        return self.step, self.microbatch, self.stage

    def begin(
        self,
        kind: Kind,
        name: str,
        *,
        lane: str = "main",
        issue_ns: int | None = None,
        at: Position | None = None,
        **attributes: Unpack[Attributes],
    ) -> Span | None:
        """Open a span; None, for `end` to pass over, if nobody listens. `at` is the present position, unless it is work
        that was submitted at another."""
        if not (_listeners or self._own):
            return None
        span = Span(kind, name, lane, *(at or self.position), self._clock(), None, issue_ns, **attributes)
        if kind == "comm" and span.group is not None and span.seq is None:
            span.seq = self._seqs[span.group] = self._seqs.get(span.group, -1) + 1
        for listener in (*_listeners, *self._own):
            try:
                listener.begin(span)
            except Exception as error:
                _note(error)
        return span

    def end(self, span: Span | None, at_ns: int | None = None) -> None:
        """Close a span that `begin` opened, now or at a time known otherwise (a device's)."""
        if span is None:
            return
        span.end_ns = self._clock() if at_ns is None else at_ns
        self._ended(span)

    @contextlib.contextmanager
    def span(
        self,
        kind: Kind,
        name: str,
        *,
        lane: str = "main",
        at: Position | None = None,
        **attributes: Unpack[Attributes],
    ) -> Iterator[None]:
        """`begin` and `end` around a block."""
        if not (_listeners or self._own):
            yield
            return
        span = self.begin(kind, name, lane=lane, at=at, **attributes)
        try:
            yield
        finally:
            self.end(span)

    def mark(
        self, name: str, *, kind: Literal["mark", "gauge", "mem"] = "mark", **attributes: Unpack[Attributes]
    ) -> None:
        """Something without duration: an overflow, a parameter released, a loss scale."""
        if not (_listeners or self._own):
            return
        now = self._clock()
        span = Span(kind, name, "main", *self.position, now, now, None, **attributes)
        self._ended(span)

    def _ended(self, span: Span) -> None:
        for listener in (*_listeners, *self._own):
            try:
                listener.end(span)
            except Exception as error:
                _note(error)


def _note(error: Exception) -> None:
    if len(FAILURES) < 20:
        FAILURES.append(f"{type(error).__name__}: {error}")
