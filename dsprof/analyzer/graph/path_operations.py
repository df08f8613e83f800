"""The operations of a critical path, and what binds each to the one before it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from .chains import DEPENDS, LAUNCH, STEP, SYNC

PROGRAM: Final = "program"
JOIN: Final = "join"
MESSAGE: Final = "message"
WAIT: Final = "wait"
ACROSS: Final = "across steps"
EDGES: Final = (PROGRAM, LAUNCH, DEPENDS, SYNC, STEP, JOIN, MESSAGE, WAIT, ACROSS)
"""What binds an operation to the one before it: it is the next on its chain; it was launched there (as a copy is by its
thread); a stream, a host, or the end of a step waited for it; it is a collective to which the rank came last, or a
message that was sent then; a thread or a stream went on when a communication was over; the step before ended there."""

COMMUNICATION: Final = "communication"
COPY: Final = "copy"
GAP: Final = "gap"
BEFORE: Final = "before"
"""Kinds of operations beside PARTS, MESSAGE and the kinds of flows: a collective; a copy of a rank's own lane; what
lies between two steps where records were lost; what lies before all that is known."""

ON_LINK: Final = "(on the link)"
"""How the name of what a what-if has cut in two ends, of the part that has the link of its process group to itself."""
SHARED: Final = -1
"""Rank of what ranks do together."""

_K = TypeVar("_K")


@dataclass(frozen=True)
class PathOperation:
    """One operation of the path, from `start_ms` (of the stretch of steps that follow one another) for `ms`.

    rank:  whose, SHARED: of several; chain: `host`, a stream, or the process group or lane that runs it
    kind:  the part of PARTS that most of it is, COMMUNICATION, MESSAGE, COPY, a kind of flow, GAP or BEFORE
    name:  the pipeline's action, or of a communication what it is: `all_reduce gradient`
    edge:  what binds it to the operation before it on the path, of EDGES
    step:  number of the step that it belongs to; `operation`: its place there (`step_graph.Edges`), -1: none
    parts: kind -> ms of it
    """

    rank: int
    chain: str
    kind: str
    name: str
    start_ms: float
    ms: float
    edge: str
    step: int
    operation: int = -1
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def end_ms(self) -> float:
        return self.start_ms + self.ms

    def between(self, begin_ms: float, end_ms: float) -> PathOperation:
        """What of it is between two moments."""
        start = max(self.start_ms, begin_ms)
        left = max(min(self.end_ms, end_ms) - start, 0.0)
        share = left / self.ms if self.ms else 0.0
        parts = {kind: ms * share for kind, ms in self.parts.items()}
        return replace(self, start_ms=start, ms=left, parts=parts)


@dataclass(frozen=True)
class CriticalPath:
    """operations: in order, each from where the one before ends; begin_ms, end_ms: of the steps that it is of."""

    operations: tuple[PathOperation, ...]
    begin_ms: float
    end_ms: float

    @property
    def ms(self) -> float:
        """How long the steps took: what the operations take together."""
        return self.end_ms - self.begin_ms

    @property
    def by_kind(self) -> dict[str, float]:
        """ms of each kind, most first."""
        return _sums((kind, ms) for one in self.operations for kind, ms in one.parts.items())

    @property
    def by_rank(self) -> dict[int, float]:
        """ms of each rank, and of what is SHARED, most first."""
        return _sums((one.rank, one.ms) for one in self.operations)


def _sums(items: Iterable[tuple[_K, float]]) -> dict[_K, float]:
    found: dict[_K, float] = {}
    for key, ms in items:
        found[key] = found.get(key, 0.0) + ms
    return dict(sorted(found.items(), key=lambda item: -item[1]))
