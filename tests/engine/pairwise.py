"""Of settings that can be combined in thousands of ways, which combinations of two are in some cases."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

Pair = tuple[tuple[int, object], tuple[int, object]]
"""Two settings, by their places in a case, and a value of each."""


def pairs(case: Iterable[object]) -> set[Pair]:
    """Those that a case has."""
    return set(itertools.combinations(enumerate(case), 2))


def every_pair(values: Sequence[Collection[object]]) -> set[Pair]:
    """All there are of settings with these values."""
    return {
        ((one, a), (other, b))
        for one, other in itertools.combinations(range(len(values)), 2)
        for a, b in itertools.product(values[one], values[other])
    }
