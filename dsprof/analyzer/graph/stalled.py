"""Where threads stood still for tasks of their own lanes: how long, and while which of them were under way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .step_graph import LAG, StepGraph, Steps

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]

SHARED: Final = -1
"""Lane of a task that ranks share."""


@dataclass(frozen=True)
class Standstill:
    """Waits of like-shaped steps that end where `segment` begins, all of them for one task of `shape`.

    columns: [E] of the steps that waited; `task_columns`: [E] of the steps that the task is of
    tasks:   [K] those of its lane; `spent`: [K, E] ms of the waits in which each was under way. Together with the lag
             of the segment they are all of the wait.
    """

    segment: int
    columns: Int
    shape: int
    tasks: Int
    task_columns: Int
    spent: Float


@dataclass(frozen=True)
class ShapeStandstills:
    """Of like-shaped steps. before: [W, S] ms that each segment was stood still for before it began."""

    before: Float
    waits: tuple[Standstill, ...]


def find_standstills(graph: StepGraph) -> tuple[ShapeStandstills, ...]:
    """Of each shape of a measured graph."""
    lanes = [_own_lanes(steps) for steps in graph.shapes]
    found = []
    for index, steps in enumerate(graph.shapes):
        before = np.zeros(steps.work.shape[:2])
        waits = []
        if any((lane != SHARED).any() for lane in lanes):
            over = steps.began + steps.work.sum(axis=-1) - steps.work[..., LAG]
            for segment, columns, shape, task, task_columns in _waits(graph, index, lanes):
                ends, source = steps.began[segment, columns], graph.shapes[shape]
                stood = np.maximum(ends - over[segment - 1, columns], 0.0)
                before[segment, columns] += stood
                tasks = np.flatnonzero(lanes[shape] == lanes[shape][task])
                ended = source.ended[np.ix_(tasks, task_columns)]
                # The task ended where the segment went on, less the lag: so its times are those of the wait's step.
                lag = np.minimum(steps.work[segment, columns, LAG], stood)
                ended = ended - source.ended[task, task_columns] + ends - lag
                begun = np.maximum(ended - source.transfer[np.ix_(tasks, task_columns)], ends - stood)
                under_way = np.maximum(np.minimum(ended, ends - lag) - begun, 0.0)
                whole = under_way.sum(axis=0)
                spent = under_way * np.where(whole > 0, (stood - lag) / np.maximum(whole, 1e-9), 0.0)
                waits.append(Standstill(segment, columns, shape, tasks, task_columns, spent))
        found.append(ShapeStandstills(before, tuple(waits)))
    return tuple(found)


def _own_lanes(steps: Steps) -> Int:
    """A number for the lane of each task that is a rank's own, [C], SHARED: it is not."""
    names = {task.lane: i for i, task in enumerate(steps.structure.tasks) if task.owner >= 0}
    return np.array([names[task.lane] if task.owner >= 0 else SHARED for task in steps.structure.tasks], np.int64)


def _waits(graph: StepGraph, index: int, lanes: list[Int]) -> Iterator[tuple[int, Int, int, int, Int]]:
    """(segment, columns, shape of the task, task, its columns) of each wait of a shape for a task of its own."""
    steps, crossings = graph.shapes[index], graph.crossings
    structure = steps.structure
    every = np.arange(len(steps.numbers))
    for task, segment in structure.waits.tolist():
        if lanes[index][task] != SHARED:
            yield segment, every, index, task, every
    first = structure.segments + len(structure.tasks)
    edges = (structure.edges.source >= first) & (structure.edges.target < structure.segments)
    waiting = dict(
        zip((structure.edges.source[edges] - first).tolist(), structure.edges.target[edges].tolist(), strict=True)
    )
    into = np.flatnonzero(crossings.target_shape == index)
    keys = np.stack([crossings.target[into], crossings.source_shape[into], crossings.source[into]], axis=1)
    alike, which = np.unique(keys, axis=0, return_inverse=True)
    for number, (row, shape, operation) in enumerate(alike.tolist()):
        task = operation - graph.shapes[shape].structure.segments
        if row in waiting and task >= 0 and lanes[shape][task] != SHARED:
            mine = into[which.reshape(-1) == number]
            yield waiting[row], crossings.target_column[mine], shape, task, crossings.source_column[mine]
