"""Transfers that are under way on one link at once: each moves as fast as its share of the link lets it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..arrays import Float, Int

Moments = npt.NDArray[np.int64] | npt.NDArray[np.float64]


def link_shares(link: Int, begin: Moments, end: Moments) -> Float:
    """Which share of its link each transfer had while it was under way, mean over that time: 1 of one that was alone,
    0.5 of one that another was beside all the time.

    link: of each transfer, a number of its link; begin, end: when it was under way, in whatever unit
    """
    count = len(begin)
    found: Float = np.ones(count)
    if count < 2:
        return found
    moment, change = np.concatenate([begin, end]), np.repeat([1, -1], count)
    order = np.lexsort((moment, np.tile(link, 2)))
    under_way = np.cumsum(change[order])[:-1]
    passed = np.diff(moment[order])
    # Between the last end on a link and the first begin on the next one nothing is under way.
    had = np.where(under_way > 0, passed / np.maximum(under_way, 1), 0.0)
    upto = np.empty(2 * count)
    upto[order] = np.append(0.0, np.cumsum(had))
    took = end - begin
    np.divide(upto[count:] - upto[:count], took, out=found, where=took > 0)
    return found
