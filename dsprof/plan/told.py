"""What a table of measured steps tells: the hardware's figures, and the steps of another table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .calibrate import LEVEL, Calibrated, Predicted, calibrate
from .choice import Score, score
from .cost import COEFFICIENTS, TYPICAL
from .table import Measurements


@dataclass(frozen=True)
class TableAnswer:
    """calibrated: from the table. asked, predicted: the rows of another one. score: where it has times."""

    calibrated: Calibrated
    asked: Measurements | None = None
    predicted: Predicted | None = None
    score: Score | None = None

    def figures(self) -> list[dict[str, Any]]:
        """Each figure, with its interval, and whether the rows have moved it from what is typical."""
        fitted = self.calibrated.fitted
        spread = np.sqrt(np.diag(fitted.covariance))
        return [
            {
                "name": one.name,
                "says": one.says,
                "unit": one.unit,
                "value": float(value),
                "low": float(value * math.exp(-1.645 * sd)),
                "high": float(value * math.exp(1.645 * sd)),
                "measured": bool(sd < one.spread / 2),
            }
            for one, value, sd in zip(COEFFICIENTS, fitted.values, spread, strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        held = self.calibrated.held_out
        found: dict[str, Any] = {
            "schema": 1,
            "learnt_from": self.calibrated.rows,
            "held_out_mape": None if math.isnan(held) else held,
            "interval": LEVEL,
            "figures": self.figures(),
        }
        if self.predicted is not None:
            columns = (self.predicted.ms, self.predicted.low, self.predicted.high)
            found["steps"] = [{"ms": ms, "low": low, "high": high} for ms, low, high in zip(*columns, strict=True)]
        if self.score is not None:
            found["score"] = self.score.to_dict()
        return found


def from_table(learnt: Measurements, asked: Measurements | None = None) -> TableAnswer:
    """Learn from one table, and predict another."""
    calibrated = calibrate(learnt.steps, learnt.ms, TYPICAL)
    if asked is None:
        return TableAnswer(calibrated)
    predicted = calibrated.predict(asked.steps)
    timed = None if np.isnan(asked.ms).any() else score(calibrated, asked)
    return TableAnswer(calibrated, asked, predicted, timed)
