"""Gains: the ms that a step gets shorter by, each with its interval, and what a run's noise is."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from scipy.special import chdtri, stdtrit

from ..arrays import Float
from ..finding import FROM_SHAPES, MEASURED_EXCESS, NOT_PRICED, Gain
from ..study import Study
from ..work.micro_batches import input_of_steps
from .confidence_interval import interval

LEAST_SHARE: Final = 0.001
"""What costs less than this share of the step is not worth a line, not even as `info`."""


def mean_gain(study: Study, saved: Float, spell: tuple[int, int] | None = None) -> Gain:
    """Mean of the ms saved in each step, with its 95 % interval.

    spell: the first and the last step of the one time in which there was something to save, whose length is taken as
           given: `saved` is of the replayed steps then"""
    mean = float(saved.mean()) if len(saved) else 0.0
    if spell is None:
        low, high = interval(saved)
    else:
        inside = (study.replayed_steps >= spell[0]) & (study.replayed_steps <= spell[1])
        parts = [saved[inside], saved[~inside]]
        halves = [len(part) / len(saved) * np.ptp(interval(part)) / 2 for part in parts if len(part)]
        low, high = mean - float(np.hypot.reduce(halves)), mean + float(np.hypot.reduce(halves))
    return Gain(mean, 100 * mean / study.step_ms if study.step_ms else 0.0, low, high)


def sure_up_to(gain: Gain, sure_ms: float) -> Gain:
    """`gain`, of which no more than `sure_ms` is sure: 0 where it may as well be nothing."""
    return replace(gain, low=min(gain.low, sure_ms))


def may_gain(gain: Gain, most_ms: float) -> Gain:
    """`gain`, which may be as much as `most_ms`."""
    return replace(gain, high=max(gain.high, most_ms))


def or_as_well(gain: Gain, other: Gain) -> Gain:
    """`gain`, where it may as well be `other`; of changes that lose nothing."""
    return replace(gain, low=max(min(gain.low, other.low), 0.0), high=max(gain.high, other.high))


def by_shapes(study: Study, least_ms: float, likely_ms: float, most_ms: float) -> Gain:
    """What other arithmetic gains, by the sizes of layers: as much as is likely, at least and at most."""
    percent_of_step = 100 * likely_ms / study.step_ms
    return Gain(likely_ms, percent_of_step, min(least_ms, likely_ms), max(most_ms, likely_ms), method=FROM_SHAPES)


def nothing_between(low: Float, high: Float) -> Gain:
    """Nothing, where it may as well be between these, of each step ([S] ms), in the mean."""
    return replace(NOT_PRICED, low=min(interval(low)[0], 0.0), high=max(interval(high)[1], 0.0))


def cost_outside_steps(study: Study, events: Float, *, rare: bool = False) -> Gain:
    """What `events` (ms each) that make steps irregular cost, divided over the steps after warm-up; percent of a
    step with its share of all that is irregular.

    The interval is Student's over the events, whose number is taken as given; of `rare` ones, which come at
    random, it is Poisson's for their number.
    """
    count, steps = len(events), len(study.irregular.steps)
    total = float(events.sum())
    if rare:
        low = float(chdtri(2 * count, 0.975)) / 2 / count * total
        high = float(chdtri(2 * count + 2, 0.025)) / 2 / count * total
    elif count > 1:
        half = float(stdtrit(count - 1, 0.975) * events.std(ddof=1) * np.sqrt(count))
        low, high = total - half, total + half
    else:  # one tells nothing about the next
        low, high = 0.0, 2 * total
    mean = total / steps
    whole = study.irregular.mean_ms
    return Gain(mean, 100 * mean / whole if whole else 0.0, low / steps, high / steps, method=MEASURED_EXCESS)


def beside_other_work(study: Study, before: Float, after: Float) -> Float:
    """`after`, where what is saved from `before` was only moved beside other work: there must be idle cores."""
    if study.contended is None:
        return after
    return np.maximum(after, before - study.contended.idle_in(study.replayed_steps))


def noise_floor_ms(study: Study, durations: Float) -> float:
    """The noise floor: what the mean of these steps ([S], ms) could be off by, by chance.

    Not counted is what differs for a reason: steps that were given more input, and slow drift, which a comparison
    in turns cancels. So it is told from the differences between neighbours (von Neumann).
    """
    given = input_of_steps(study)
    if given is not None and len(durations) > 2:
        size = given[np.isin(study.step_numbers, study.replayed_steps)]
        if np.ptp(size) > 0:
            slope, level = np.polyfit(size, durations, 1)
            durations = durations - slope * size - level
    if len(durations) < 2:
        return float(np.abs(durations).sum()) / 2
    neighbours = float(1.96 * np.sqrt(np.mean(np.diff(durations) ** 2) / 2 / len(durations)))
    low, high = interval(durations)  # of what comes and goes in a fixed rhythm, neighbours say too much
    return min(neighbours, (high - low) / 2)
