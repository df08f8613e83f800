"""Whether a series climbs, and how fast: a robust slope with its interval."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ..arrays import Float

FEWEST: Final = 16
"""Points."""
WINDOWS: Final = 4
KEEPS_UP: Final = 0.5
"""What the last window adds must be at least this share of what the windows before it added, on the mean: a cache that
fills up adds ever less."""


class Slope(NamedTuple):
    """What is added with each unit of x, with a 95 % interval; rise: from the first window to the last."""

    mean: float
    low: float
    high: float
    rise: float


def climb(x: Float, y: Float) -> Slope | None:
    """The slope of a series that goes on climbing; None for one that does not, levels off, or is too short.

    Theil and Sen's slope: the median over all pairs; the interval is Kendall's (Sen, 1968). Neighbouring values depend
    on each other, so it is not all: of four windows each must lie above the one before.
    """
    if len(x) < FEWEST or np.ptp(x) <= 0:
        return None
    i, j = np.triu_indices(len(x), 1)
    apart = x[j] > x[i]
    slopes = np.sort((y[j] - y[i])[apart] / (x[j] - x[i])[apart])
    count = len(x)
    spread = 1.96 * np.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = slopes[max(int((len(slopes) - spread) / 2), 0)]
    high = slopes[min(int(np.ceil((len(slopes) + spread) / 2)), len(slopes) - 1)]
    windows = np.array([np.median(part) for part in np.array_split(y, WINDOWS)])
    added = np.diff(windows)
    if low <= 0 or (added <= 0).any() or added[-1] < KEEPS_UP * added[:-1].mean():
        return None
    return Slope(float(np.median(slopes)), float(low), float(high), float(windows[-1] - windows[0]))
