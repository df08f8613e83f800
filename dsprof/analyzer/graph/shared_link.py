"""Communications that were under way at once in one lane, and shared its link."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..align.link_shares import link_shares
from ..arrays import Float, Int
from .step_graph import WAKE_UP_DELAY, Steps
from .transfers_at_once import SHARED

WAITED_TOGETHER: Final = 0.1
"""Of the transfers: own work between waiting for the first and for the last of them that is next to nothing."""


def link_shares_of(steps: Steps, tasks: Int, *, gradients: bool = False) -> Float:
    """Which share of the link of its lane each of these tasks had while it was under way, [len(tasks), S]; 1 where a
    lane runs one at a time. steps: as they were measured; gradients: beside others that carry them only."""
    structure, count = steps.structure, len(steps.numbers)
    found: Float = np.ones((len(tasks), count))
    lanes: dict[str, list[int]] = {}
    for c, task in enumerate(structure.tasks):
        if (task.workers or 1) > 1 and (task.gradient or not gradients):
            lanes.setdefault(task.lane, []).append(c)
    wanted = {structure.tasks[c].lane for c in tasks.tolist()}
    for lane in wanted & lanes.keys():
        mine = np.array(lanes[lane], np.int64)
        end = steps.ended[mine]
        shares: Float = np.ones(end.shape)
        known = np.isfinite(end)
        step = np.broadcast_to(np.arange(count), end.shape)[known]
        begin, size = (end - steps.transfer[mine])[known], steps.size[mine][known]
        names = np.unique([structure.tasks[c].kind.partition(" ")[0] for c in lanes[lane]], return_inverse=True)[1]
        kind = np.broadcast_to(names[:, None], end.shape)[known]
        shares[known] = link_shares(step, begin, end[known], size, kind)
        place = np.searchsorted(mine, tasks)
        there = mine[np.minimum(place, len(mine) - 1)] == tasks
        found[there] = shares[place[there]]
    return found


def sharing_gradients(steps: Steps, tasks: Int) -> tuple[Int, Float]:
    """Those of these tasks that shared the link with other gradients, and which share they had, [:, S]: of those that
    are waited for together, in whichever order they end. Of others that order matters, too. steps: as measured."""
    shares = link_shares_of(steps, tasks, gradients=True)
    sharing = np.flatnonzero(shares.mean(axis=1) < SHARED)
    if not len(sharing) or not _waited_together(steps, tasks[sharing]):
        sharing = sharing[:0]
    return tasks[sharing], shares[sharing]


def _waited_together(steps: Steps, tasks: Int) -> bool:
    """Whether no thread has own work to do between waiting for the first of these tasks and for the last one."""
    structure = steps.structure
    wanted = set(tasks.tolist())
    waits: dict[int, list[int]] = {}
    for (thread, task), segment in structure.first_waits.items():
        if task in wanted:
            waits.setdefault(thread, []).append(segment)
    most = WAITED_TOGETHER * float(steps.transfer[tasks].mean())
    for segments in waits.values():
        between = steps.work[min(segments) : max(segments)]
        woken = between[..., WAKE_UP_DELAY].sum(axis=0, dtype=np.float64)
        if float((between.sum(axis=(0, 2), dtype=np.float64) - woken).mean()) > most:
            return False
    return True
