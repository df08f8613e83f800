"""Confidence intervals of the mean of a series of steps, by batch means."""

from __future__ import annotations

from typing import Final

import numpy as np
from scipy.special import stdtrit

from ..arrays import Float
from ..budget.rhythm import period

BATCH: Final = 10
FEWEST_BATCHES: Final = 5
MOST_BATCHES: Final = 20
"""Batches of at least BATCH steps, but no fewer than five of them and no more than twenty."""


def half_width(error: float, freedom: int, confidence: float) -> float:
    """Half of Student's interval around a mean whose standard error is `error`, with so many degrees of freedom."""
    return float(stdtrit(freedom, (1 + confidence) / 2)) * error


def interval(values: Float) -> tuple[float, float]:
    """95 % interval of the mean of a series, by batch means."""
    low, high = intervals(values[None])
    return float(low[0]), float(high[0])


def intervals(series: Float) -> tuple[Float, Float]:
    """95 % interval of the mean of each series, [N, S], by batch means: both ends, [N].

    Neighbouring steps are alike: what disturbs a host lasts for seconds. So a series is cut into a few long batches,
    and the interval is Student's over their means. What comes in a fixed rhythm is cut into whole periods of it, since
    batches of which some have it once more than others would differ by that.
    """
    count = series.shape[1]
    if count < 2:  # one step tells nothing about the next
        total = series.sum(axis=1)
        return np.minimum(0.0, total), np.maximum(0.0, total)
    batches = min(max(FEWEST_BATCHES, count // BATCH), MOST_BATCHES, count)
    means = np.stack([batch.mean(axis=1) for batch in np.array_split(series, batches, axis=1)], axis=1)
    half = stdtrit(batches - 1, 0.975) * means.std(axis=1, ddof=1) / np.sqrt(batches)
    mean = series.mean(axis=1)
    low, high = mean - half, mean + half
    for row, values in enumerate(series):
        ends = _of_whole_periods(values, batches)
        if ends is not None:
            low[row], high[row] = ends
    return low, high


def _of_whole_periods(values: Float, batches: int) -> tuple[float, float] | None:
    """The interval of one series by batches of whole periods; None where it has no rhythm, or too few of them. Of a
    last one that is not whole the mean has too much or too little: the interval reaches to that without it, too."""
    each = period(values)
    whole = len(values) // each
    if each == 1 or whole < FEWEST_BATCHES:
        return None
    periods = values[: whole * each].reshape(whole, each).mean(axis=1)
    means = np.array([batch.mean() for batch in np.array_split(periods, min(batches, whole))])
    half = half_width(float(means.std(ddof=1) / np.sqrt(len(means))), len(means) - 1, 0.95)
    ends = float(values.mean()), float(periods.mean())
    return min(ends) - half, max(ends) + half
