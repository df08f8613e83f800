"""What is gained on devices whose kernels were traced: what they stood idle for, and what a replay of it says."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from .. import signals
from ..budget.irregular import FEWEST_JUDGED
from ..candidate import DeviceCost, Price
from ..finding import MEASURED_ON_DEVICE, REPLAYED_ON_DEVICE, UPPER_BOUND, Gain
from ..signals import Absent
from ..study import Study
from ..whatif import WhatIf
from .confidence_interval import interval
from .effects import replayed
from .gains import mean_gain

MISSED: Final = 0.1
"""Of a gain by replay of waiting for the device no more, that it may be off by."""


def price_of_device(study: Study, cost: DeviceCost) -> Price:
    """What was measured; and where the chains of devices are known, what a replay says of it."""
    measured = measured_gain(study, cost)
    if cost.at_most is not None:
        replayed = replayed_ms(study, cost.at_most)
        return Price(replace(measured, low=0.0) if replayed is None else _up_to(study, replayed[0]))
    if cost.less is None:
        return Price(measured)
    if not _kernels_are_replayed(study):
        return Price(_half_or_all(measured))
    replayed = replayed_ms(study, *cost.less)
    if replayed is None:
        return Price(measured)
    less, everything = replayed
    return Price(_no_more_than(measured, less, everything), tried=(_up_to(study, less), _up_to(study, everything)))


def measured_gain(study: Study, cost: DeviceCost) -> Gain:
    """The mean of what was measured, and an interval from the rank (and, of few, the step) with least to that with
    most. Where being traced makes steps longer than ordinary ones: of what they stood idle for, the same share of what
    ordinary steps leave for it, as kernels take as long as without; of other waits, the same share of the step."""
    spent = cost.ms
    if cost.took_ms > study.step_ms > 0:
        if cost.idle_ms:
            left = max(study.step_ms - cost.busy_ms, 0.0)
            spent = spent * min(left / cost.idle_ms, 1.0)
        else:
            spent = spent * study.step_ms / cost.took_ms
    mean = float(spent.mean())
    low, high = float(spent.min(axis=0).mean()), float(spent.max(axis=0).mean())
    if spent.shape[1] >= FEWEST_JUDGED:
        ends = interval(spent.mean(axis=0))
        low, high = min(low, ends[0]), max(high, ends[1])
    else:
        of_step = spent.mean(axis=0)
        low, high = min(low, float(of_step.min())), max(high, float(of_step.max()))
    percent_of_step = 100 * mean / study.step_ms if study.step_ms else 0.0
    return Gain(mean, percent_of_step, max(low, 0.0), high, method=MEASURED_ON_DEVICE)


def replayed_ms(study: Study, *changes: WhatIf) -> tuple[float, ...] | None:
    """What the steps would be shorter by with each of these changes alone, ms, mean, 0 at least; None where the chains
    of devices are not known."""
    gains = [replayed_gain(study, change) for change in changes]
    return None if None in gains else tuple(max(gain.ms, 0.0) for gain in gains if gain is not None)


def replayed_gain(study: Study, change: WhatIf) -> Gain | None:
    """What the steps would be shorter by with a change alone; None where the chains of devices are not known."""
    if isinstance(signals.replay.look(study), Absent) or not study.led_by_devices:
        return None
    return mean_gain(study, replayed(study) - replayed(study, change))


def gain_of_waits(study: Study, gain: Gain) -> Gain:
    """`gain` by replay of waiting for the device no more, which may be off by a part of itself. Of a few traced steps
    it may be nothing."""
    off = MISSED * max(gain.ms, 0.0)
    if study.device is not None and len(study.step_numbers) < FEWEST_JUDGED:
        return replace(gain, low=0.0, high=max(gain.ms, 0.0), method=REPLAYED_ON_DEVICE)
    return replace(gain, low=min(gain.low, gain.ms - off), high=max(gain.high, gain.ms + off))


def idle_at_most(study: Study, idle_ms: float) -> Gain:
    """What cannot gain more than devices stood idle for, and may gain nothing."""
    return replace(_up_to(study, idle_ms), method=UPPER_BOUND)


def _kernels_are_replayed(study: Study) -> bool:
    """Whether the steps that are judged, and replayed, are of those whose kernels were traced. Of steps that are not,
    only whole phases are known, which last as long as their launches did."""
    return study.device is not None and bool(np.isin(study.device.steps, study.step_numbers).any())


def _half_or_all(measured: Gain) -> Gain:
    """Of launches that take less, between half as long and no time: half as long saves half of what the device waits
    for them or more, as what it does in a wait for its host does not get longer."""
    ms, percent = (0.75 * value for value in (measured.ms, measured.percent))
    return replace(measured, ms=ms, percent=percent, low=min(0.5 * measured.low, ms))


def _up_to(study: Study, most_ms: float) -> Gain:
    percent_of_step = 100 * most_ms / study.step_ms if study.step_ms else 0.0
    return Gain(most_ms, percent_of_step, 0.0, most_ms, method=REPLAYED_ON_DEVICE)


def _no_more_than(idle: Gain, less_ms: float, all_ms: float) -> Gain:
    """Between what mending a part of it gains by replay and what mending all of it does, and no more than devices stood
    idle for it."""
    middle = (less_ms + all_ms) / 2
    part = min(middle / idle.ms, 1.0) if idle.ms > 0 else 0.0
    low, high = min(less_ms, idle.low), min(all_ms, idle.high)
    ms = part * idle.ms
    return Gain(ms, part * idle.percent, min(low, ms), max(high, ms), method=REPLAYED_ON_DEVICE)
