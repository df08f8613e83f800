"""A ratio that benchmarks measure in rounds, with its interval."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

DRAWS = 10_000


def ratio(paired: NDArray[np.float64]) -> dict[str, float]:
    """Of the rounds' logarithms [rounds]: the geometric mean, `trimmed`, and its 95 % interval by the bootstrap."""
    draw = np.random.default_rng(0).integers(0, len(paired), (DRAWS, len(paired)))
    low, high = np.percentile(trimmed(paired[draw]), [2.5, 97.5])
    return {"ratio": float(np.exp(trimmed(paired))), "low": float(np.exp(low)), "high": float(np.exp(high))}


def trimmed(values: NDArray[np.float64]) -> Any:
    """Of the last axis, the mean of the three fifths in the middle."""
    aside = values.shape[-1] // 5
    return np.sort(values, axis=-1)[..., aside : values.shape[-1] - aside].mean(axis=-1)
