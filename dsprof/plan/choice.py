"""How well a calibration predicts steps that were measured and kept from it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from .calibrate import Calibrated
from .table import Measurements

NEAR: Final = 0.02
"""A layout is as good as the fastest if it takes at most this share longer."""


@dataclass(frozen=True)
class Score:
    """rows: how many were predicted. mape: mean absolute relative error. held: share inside their intervals. width:
    half of the median interval, as a share. groups: sets of at least two rows that differ in their layout alone; near:
    share of them where the layout that was predicted to be the fastest is within NEAR of it."""

    rows: int
    mape: float
    held: float
    width: float
    groups: int
    near: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def score(calibrated: Calibrated, kept: Measurements) -> Score:
    """Predictions beside what was measured."""
    found = calibrated.predict(kept.steps)
    near = best_within(kept, found.ms)
    return Score(
        rows=len(kept.ms),
        mape=float(np.mean(np.abs(found.ms / kept.ms - 1))),
        held=float(np.mean((found.low <= kept.ms) & (kept.ms <= found.high))),
        width=float(np.median(np.log(found.high / found.low)) / 2),
        groups=len(near),
        near=float(np.mean(near)) if near else None,
    )


def best_within(kept: Measurements, predicted: Any) -> list[bool]:
    """Of each group whether the layout predicted to be the fastest is within NEAR of the fastest."""
    groups: dict[tuple[float, ...], list[int]] = defaultdict(list)
    for row, group in enumerate(kept.steps.groups()):
        groups[group].append(row)
    several = [np.array(rows) for rows in groups.values() if len(rows) > 1]
    return [bool(kept.ms[rows[np.argmin(predicted[rows])]] <= (1 + NEAR) * kept.ms[rows].min()) for rows in several]
