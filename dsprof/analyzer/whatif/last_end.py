"""Communications that come to one rank later than to another.

A measured transfer ends when the first rank goes on, and as long as it is still on its way to another rank, that one
counts as woken late from its wait. A modelled transfer takes as long as until the last rank has it all, as links are
fitted to that: what is modelled must not be waited for once more. A link that is so many times as fast is that for the
last rank, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..arrays import Bool, Float, Int
from ..graph.step_graph import WAKE_UP_DELAY, Steps


def end_with_the_last(steps: Steps, tasks: Sequence[int], work: Float, place: Int | None = None) -> None:
    """Take out of each late wake-up what was these tasks reaching the last rank: their transfers are modelled, and hold
    that already.

    work: of the steps, or of others that are made of them, to be written to; place: where in it each segment of the
    steps is, below 0 where it is not there; None: where it was.
    """
    waits = late_waits(steps, tasks)
    at = waits.segments if place is None else place[waits.segments]
    there = at >= 0
    late = work[at[there], :, WAKE_UP_DELAY]
    still = np.maximum(waits.longest - waits.last_of(waits.ms * ~waits.chosen[:, None]), 0.0)
    work[at[there], :, WAKE_UP_DELAY] = np.maximum(late - still[there], 0.0)


class LateWaits(NamedTuple):
    """Waits of M segments for tasks, K of them: for each of those that were asked about, and whatever else the same
    segments wait for.

    task:     [K] which is waited for; `of`: [K] in which of the segments; `chosen`: [K] whether it was asked about
    ms:       [K, S] how much of the segment's late wake-up is the transfer still on its way to the last rank
    segments: [M] their numbers; `longest`: [M, S] the largest of their `ms`
    """

    task: Int
    of: Int
    chosen: Bool
    ms: Float
    segments: Int
    longest: Float

    def last_of(self, ms: Float) -> Float:
        """[M, S] the largest of these, [K, S], of each segment."""
        found = np.zeros((len(self.segments), ms.shape[1]))
        np.maximum.at(found, self.of, ms)
        return found

    def scale(self, times: Mapping[int, Float], work: Float) -> None:
        """Let tasks reach the last rank as much earlier, or later, as their transfers take less, or more: so many times
        as long, [S] each. What a rank did not see of it, because it had work of its own, stays hidden behind that.
        work: of the steps, to be written to."""
        factor = np.stack([times.get(task, np.ones(self.ms.shape[1])) for task in self.task.tolist()])
        work[self.segments, :, WAKE_UP_DELAY] += self.last_of(self.ms * factor) - self.longest


def late_waits(steps: Steps, tasks: Sequence[int]) -> LateWaits:
    """The waits for these tasks."""
    waits, structure = steps.structure.waits, steps.structure
    segments = np.unique(waits[np.isin(waits[:, 0], np.array(tasks, np.int64)), 1])
    task, segment = waits[np.isin(waits[:, 1], segments)].T
    late = steps.work[segment, :, WAKE_UP_DELAY]
    # NaN: what a what-if has made was not measured. What one has modelled reaches all ranks at its end.
    ms = np.nan_to_num(np.clip(steps.last[task] - (steps.began[segment] - late), 0.0, late))
    chosen = np.isin(task, np.array(tasks, np.int64))
    modelled = np.array([structure.tasks[one].linked for one in task.tolist()], bool)
    ms[modelled & ~chosen] = 0.0
    found = LateWaits(task, np.searchsorted(segments, segment), chosen, ms, segments, np.empty(0))
    return found._replace(longest=found.last_of(ms))
