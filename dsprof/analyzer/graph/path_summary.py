"""The critical path of some ordinary steps in few numbers: which rank, and what, sets the pace."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from ..arrays import Int
from .critical_path import critical_path
from .path_operations import SHARED, CriticalPath
from .step_graph import StepGraph

MOST_STEPS: Final = 20
"""Consecutive ones: of a single step the path ends in its own work, also where another chain sets the pace."""
MOST_OPERATIONS: Final = 20


@dataclass(frozen=True)
class PathPart:
    """Like operations on the path: whose (None: ranks do it together), on which chain, of which kind and name, as of
    `PathOperation`. ms, times: in a step, mean."""

    rank: int | None
    chain: str
    kind: str
    name: str
    ms: float
    times: float


@dataclass(frozen=True)
class PathSummary:
    """steps:   first and last, inclusive
    ms:      the path of a step, mean; what `by_kind` and `by_rank` sum to
    by_kind: kind of operation -> ms a step, most first
    by_rank: rank -> ms a step, most first; None: what ranks do together
    parts:   those that take most of it, most first
    """

    steps: tuple[int, int]
    ms: float
    by_kind: dict[str, float]
    by_rank: dict[int | None, float]
    parts: tuple[PathPart, ...]

    def to_dict(self) -> dict[str, Any]:
        """As in findings.json."""
        by_rank = {"together" if rank is None else str(rank): ms for rank, ms in self.by_rank.items()}
        parts = [asdict(part) for part in self.parts]
        return {"steps": list(self.steps), "ms": self.ms, "by_kind": self.by_kind, "by_rank": by_rank, "parts": parts}


def summarize_path(graph: StepGraph) -> PathSummary | None:
    """The path of the last MOST_STEPS of the longest stretch of judged steps; None where none is judged. Raises
    `evaluation_order.Cyclic`."""
    places = _longest_stretch(graph)[-MOST_STEPS:]
    if not len(places):
        return None
    first, last = (int(graph.numbers[place]) for place in (places[0], places[-1]))
    return _summary(critical_path(graph, last, since=first), (first, last), len(places))


def _longest_stretch(graph: StepGraph) -> Int:
    """Places of judged steps of which each follows the one before."""
    places = np.flatnonzero(graph.judged)
    apart = np.flatnonzero((np.diff(places) > 1) | ~graph.follows[places[1:]]) + 1
    return max(np.split(places, apart), key=len)


def _summary(path: CriticalPath, steps: tuple[int, int], count: int) -> PathSummary:
    taken: Counter[tuple[int, str, str, str]] = Counter()
    times: Counter[tuple[int, str, str, str]] = Counter()
    for one in path.operations:
        what = one.rank, one.chain, one.kind, one.name
        taken[what] += one.ms  # type: ignore[assignment]
        times[what] += 1
    parts = [
        PathPart(None if what[0] == SHARED else what[0], *what[1:], float(ms) / count, times[what] / count)
        for what, ms in taken.most_common(MOST_OPERATIONS)
    ]
    return PathSummary(
        steps,
        path.ms / count,
        {kind: ms / count for kind, ms in path.by_kind.items()},
        {None if rank == SHARED else rank: ms / count for rank, ms in path.by_rank.items()},
        tuple(parts),
    )
