"""What ranks wait for those that were not captured: such a wait looks like a transfer that takes longer than others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import numpy as np

from ..arrays import Float, Int
from ..graph.step_graph import StepGraph, Steps

LONGER_THAN: Final = 95
"""Percentile of like transfers of whole groups. What takes longer is taken to have waited, by what it takes beyond
their median."""
FEWEST_LIKE: Final = 8
"""Transfers that tell what is usual."""

_Like = tuple[str, int, float]
"""Kind, members of the group, bytes."""


def waits_for_uncaptured(
    graph: StepGraph, members: Callable[[str], Collection[int] | None], most_ms: Float
) -> tuple[Float, ...]:
    """Of each template of a measured graph [C, S] ms: how long communications may have waited for ranks that were not
    captured, and that change from step to step. 0 where nothing is like them, and in steps that are not judged.

    Like are those of the same kind and bytes in groups of as many members, all of which were captured. What a group
    waits in every step is a slow rank's doing or a slow link's, and not counted.

    members: ranks of a process group; None: not known. most_ms: [S] of each judged step, how late such a rank may be.
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
            beyond = np.stack([_beyond(steps, c, columns, size[lane], usual) for c in mine])
            whole = beyond.sum(axis=0)
            varies = np.clip(whole - whole.min(initial=np.inf), 0.0, most)
            part = np.divide(varies, whole, out=np.zeros_like(whole), where=whole > 0)
            waits[np.ix_(np.array(mine), columns)] = beyond * part
        found.append(waits)
    return tuple(found)


def _beyond(steps: Steps, c: int, columns: Int, members: int, usual: Mapping[_Like, tuple[float, float]]) -> Float:
    """By how much a task took longer than the median of its like, where it took longer than nearly all, [columns]."""
    kind, took = steps.structure.tasks[c].kind, steps.transfer[c, columns]
    like = [usual.get((kind, members, size), (0.0, np.inf)) for size in steps.size[c, columns].tolist()]
    median, most = np.array(like).reshape(-1, 2).T
    found: Float = np.where(took > most, took - median, 0.0)
    return found


def _usual(graph: StepGraph, judged: Sequence[Int], size: Mapping[str, int]) -> dict[_Like, tuple[float, float]]:
    """Median and LONGER_THAN of what transfers take in groups whose sizes are given."""
    took: dict[_Like, list[float]] = {}
    for steps, columns in zip(graph.templates, judged, strict=True):
        for c, task in enumerate(steps.structure.tasks):
            if task.owner < 0 and task.lane in size:
                for bytes_, ms in zip(
                    steps.size[c, columns].tolist(), steps.transfer[c, columns].tolist(), strict=True
                ):
                    took.setdefault((task.kind, size[task.lane], bytes_), []).append(ms)
    return {
        like: (float(np.median(ms)), float(np.percentile(ms, LONGER_THAN)))
        for like, ms in took.items()
        if len(ms) >= FEWEST_LIKE
    }
