"""What comes again and again after a fixed number of steps, such as collections of garbage, or checkpoints."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..arrays import Float

FEWEST_TIMES: Final = 4
"""It has to come so often; a few that are as far apart may be so by chance."""
APART: Final = 1 / 3
"""Those with it and those without it differ among themselves by less than this part of what lies between them."""


def period(values: Float) -> int:
    """After how many values one of the large ones comes again, where they come in a fixed rhythm, and are clearly told
    from the others; 1: in none."""
    if len(values) < 2 * FEWEST_TIMES:
        return 1
    ascending = np.sort(values)
    split = int(np.diff(ascending).argmax())
    large = values > (ascending[split] + ascending[split + 1]) / 2
    at = np.flatnonzero(large)
    gaps = np.diff(at)
    if len(at) < FEWEST_TIMES or gaps.min() != gaps.max() or gaps[0] < 2:
        return 1
    found = int(gaps[0])
    if at[0] >= found or len(values) - at[-1] > found:  # it began, or ended, among them
        return 1
    with_it, without = values[large], values[~large]
    apart = float(with_it.mean() - without.mean())
    return found if max(float(with_it.std()), float(without.std())) < APART * apart else 1
