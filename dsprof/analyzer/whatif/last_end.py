"""Communications that come to one rank later than to another.

A measured transfer ends when the first rank goes on, and as long as it is still on its way to another rank, that one
counts as woken late from its wait. A modelled transfer takes as long as until the last rank has it all, as links are
fitted to that: what is modelled must not be waited for once more. A link that is so many times as fast is that for the
last rank, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Float, Int
from ..graph.step_graph import WAKE_UP_DELAY, Steps


def after_first_end(steps: Steps, task: int) -> tuple[Int, Float]:
    """The segments that wait for a task, [K], and for how long each, once the first rank went on, did what it waits for
    come to the last one, [K, S] ms: a part of its being woken late, as that is in these steps."""
    waits = steps.structure.waits
    segments = waits[waits[:, 0] == task, 1]
    late = steps.work[segments, :, WAKE_UP_DELAY]
    went_on = steps.began[segments]
    found: Float = np.clip(steps.last[task] - (went_on - late), 0.0, late)
    return segments, np.nan_to_num(found)  # what a what-if has made was not measured


def end_with_the_last(steps: Steps, tasks: Sequence[int], work: Float, place: Int | None = None) -> None:
    """Let nobody wait for these tasks, whose transfers are modelled, after their end.

    work: of the steps, or of others that are made of them, to be written to; place: where in it a segment of the steps
    is, or below 0 where it is not there; None: where it was.
    """
    spared: dict[int, Float] = {}
    for task in tasks:
        for segment, ms in zip(*after_first_end(steps, task), strict=True):
            if ms.any():
                spared[int(segment)] = np.maximum(spared.get(int(segment), 0.0), ms)
    for segment, ms in spared.items():
        at = segment if place is None else int(place[segment])
        if at >= 0:
            work[at, :, WAKE_UP_DELAY] = np.maximum(work[at, :, WAKE_UP_DELAY] - ms, 0.0)


def scaled(steps: Steps, times: dict[int, Float]) -> dict[int, Float]:
    """Segments that wait for tasks which take so many times as long, [S] each, and by how much later each is woken,
    [S] ms: by what comes to the last rank last."""
    longest: dict[int, Float] = {}
    found: dict[int, Float] = {}
    for task, of_task in times.items():
        for segment, ms in zip(*after_first_end(steps, task), strict=True):
            at = int(segment)
            if not ms.any():
                continue
            governs = ms > longest.get(at, np.zeros(ms.shape))
            longest[at] = np.where(governs, ms, longest.get(at, 0.0))
            found[at] = np.where(governs, ms * (of_task - 1), found.get(at, 0.0))
    return found
