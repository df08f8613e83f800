"""Communications that were under way at once in one lane, whose link they shared."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..align.link_shares import link_shares
from ..arrays import Bool, Float, Int
from .step_graph import Steps

SHARED: Final = 0.95
"""A transfer that had less of its link than this was one of several."""


def link_shares_of(steps: Steps, tasks: Int, *, gradients: bool = False) -> Float:
    """Which share of the link of its lane each of these tasks had while it was under way, [len(tasks), S]; 1 of those
    that a what-if made, and where a lane runs one at a time. gradients: beside others that carry them only."""
    structure, count = steps.structure, len(steps.numbers)
    found: Float = np.ones((len(tasks), count))
    lanes: dict[str, list[int]] = {}
    for c, task in enumerate(structure.tasks):
        if (task.workers or 1) > 1 and not task.linked and (task.gradient or not gradients):
            lanes.setdefault(task.lane, []).append(c)
    wanted = {structure.tasks[c].lane for c in tasks.tolist()}
    for lane in wanted & lanes.keys():
        mine = np.array(lanes[lane], np.int64)
        end = steps.ended[mine]
        shares: Float = np.ones(end.shape)
        known = np.isfinite(end)
        step = np.broadcast_to(np.arange(count), end.shape)[known]
        shares[known] = link_shares(step, (end - steps.transfer[mine])[known], end[known])
        place = np.searchsorted(mine, tasks)
        there = mine[np.minimum(place, len(mine) - 1)] == tasks
        found[there] = shares[place[there]]
    return found


def alone_on_link(steps: Steps, tasks: Int) -> tuple[Float, Bool]:
    """What each of these tasks would take if gradients had the link of their lane one after the other, [len(tasks), S]
    ms, and which of them shared it with other gradients. Those are waited for together; of others it matters, too, in
    which order they end, so they are taken as they were measured."""
    shares = link_shares_of(steps, tasks, gradients=True)
    sharing = shares.mean(axis=1) < SHARED
    return steps.transfer[tasks] * np.where(sharing[:, None], shares, 1.0), sharing
