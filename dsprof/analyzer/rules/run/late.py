"""Who of several that are to do the same work takes longer for it, again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from scipy.special import ndtri, stdtrit

from ...arrays import Bool, Float
from ...price.confidence_interval import intervals
from .late_pattern import WITHIN, spell_of, stands_out, struck_steps, within

LEAST_OF_WORST: Final = 0.1
"""A rank this much less late than the latest is not named beside it."""
MOST_OF_WORK: Final = 0.95
MANY: Final = 32
"""Of so many ranks that do the same, some are late in the mean by chance (`_not_by_chance`)."""
OF_ALL: Final = 0.025
"""The probability that any of them is."""
HALF_OF_NORMAL: Final = 1.349
"""Standard deviations of a normal distribution that its middle half is wide."""
LONG_TAIL: Final = 1.5
"""The latest of many is at most this many times as far from the middle as in a normal distribution, since what disturbs
hosts comes seldom and is large."""
APART: Final = 5.0
"""A rank is late for a while only if it is so by so many times what its lateness varies by otherwise, or for long."""


def late_ones(own: Float, late: Float, groups: Sequence[Bool], least_ms: float) -> Float | None:
    """The share of the work of each in each step that makes it late in the mean, [R, S]; None where none is.

    Late is who takes longer in the mean of the steps, and by more than chance explains: the low end of the mean's 95 %
    interval is above nothing. Or who is late for a while, in a spell that stands out of its other steps: that it was is
    sure, though not that it will be again: the interval of what fixing it gains says so of a short one, and what a long
    one cost is told of this run.

    own, late: [R, S] ms, work, and by how much it is more than what is typical; groups: of those that do the same;
    least_ms: what is less late does not count
    """
    mean = late.mean(axis=1)
    if mean.max() < least_ms:
        return None
    surely = intervals(late)[0] > 0
    worse = mean > LEAST_OF_WORST * mean.max()
    slow = surely & worse
    for group in groups:
        members = int(group.sum())
        # Of ranks that are late in turn each is late, but none more than the others.
        others = (own[group].sum(axis=0) - own[group]) / (members - 1)
        slow[group] &= (intervals(own[group] - others)[0] > 0) & _not_by_chance(late[group])
        if 2 * slow[group].sum() > members:  # then that is how long it takes
            slow &= ~group
        if not slow[group].any():
            then = [rank for rank in np.flatnonzero(group & worse).tolist() if in_a_spell(late[rank], group, rank, own)]
            slow[then if 2 * len(then) <= members else []] = True
    if not slow.any():
        return None
    # What makes it late in the mean, taken from the steps in which it was late: from all alike if it is always so.
    removed = np.clip(late, 0, None) * slow[:, None]
    removed *= (mean / np.maximum(removed.mean(axis=1), 1e-9))[:, None] * slow[:, None]
    share: Float = np.clip(removed / np.maximum(own, 1e-9), 0, MOST_OF_WORK)
    return share


def _not_by_chance(late: Float) -> Bool:
    """Which of the ranks that do the same are later than one of so many would be by chance, [R]: by what their own
    steps vary by, or by what half of the ranks, those that are most alike, differ by. All of a few ranks. late: [R, S]
    """
    ranks, steps = late.shape
    if ranks < MANY:
        return np.ones(ranks, bool)
    mean, error = late.mean(axis=1), late.std(axis=1, ddof=1) / np.sqrt(steps)
    always = mean > stdtrit(steps - 1, 1 - OF_ALL / ranks) * error
    ordered, half = np.sort(mean), ranks // 2 + 1
    spread = float((ordered[half - 1 :] - ordered[: ranks - half + 1]).min()) / HALF_OF_NORMAL
    far: Bool = mean > np.median(mean) + LONG_TAIL * spread * ndtri(1 - OF_ALL / ranks)
    late_for_sure: Bool = far | always
    return late_for_sure


def in_a_spell(late: Float, group: Bool, rank: int, own: Float) -> bool:
    """Whether a rank of a group is late for a while. late: of it, ms, [S]; own: of all, ms, [R, S]."""
    struck = struck_steps(late)
    spell = spell_of(struck)
    if spell is None:
        return False
    inside = within(spell, len(struck))
    then, otherwise = late[inside & struck], late[~inside]
    others = group.copy()
    others[rank] = False
    alone = own[rank, inside & struck] > own[others][:, inside & struck].max(axis=0)
    usual = float(np.median(otherwise))
    varies = max(float(np.percentile(np.abs(otherwise - usual), 90)), 1e-9)
    apart = then.min() > otherwise.max() and then.mean() - usual > APART * varies
    return bool((apart or stands_out(late, struck)) and alone.mean() > WITHIN)


def typical(own: Float) -> Float:
    """What the work of a step takes the typical one of a group, [S]: the median; of two the faster in the mean, as one
    that is slow now and then is no faster than usual in between."""
    if own.shape[0] == 2:
        faster: Float = own[int(own.mean(axis=1).argmin())]
        return faster
    middle: Float = np.median(own, axis=0)
    return middle


def mine_and_others(by_rank: Float, slow: Bool) -> tuple[float, float]:
    """Mean of the slow ranks, and median of the others, of what is known [R]: 0 where nothing is."""
    mine, others = (of[np.isfinite(of)] for of in (by_rank[slow], by_rank[~slow]))
    return float(mine.mean()) if len(mine) else 0.0, float(np.median(others)) if len(others) else 0.0
