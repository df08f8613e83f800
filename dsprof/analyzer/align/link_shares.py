"""Transfers that are under way on one link at once, and which share of it each has.

Of small ones, whose latency passes while others move, each has the same. Bytes of large ones go through one after the
other, in whichever order, or take turns: two collectives of gloo do something in between. When they are through tells
nothing of each by itself; together they take what their bytes take.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ..arrays import Bool, Float, Int

Moments = Int | Float
MANY_BYTES: Final = 1 << 18
"""A transfer of as many is large: what it takes is mostly its bytes."""
HALVINGS: Final = 40


def link_shares(link: Int, begin: Moments, end: Moments, size: Float | None = None, kind: Int | None = None) -> Float:
    """Which share of its link each transfer had while it was under way, mean over that time: 1 of one that was alone,
    0.5 of one that another was beside all the time.

    link: of each transfer, a number of its link; begin, end: when it was under way, in whatever unit; size: bytes of
    each, by which large ones of one `kind` (a number; without it all are) that were under way at once share the time
    that these took together: no one gets less than it was the only one, or more than it took
    """
    found, alone = _at_the_same_time(link, begin, end)
    if size is None or not (found < 1).any():
        return found
    took = (end - begin).astype(np.float64)
    stretch = _unbroken(link, begin, end)
    other = ~(size >= MANY_BYTES) & (took > 0)
    large: Bool = np.bincount(stretch, other) == 0
    if kind is not None:
        least, most = np.full(len(large), np.iinfo(np.int64).max), np.full(len(large), -1)
        np.minimum.at(least, stretch, kind)
        np.maximum.at(most, stretch, kind)
        large &= least == most
    shared: Bool = large[stretch] & (took > 0)
    if not shared.any():
        return found
    _, stretch = np.unique(stretch[shared], return_inverse=True)
    took, alone, size = took[shared], alone[shared], size[shared]
    together = np.bincount(stretch, found[shared] * took)
    # A byte takes so long that all are through in the time that they took together.
    low, high = np.zeros(len(together)), np.zeros(len(together))
    np.maximum.at(high, stretch, took / size)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        less = np.bincount(stretch, np.clip(middle[stretch] * size, alone, took)) < together
        low, high = np.where(less, middle, low), np.where(less, high, middle)
    found[shared] = np.clip(high[stretch] * size, alone, took) / took
    return found


def _unbroken(link: Int, begin: Moments, end: Moments) -> Int:
    """The number of the unbroken time, on its link, in which each is under way."""
    order = np.lexsort((end, begin, link))
    first, last = begin[order].astype(np.float64), end[order].astype(np.float64)
    # Links one after another on one line of time.
    number = np.cumsum(np.append(False, np.diff(link[order]) != 0))
    apart = number * (float(last.max() - first.min()) + 1.0)
    upto = np.maximum.accumulate(last + apart)
    starts = np.append(True, first[1:] + apart[1:] >= upto[:-1])
    stretch = np.empty(len(order), np.int64)
    stretch[order] = np.cumsum(starts) - 1
    return stretch


def _at_the_same_time(link: Int, begin: Moments, end: Moments) -> tuple[Float, Float]:
    """The share of each, where all that are under way have the same; and how long each was the only one."""
    count = len(begin)
    found: Float = np.ones(count)
    if count < 2:
        return found, (end - begin).astype(np.float64)
    moment, change = np.concatenate([begin, end]), np.repeat([1, -1], count)
    order = np.lexsort((moment, np.tile(link, 2)))
    under_way = np.cumsum(change[order])[:-1]
    passed = np.diff(moment[order]).astype(np.float64)
    # Between the last end on a link and the first begin on the next one nothing is under way.
    had = np.where(under_way > 0, passed / np.maximum(under_way, 1), 0.0)
    upto, only = np.empty(2 * count), np.empty(2 * count)
    upto[order] = np.append(0.0, np.cumsum(had))
    only[order] = np.append(0.0, np.cumsum(np.where(under_way == 1, passed, 0.0)))
    took = end - begin
    np.divide(upto[count:] - upto[:count], took, out=found, where=took > 0)
    return found, only[count:] - only[:count]
