"""What-ifs on collectives and messages: slower or faster, gone, new, or issued earlier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..arrays import Float, Int
from ..graph.step_graph import Edges, Steps, Task
from .edit import GONE, Edited

Which = Callable[[Task], bool]


def transfers_scaled(steps: Steps, which: Which, factor: float) -> Edited:
    """The tasks chosen take `factor` times as long: another link, fewer bytes."""
    chosen = np.array([which(task) for task in steps.structure.tasks], bool)
    scaled = np.where(chosen, factor, 1.0)[:, None]
    return Edited(replace(steps, transfer=steps.transfer * scaled, wire=steps.wire * scaled), _unchanged(steps))


def without(steps: Steps, which: Which) -> Edited:
    """The tasks chosen never happen, and nobody waits for them."""
    structure = steps.structure
    segments, tasks = structure.segments, structure.tasks
    kept = np.array([c for c, task in enumerate(tasks) if not which(task)], np.int64)
    number = np.full(segments + len(tasks) + structure.outside, GONE)
    number[:segments] = np.arange(segments)
    number[segments + kept] = segments + np.arange(len(kept))
    number[segments + len(tasks) :] = segments + len(kept) + np.arange(structure.outside)
    source, target = number[structure.edges.source], number[structure.edges.target]
    stays = (source != GONE) & (target != GONE)
    changed = replace(
        structure, tasks=tuple(tasks[c] for c in kept.tolist()), edges=Edges(source[stays], target[stays])
    )
    new = replace(
        steps, structure=changed, transfer=steps.transfer[kept], wire=steps.wire[kept], size=steps.size[kept],
        ended=steps.ended[kept],
    )  # fmt: skip
    return Edited(new, number[: segments + len(tasks)])


def with_task(
    steps: Steps, task: Task, transfer: Float, issued_after: Int, waited_before: Int, size: float = 0.0
) -> Edited:
    """One more task, the last of its lane, that takes `transfer` ([S] ms), issued when each of these segments has ended
    and waited for before each of those."""
    structure = steps.structure
    segments, tasks, count = structure.segments, len(structure.tasks), len(steps.numbers)
    new = segments + tasks

    def moved(operation: Int) -> Int:
        return np.where(operation >= new, operation + 1, operation)

    source = [moved(structure.edges.source), issued_after, np.full(len(waited_before), new)]
    target = [moved(structure.edges.target), np.full(len(issued_after), new), waited_before]
    changed = replace(
        structure,
        tasks=(*structure.tasks, task),
        edges=Edges(np.concatenate(source).astype(np.int64), np.concatenate(target).astype(np.int64)),
    )

    def row(of: Float, value: Float) -> Float:
        return np.concatenate([of, np.broadcast_to(value, (1, count))])

    added = replace(
        steps,
        structure=changed,
        transfer=row(steps.transfer, transfer),
        wire=row(steps.wire, np.zeros(1)),
        size=row(steps.size, np.array([size])),
        ended=row(steps.ended, np.full(1, np.nan)),
    )
    return Edited(added, _unchanged(steps))


def issued_earlier(steps: Steps, which: Which, ahead: int) -> Edited:
    """Each of the tasks chosen is issued where the one `ahead` of it among them was, on every thread: prefetched.

    The first ones are issued where they are now. Within a lane the order of tasks stays.
    """
    structure = steps.structure
    source, target = structure.edges.source.copy(), structure.edges.target
    chosen = np.array([which(task) for task in structure.tasks], bool)
    of_task = (source < structure.segments) & (target >= structure.segments)
    of_task[of_task] = chosen[target[of_task] - structure.segments] if of_task.any() else False
    for thread in range(structure.threads):
        mine = np.flatnonzero(of_task & (structure.thread[np.minimum(source, structure.segments - 1)] == thread))
        mine = mine[np.argsort(source[mine], kind="stable")]
        at = source[mine].copy()
        source[mine[ahead:]] = at[: len(at) - ahead] if ahead < len(at) else at[:0]
    return Edited(replace(steps, structure=replace(structure, edges=Edges(source, target))), _unchanged(steps))


def _unchanged(steps: Steps) -> Int:
    return np.arange(steps.structure.segments + len(steps.structure.tasks))
