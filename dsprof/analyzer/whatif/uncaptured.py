"""What ranks wait for those that were not captured: such a wait looks like a transfer that takes longer than others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from ..arrays import Float, Int
from ..graph.step_graph import StepGraph

LONGER_THAN: Final = 95
"""Percentile of like transfers of whole groups. What takes longer is taken to have waited, by what it takes beyond
their median."""
FEWEST_LIKE: Final = 8
"""Transfers that tell what is usual."""

_Like = tuple[str, int]
"""Kind, and members of the group."""


class _Usual(NamedTuple):
    """What transfers of one kind take by their bytes, as a line, in ms; of which bytes that is known; and what they
    take beyond it: the median, and LONGER_THAN."""

    latency: float
    per_byte: float
    least_bytes: float
    most_bytes: float
    median: float
    longer: float

    @staticmethod
    def of(size: Float, took: Float) -> _Usual:
        varies = float(size.std()) > 0
        slope = max(float(np.polyfit(size, took, 1)[0]), 0.0) if varies else 0.0
        latency = float((took - slope * size).mean())
        beyond = took - latency - slope * size
        ends = float(size.min()), float(size.max())
        return _Usual(latency, slope, *ends, float(np.median(beyond)), float(np.percentile(beyond, LONGER_THAN)))

    def waited(self, size: Float, took: Float) -> Float:
        """By how much they took longer than usual, where nearly none does."""
        beyond = took - self.latency - self.per_byte * size
        known = (size >= self.least_bytes) & (size <= self.most_bytes)
        found: Float = np.where(known & (beyond > self.longer), beyond - self.median, 0.0)
        return found


def waits_for_uncaptured(
    graph: StepGraph, members: Callable[[str], Collection[int] | None], most_ms: Float
) -> tuple[Float, ...]:
    """Of each template of a measured graph [C, S] ms: how long communications may have waited for ranks that were not
    captured, and that change from step to step. 0 where nothing is like them, and in steps that are not judged.

    Like are those of the same kind, and of no other sizes, in groups of as many members, all of which were captured.
    What is waited in every step is a slow rank's doing or a slow link's, and not counted.

    members: ranks of a process group; None: not known. most_ms: [S] of each judged step, for how long others may have
    waited for such a rank.
    """
    captured = set(graph.ranks)
    known = {lane: members(lane) for lane in {task.lane for of in graph.templates for task in of.structure.tasks}}
    size = {lane: len(ranks) for lane, ranks in known.items() if ranks is not None}
    lacking = {lane for lane, ranks in known.items() if ranks is not None and not set(ranks) <= captured}
    number = np.cumsum(graph.judged) - 1
    judged = [np.flatnonzero(graph.judged[graph.columns_of(index)]) for index in range(len(graph.templates))]
    usual = _usual(graph, judged, {lane: count for lane, count in size.items() if lane not in lacking})
    found = []
    for index, (steps, columns) in enumerate(zip(graph.templates, judged, strict=True)):
        waits = np.zeros(steps.transfer.shape)
        of_lane: dict[str, list[int]] = {}
        for c, task in enumerate(steps.structure.tasks):
            if task.owner < 0 and task.lane in lacking:
                of_lane.setdefault(task.lane, []).append(c)
        most = most_ms[number[graph.columns_of(index)[columns]]]
        for lane, mine in of_lane.items():
            beyond = np.zeros((len(mine), len(columns)))
            for place, c in enumerate(mine):
                like = usual.get((steps.structure.tasks[c].kind, size[lane]))
                if like is not None:
                    waited = like.waited(steps.size[c, columns], steps.transfer[c, columns])
                    beyond[place] = waited - waited.min(initial=np.inf)
            whole = beyond.sum(axis=0)
            part = np.divide(np.minimum(whole, most), whole, out=np.zeros_like(whole), where=whole > 0)
            waits[np.ix_(np.array(mine), columns)] = beyond * part
        found.append(waits)
    return tuple(found)


def _usual(graph: StepGraph, judged: Sequence[Int], members: Mapping[str, int]) -> dict[_Like, _Usual]:
    """Of each kind, in groups whose numbers of members are given."""
    sizes: dict[_Like, list[Float]] = {}
    took: dict[_Like, list[Float]] = {}
    for steps, columns in zip(graph.templates, judged, strict=True):
        for c, task in enumerate(steps.structure.tasks):
            if task.owner < 0 and task.lane in members:
                like = task.kind, members[task.lane]
                sizes.setdefault(like, []).append(steps.size[c, columns])
                took.setdefault(like, []).append(steps.transfer[c, columns])
    every = {like: (np.concatenate(sizes[like]), np.concatenate(ms)) for like, ms in took.items()}
    return {like: _Usual.of(size, ms) for like, (size, ms) in every.items() if len(size) >= FEWEST_LIKE}
