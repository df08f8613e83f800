"""Predictions of step times with intervals, learnt from measured steps.

The intervals come from steps left out of the fit. In turn each fold of the rows is left out, the figures are learnt
from the others, and the fold's rows are predicted: once with whole layer shapes left out, once with single rows. How
far each prediction is off, in units of how uncertain the fit says that it is, gives the width that holds for the wanted
share of them (a conformal quantile). As the unit grows with the distance from what was measured, so does the interval.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .cost import UNKNOWN, Expected
from .fit import Fitted, fit
from .steps import Column, StepShapes

LEVEL: Final = 0.9
"""Share of steps that an interval is to hold."""
NORMAL: Final = 1.645
"""The quantile for LEVEL of a normal distribution: no interval is narrower, however well the rows fit."""
FOLDS: Final = 5
FEW: Final = 24
"""Parts up to this many are left out one at a time."""
ROW, SHAPE = 0.025, 0.07
"""Relative errors that are expected even where the figures are known: of a row whose layer was measured by many rows,
and of a layer that was not."""
SINGLE: Final = 4.0
"""By how much the square of ROW grows for a layer that a single row has measured: its effect takes up that row's
other oddities."""


RANGED: Final = ("hidden", "sequence", "micro_batch", "tp")
"""What a layer's time is told by; beyond the measured range it is known less."""


@dataclass(frozen=True)
class Predicted:
    """ms: of each step. low, high: the ends of its interval."""

    ms: Column
    low: Column
    high: Column


@dataclass(frozen=True)
class Calibrated:
    """fitted: from all rows. known, new: quantiles of the errors by their unit, for layers that were measured and those
    that were not. rows: how many were measured. held_out: mean absolute relative error of those that were left out with
    their layer shape, NaN where they are too few."""

    fitted: Fitted
    measured: _Measured
    known: float
    new: float
    rows: int
    held_out: float

    @property
    def network_measured(self) -> bool:
        """Whether a row went over the network between nodes."""
        return self.measured.across

    def predict(self, steps: StepShapes) -> Predicted:
        ms = self.fitted.step_ms(steps)
        known = self.fitted.known(steps)
        width = np.where(known, self.known, self.new) * self.measured.unit(self.fitted, steps)
        return Predicted(ms, ms * np.exp(-width), ms * np.exp(width))


def calibrate(steps: StepShapes, ms: Column, hardware: Expected = UNKNOWN) -> Calibrated:
    """From measured steps; none at all leaves the hardware's typical figures. ms: as measured, of each row."""
    fitted = fit(steps, ms, hardware)
    measured = _Measured.of(steps)
    if len(steps) < 3:
        return Calibrated(fitted, measured, NORMAL, NORMAL, len(steps), math.nan)
    shapes = steps.layer_shapes()
    number = {shape: i for i, shape in enumerate(sorted(set(shapes)))}
    by_shape = np.array([number[shape] for shape in shapes], dtype=np.int64)
    new, errors = _scores(steps, ms, by_shape, fitted, hardware)
    wide = quantile(new, len(number))
    several = np.bincount(by_shape)[by_shape] > 1
    known = NORMAL
    if several.sum() >= 2 * FOLDS:
        rows, _ = _scores(steps, ms, np.arange(len(steps)), fitted, hardware)
        known = quantile(rows[several], int(several.sum()))
    return Calibrated(fitted, measured, known, wide, len(steps), float(np.mean(np.abs(np.expm1(errors)))))


@dataclass(frozen=True)
class _Measured:
    """What a fit has seen. across: whether a row went over the network between nodes. rows: how many, of each layer
    shape. ranges: least and most of each of RANGED, as base-2 logarithms."""

    across: bool
    rows: Mapping[tuple[float, ...], int]
    ranges: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, steps: StepShapes) -> _Measured:
        logs = {name: np.log2(getattr(steps, name)) for name in RANGED}
        ranges = {name: (float(log.min()), float(log.max())) for name, log in logs.items()} if len(steps) else {}
        return cls(bool((steps.gpus > steps.gpus_per_node).any()), Counter(steps.layer_shapes()), ranges)

    def unit(self, fitted: Fitted, steps: StepShapes) -> Column:
        """How uncertain the logarithm of each step's time is by the fit: the interval's width is a multiple of it."""
        count = np.array([self.rows.get(shape, 0) for shape in steps.layer_shapes()])
        row = ROW**2 * (1 + SINGLE / np.maximum(count, 1))
        beside = np.where(count > 0, row, SHAPE**2 * (1 + self.beyond(steps)))
        return np.sqrt(beside + fitted.spread(steps) ** 2)

    def beyond(self, steps: StepShapes) -> Column:
        """How many doublings each row lies outside of what was measured, all of RANGED together."""
        total = np.zeros(len(steps))
        for name, (least, most) in self.ranges.items():
            log = np.log2(getattr(steps, name))
            total += np.maximum(0, least - log) + np.maximum(0, log - most)
        return total


def quantile(scores: Column, independent: int) -> float:
    """What LEVEL of further scores stay below, if `independent` of these are: the largest where they are too few; and
    never less than that of a normal distribution."""
    share = min(1.0, LEVEL * (1 + 1 / max(independent, 1)))
    return max(NORMAL, float(np.quantile(scores, share, method="higher")))


def _scores(
    steps: StepShapes, ms: Column, part: npt.NDArray[np.int64], whole: Fitted, hardware: Expected
) -> tuple[Column, Column]:
    """Of each row, left out with all rows of the fold that its part is in: its error by its unit, and its error.
    whole: the fit of all rows, where each of these fits begins."""
    parts = int(part.max()) + 1
    folds = parts if parts <= FEW else FOLDS
    errors, units = np.zeros(len(steps)), np.ones(len(steps))
    for fold in range(folds):
        out = part % folds == fold
        if out.all():
            continue
        rest, left = steps.take(~out), steps.take(out)
        fitted = fit(rest, ms[~out], hardware, begin=whole)
        errors[out] = np.log(fitted.step_ms(left) / ms[out])
        units[out] = _Measured.of(rest).unit(fitted, left)
    return np.abs(errors) / units, errors
