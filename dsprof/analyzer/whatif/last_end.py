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

from ..arrays import Float, Int
from ..graph.step_graph import WAKE_UP_DELAY, Steps


def end_with_the_last(steps: Steps, tasks: Sequence[int], work: Float, place: Int | None = None) -> None:
    """Let nobody wait for these tasks, whose transfers are modelled, after their end.

    work: of the steps, or of others that are made of them, to be written to; place: where in it each segment of the
    steps is, below 0 where it is not there; None: where it was.
    """
    waits = _waits(steps, tasks)
    at = waits.segments if place is None else place[waits.segments]
    there = at >= 0
    late = work[at[there], :, WAKE_UP_DELAY]
    work[at[there], :, WAKE_UP_DELAY] = np.maximum(late - waits.longest[there], 0.0)


def scale_last_ends(steps: Steps, times: Mapping[int, Float], work: Float) -> None:
    """Let these tasks come to the last rank as much earlier, or later, as their transfers take less, or more: so many
    times as long, [S] each. Of several that a segment waits for, by what comes last. work: of the steps, to be written
    to."""
    waits = _waits(steps, [*times])
    if not len(waits.task):
        return
    factor = np.stack([times[task] for task in waits.task.tolist()]) - 1
    of_last = (waits.ms > 0) & (waits.ms == waits.longest[waits.of])
    later, several = np.zeros(waits.longest.shape), np.zeros(waits.longest.shape)
    np.add.at(later, waits.of, np.where(of_last, waits.ms * factor, 0.0))
    np.add.at(several, waits.of, of_last)
    work[waits.segments, :, WAKE_UP_DELAY] += later / np.maximum(several, 1)


def any_ends_later(steps: Steps, tasks: Sequence[int]) -> bool:
    """Whether any rank waits for one of these tasks after the first rank went on."""
    return bool(_waits(steps, tasks).ms.any())


class _Waits(NamedTuple):
    """Waits for tasks, K of them, in M segments.

    task:     [K] which is waited for; `of`: [K] in which of the segments
    ms:       [K, S] for how long, once the first rank went on, it was still on its way to the last one: a part of the
              segment's being woken late, as that is in these steps
    segments: [M] their numbers; `longest`: [M, S] the largest of their `ms`
    """

    task: Int
    of: Int
    ms: Float
    segments: Int
    longest: Float


def _waits(steps: Steps, tasks: Sequence[int]) -> _Waits:
    waits = steps.structure.waits
    task, segment = waits[np.isin(waits[:, 0], np.array(tasks, np.int64))].T
    late = steps.work[segment, :, WAKE_UP_DELAY]
    # NaN: what a what-if has made was not measured.
    ms: Float = np.nan_to_num(np.clip(steps.last[task] - (steps.began[segment] - late), 0.0, late))
    segments, of = np.unique(segment, return_inverse=True)
    longest = np.zeros((len(segments), ms.shape[1]))
    np.maximum.at(longest, of, ms)
    return _Waits(task, of, ms, segments, longest)
