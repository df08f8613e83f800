"""What ranks wait for those that were not captured, seen as transfers that take longer than those of like groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Final

import numpy as np

from ..arrays import Float
from ..graph.step_graph import StepGraph, Steps

USUAL: Final = 95
"""Percentile of what like groups take that are whole: no longer transfer has waited."""


def waits_for_uncaptured(graph: StepGraph, is_whole: Callable[[str], bool]) -> tuple[Float, ...]:
    """Of each template [C, S] ms: by how much communications of groups that are not whole take longer than the median
    of those of whole groups, of like kind and size. 0 where that is usual, or nothing is like them."""
    lanes = {task.lane for steps in graph.templates for task in steps.structure.tasks}
    whole = {lane: is_whole(lane) for lane in lanes}
    usual: dict[tuple[str, int], list[Float]] = defaultdict(list)
    for steps in graph.templates:
        for c, key in enumerate(_kinds(steps)):
            if whole[steps.structure.tasks[c].lane]:
                usual[key].append(steps.transfer[c])
    known = {
        key: (float(np.median(every)), float(np.percentile(every, USUAL)))
        for key, every in ((key, np.concatenate(of)) for key, of in usual.items())
    }
    found = []
    for steps in graph.templates:
        beyond = np.zeros(steps.transfer.shape)
        for c, key in enumerate(_kinds(steps)):
            task = steps.structure.tasks[c]
            if task.owner < 0 and not whole[task.lane] and key in known:
                median, most = known[key]
                beyond[c] = np.where(steps.transfer[c] > most, steps.transfer[c] - median, 0.0)
        found.append(beyond)
    return tuple(found)


def _kinds(steps: Steps) -> list[tuple[str, int]]:
    """Kind of each task and the octave of its size."""
    octave = np.round(np.log2(np.maximum(np.median(steps.size, axis=1), 1.0))).astype(np.int64)
    return [(task.kind, one) for task, one in zip(steps.structure.tasks, octave.tolist(), strict=True)]
