"""For how long devices may stand idle where that is not seen: only whole phases of them were timed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from ..budget.intervals import Intervals
from ..study import Study, once


@once
def unseen_idle_ms(study: Study) -> float:
    """How long a step the devices may stand idle at most where that is not seen: inside of phases of which the host
    has not launched the last yet. Mean over ranks and ordinary steps, ms. Where `--deep` traced the kernels of some
    steps, it is no more than what the devices stood idle in those."""
    unseen = _mean_in_ordinary(study, {rank: one.launching for rank, one in study.summaries.items()})
    if study.device is None:
        return unseen
    idle = pd.concat([one.steps["idle_ms"] for one in study.device.ranks.values()])
    return min(unseen, float(idle.mean())) if len(idle) else unseen


@once
def idle_of_early_devices_ms(study: Study) -> float:
    """How long a step the devices may stand idle more, at most, were they never late where their hosts launch phases:
    one that begins a phase as soon as it may has done all its standing idle. As `unseen_idle_ms`."""
    return _mean_in_ordinary(study, {rank: one.behind for rank, one in study.summaries.items()})


def _mean_in_ordinary(study: Study, spans: Mapping[int, Intervals]) -> float:
    """What lies in ordinary steps of each rank's spans, mean over them, ms."""
    rank, begin, length = (study.ordinary[name].to_numpy(np.int64) for name in ("rank", "start_ns", "dur_ns"))
    found = 0
    for one in study.ranks:
        mine = slice(*np.searchsorted(rank, [one, one + 1]))
        found += int((spans[one].before(begin[mine] + length[mine]) - spans[one].before(begin[mine])).sum())
    return found / 1e6 / max(len(rank), 1)
