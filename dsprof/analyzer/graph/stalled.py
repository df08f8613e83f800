"""Where threads stood still for tasks of their own lanes: how long, and while which of them were under way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..arrays import Float, Int
from .step_graph import WAKE_UP_DELAY, StepGraph, Steps

SHARED: Final = -1
"""Lane of a task that ranks share."""


@dataclass(frozen=True)
class StalledWait:
    """Waits of steps of one template that end where `segment` begins, all of them for one task of `template`.

    columns: [E] of the steps that waited; `task_columns`: [E] of the steps that the task is of
    tasks:   [K] those of its lane; `spent`: [K, E] ms of the waits in which each was under way. Together with the lag
             of the segment they are all of the wait.
    """

    segment: int
    columns: Int
    template: int
    tasks: Int
    task_columns: Int
    spent: Float


@dataclass(frozen=True)
class TemplateStalls:
    """Of steps of one template. before: [W, S] ms that each segment was stood still for before it began."""

    before: Float
    waits: tuple[StalledWait, ...]


def stalls_of(graph: StepGraph) -> tuple[TemplateStalls, ...]:
    """The same as `find_stalls`, looked for once."""
    if "stalls" not in graph.kept:
        graph.kept["stalls"] = find_stalls(graph)
    found: tuple[TemplateStalls, ...] = graph.kept["stalls"]
    return found


def find_stalls(graph: StepGraph) -> tuple[TemplateStalls, ...]:
    """Of each template of a measured graph."""
    lanes = [_own_lanes(steps) for steps in graph.templates]
    found = []
    for index, steps in enumerate(graph.templates):
        before: Float = np.broadcast_to(0.0, steps.work.shape[:2])  # which takes no room
        waits = []
        if any((lane != SHARED).any() for lane in lanes):
            before = before.copy()
            over = steps.began + steps.work.sum(axis=-1, dtype=np.float64) - steps.work[..., WAKE_UP_DELAY]
            for segment, columns, template, task, task_columns in _waits(graph, index, lanes):
                ends, source = steps.began[segment, columns], graph.templates[template]
                stood = np.maximum(ends - over[segment - 1, columns], 0.0)
                before[segment, columns] += stood
                tasks = np.flatnonzero(lanes[template] == lanes[template][task])
                ended = source.ended[np.ix_(tasks, task_columns)]
                # The task ended where the segment went on, less the lag: so its times are those of the wait's step.
                lag = np.minimum(steps.work[segment, columns, WAKE_UP_DELAY], stood)
                ended = ended - source.ended[task, task_columns] + ends - lag
                begun = np.maximum(ended - source.transfer[np.ix_(tasks, task_columns)], ends - stood)
                under_way = np.maximum(np.minimum(ended, ends - lag) - begun, 0.0)
                whole = under_way.sum(axis=0)
                spent = under_way * np.where(whole > 0, (stood - lag) / np.maximum(whole, 1e-9), 0.0)
                waits.append(StalledWait(segment, columns, template, tasks, task_columns, spent))
        found.append(TemplateStalls(before, tuple(waits)))
    return tuple(found)


def _own_lanes(steps: Steps) -> Int:
    """A number for the lane of each task that is a rank's own, [C], SHARED: it is not."""
    names = {task.lane: i for i, task in enumerate(steps.structure.tasks) if task.owner >= 0}
    return np.array([names[task.lane] if task.owner >= 0 else SHARED for task in steps.structure.tasks], np.int64)


def _waits(graph: StepGraph, index: int, lanes: list[Int]) -> Iterator[tuple[int, Int, int, int, Int]]:
    """(segment, columns, template of the task, task, its columns) of each wait of a template for a task of its own."""
    steps, cross_step_edges = graph.templates[index], graph.cross_step_edges
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
    into = np.flatnonzero(cross_step_edges.target_template == index)
    keys = np.stack(
        [cross_step_edges.target[into], cross_step_edges.source_template[into], cross_step_edges.source[into]], axis=1
    )
    alike, which = np.unique(keys, axis=0, return_inverse=True)
    for number, (row, template, operation) in enumerate(alike.tolist()):
        task = operation - graph.templates[template].structure.segments
        if row in waiting and task >= 0 and lanes[template][task] != SHARED:
            mine = into[which.reshape(-1) == number]
            yield (
                waiting[row],
                cross_step_edges.target_column[mine],
                template,
                task,
                cross_step_edges.source_column[mine],
            )
