"""What a table of measured steps tells: the hardware's figures, and the steps of another table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .calibrate import LEVEL, Calibrated, Predicted, calibrate
from .choice import Score, score
from .cost import COEFFICIENTS, UNKNOWN
from .hardware import Cluster
from .steps import Column
from .table import Measurements


@dataclass(frozen=True)
class TableAnswer:
    """calibrated: from the table. asked, predicted: the rows of another one. score: where it has times, of those that
    were not learnt. learnt_too: how many are also in the table that was learnt. spread: that was expected of the
    figures."""

    calibrated: Calibrated
    asked: Measurements | None = None
    predicted: Predicted | None = None
    score: Score | None = None
    learnt_too: int = 0
    spread: Column = field(default_factory=UNKNOWN.spread.copy)

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
                "measured": bool(sd < expected / 2),
            }
            for one, value, sd, expected in zip(COEFFICIENTS, fitted.values, spread, self.spread, strict=True)
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
            found["steps_learnt_too"] = self.learnt_too
        if self.score is not None:
            found["score"] = self.score.to_dict()
        return found


def from_table(learnt: Measurements, asked: Measurements | None = None, cluster: Cluster | None = None) -> TableAnswer:
    """Learn from one table, and predict another. cluster: the hardware, where it is told; else what is typical of A100
    with a wide spread. Rows that were learnt are predicted as well, but are no test, and so are left out of the score.
    """
    hardware = UNKNOWN if cluster is None else cluster.expected()
    calibrated = calibrate(learnt.steps, learnt.ms, hardware)
    if asked is None:
        return TableAnswer(calibrated, spread=hardware.spread)
    predicted = calibrated.predict(asked.steps)
    seen = set(learnt.steps.rows())
    new = np.array([row not in seen for row in asked.steps.rows()], dtype=np.bool_)
    timed = None
    if new.any() and not np.isnan(asked.ms).any():
        timed = score(calibrated, Measurements(asked.steps.take(new), asked.ms[new]))
    return TableAnswer(calibrated, asked, predicted, timed, int((~new).sum()), hardware.spread)
