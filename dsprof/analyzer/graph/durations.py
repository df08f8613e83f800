"""What tasks took, and how late who waited for them went on, from when everything was measured to begin and end.

Arrays are of steps of one template, S of them; moments are ms from the earliest rank's start of a step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..arrays import Float
from .step_graph import Structure


def no_later_than_seen(structure: Structure, began: Float, ended: Float) -> Float:
    """When each task ended, [C, S]: whoever went on after waiting for it shows that it had. That it has ended is
    recorded by a thread that needs a core for it, and gets one late on a busy host."""
    ended = ended.copy()
    waits = structure.waits
    np.minimum.at(ended, waits[:, 0], began[waits[:, 1]])
    return ended


def transfers(
    structure: Structure, over: Float, outside: Float, ended: Float, busy: Mapping[str, Float]
) -> tuple[Float, Float]:
    """What each task took once all it needed was there and a worker of its lane free, [C, S]; and when it ended, no
    earlier than that. `busy`: lane -> [2, S] until when tasks of earlier steps keep its workers, ascending."""
    segments, tasks = structure.segments, len(structure.tasks)
    steps = over.shape[1]
    arrived = np.full((tasks, steps), -np.inf)
    source, target = structure.edges.source, structure.edges.target
    ends = np.concatenate([over, ended, outside])
    to_task = target >= segments
    np.maximum.at(arrived, target[to_task] - segments, ends[source[to_task]])
    arrived[np.isneginf(arrived)] = 0.0
    begins = arrived.copy()
    ended = ended.copy()
    tasks_of: dict[str, list[int]] = {lane: [] for lane in structure.lanes}
    for c, task in enumerate(structure.tasks):
        if task.workers is not None:
            tasks_of[task.lane].append(c)
    for lane, mine in tasks_of.items():
        workers = min(structure.tasks[mine[0]].workers or 1, 2)
        free = list(busy[lane][-workers:]) if lane in busy else [np.full(steps, -np.inf)] * workers
        for c in mine:
            begins[c] = np.maximum(arrived[c], free[0])
            ended[c] = np.maximum(ended[c], begins[c])
            later = free[-1]
            free = [ended[c]] if len(free) == 1 else [np.minimum(later, ended[c]), np.maximum(later, ended[c])]
    ended = np.maximum(ended, begins)
    return ended - begins, ended


def wake_up_delays(structure: Structure, began: Float, over: Float, outside: Float, ended: Float) -> Float:
    """How much later each segment that waited began than all it waited for had ended, [W, S] ms."""
    segments = structure.segments
    source, target = structure.edges.source, structure.edges.target
    to_segment = target < segments
    ready = np.full(began.shape, -np.inf)
    ends = np.concatenate([over, ended, outside])
    np.maximum.at(ready, target[to_segment], ends[source[to_segment]])
    waited = np.isfinite(ready).all(axis=1)
    follows = np.flatnonzero(waited & (np.append(-1, structure.thread[:-1]) == structure.thread))
    ready[follows] = np.maximum(ready[follows], over[follows - 1])
    lag = np.where(waited[:, None], began - ready, 0.0)
    result: Float = np.clip(lag, 0.0, None)
    return result
