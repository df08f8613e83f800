"""Where iterations end in a sequence of optimizer steps: the shortest pattern that the sequence repeats.

A GAN whose discriminator is stepped five times for each step of its generator steps D D D D D G: that is one iteration.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

LONGEST_PERIOD: Final = 64
EXCEPTIONS: Final = 0.05
"""Share of the units that may be out of the pattern: a step that was skipped, one that was made twice."""
FEWEST_BETWEEN: Final = 4
"""Periods for each time that something was out of the pattern: what comes with each period belongs to it."""
MOST_CHANGES: Final = 4 * EXCEPTIONS
"""Share of the units that differ from the one a period later, beyond which counting exceptions is not worth it: one
that is inserted or missing changes what is a period before and after it."""
FEWEST_SEEN: Final = 4
"""Steps of an optimizer that show whether it is regular."""
REGULAR: Final = 0.9
"""Share of an optimizer's steps, if it is regular, that are half to twice its median distance apart."""


def iteration_ends(units: Int) -> Int | None:
    """Index of the last unit of each iteration, where `units` says by a number what was stepped in each.

    A period begins where the sequence begins. What is out of the pattern stands for itself, or, if it is shorter than
    half a period, belongs to the next; a period that has only begun when the sequence ends is no iteration. None if
    nothing repeats.
    """
    count = len(units)
    for period in range(1, min(LONGEST_PERIOD, count // 2) + 1):
        if (units[period:] != units[:-period]).mean() <= MOST_CHANGES:
            found = _ends_of_pattern(units, _pattern(units, period))
            if found is not None:
                return found
    return None


def rarest_regular(steps: Bool) -> Int | None:
    """Index of the last unit of each iteration, if one ends with each step of the rarest optimizer that is regular.

    steps[k, i]: whether optimizer k was stepped in unit i. None if there is no such optimizer, or it is stepped in
    nearly every unit.
    """
    count = steps.shape[1]
    for optimizer in np.argsort(steps.sum(axis=1), kind="stable"):
        at = np.flatnonzero(steps[optimizer])
        if len(at) < FEWEST_SEEN:
            continue
        apart = np.diff(at)
        usual = int(np.median(apart))
        if usual > LONGEST_PERIOD or ((2 * apart >= usual) & (apart <= 2 * usual)).mean() < REGULAR:
            continue
        if usual == 1:
            return None
        # Where it was not stepped for long, such as while the others warm up, the others stand for themselves.
        since = np.arange(count) - np.concatenate([[-1], at])[np.searchsorted(at, np.arange(count))]
        until = np.concatenate([at, [count + usual]])[np.searchsorted(at, np.arange(count))] - np.arange(count)
        alone = (since + until > 2 * usual) & (until >= usual)
        if count - 1 - int(at[-1]) <= 2 * usual:
            alone[int(at[-1]) + 1 :] = False
        return np.flatnonzero(steps[optimizer] | alone)
    return None


def _pattern(units: Int, period: int) -> Int:
    """The first `period` units that come again often: from the beginning, unless that is out of the pattern."""
    windows = np.lib.stride_tricks.sliding_window_view(units, period)
    _, which, times = np.unique(windows, axis=0, return_inverse=True, return_counts=True)
    often = times[which.reshape(-1)]
    found: Int = windows[int(np.argmax(2 * often >= often.max()))]
    return found


def _ends_of_pattern(units: Int, pattern: Int) -> Int | None:
    """Index of the last unit of each iteration; None if too many units are out of the pattern."""
    count, period = len(units), len(pattern)
    matches = np.ones(count - period + 1, bool)
    for offset, symbol in enumerate(pattern.tolist()):
        matches &= units[offset : offset + len(matches)] == symbol
    begins = np.flatnonzero(matches)
    found: list[int] = []
    at = interruptions = exceptions = repetitions = 0
    while at < count:
        following = int(np.searchsorted(begins, at))
        begin = int(begins[following]) if following < len(begins) else count
        strays = begin - at
        if begin == count and strays < period and (units[at:] == pattern[:strays]).all():
            break
        exceptions += strays
        interruptions += strays > 0
        if strays > period:
            found += range(at, begin)
        elif 2 * strays >= period or (strays and begin == count):
            found.append(begin - 1)
        if begin < count:
            found.append(begin + period - 1)
            repetitions += 1
        at = begin + period
    enough = repetitions >= max(2, FEWEST_BETWEEN * interruptions) and exceptions <= EXCEPTIONS * count
    return np.array(found, np.int64) if enough else None
