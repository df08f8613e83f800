"""Share the lost time between the faults that cost it, so that the shares sum to what mending all of them saves.

Two faults on different ranks hide each other: mending either alone gains nothing, both together a lot. Each fault's
share is its Shapley value: what it adds to those mended before it, averaged over every order of mending.
"""

from __future__ import annotations

from itertools import combinations
from math import factorial

import numpy as np
import numpy.typing as npt

from .context import Change, Context

Float = npt.NDArray[np.float64]


def attribute(context: Context, changes: dict[str, Change]) -> tuple[dict[str, Float], dict[str, Float], Float]:
    """Fault -> ms saved in each ordinary step, [S]: its share, and if it were mended alone; and the step with
    all mended.

    2^n replays for n faults.
    """
    names = tuple(changes)
    before = context.replayed()
    value: dict[frozenset[str], Float] = {frozenset(): np.zeros_like(before)}
    for size in range(1, len(names) + 1):
        for chosen in combinations(names, size):
            made = tuple(changes[name] for name in chosen)
            value[frozenset(chosen)] = before - context.replayed(made)
    shares = {}
    for name in names:
        rest = [other for other in names if other != name]
        share = np.zeros_like(before)
        for size in range(len(rest) + 1):
            weight = factorial(size) * factorial(len(rest) - size) / factorial(len(names))
            for others in combinations(rest, size):
                share += weight * (value[frozenset((*others, name))] - value[frozenset(others)])
        shares[name] = share
    alone = {name: value[frozenset((name,))] for name in names}
    return shares, alone, before - value[frozenset(names)]
