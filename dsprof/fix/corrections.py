"""What trials have shown of predictions: by how much the next ones are corrected.

A trial's ratio is what it measured over what was predicted for it. The next prediction of the same finding is
multiplied by the mean of its ratios and of a ratio of 1 that counts as one trial; where none of that finding was tried,
by the mean of all ratios and of a ratio of 1 that counts as three.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

OWN: Final = 1.0
OTHERS: Final = 3.0
"""How many trials the ratio of 1 counts as."""
LARGEST_RATIO: Final = 3.0
"""One trial says no more than that."""


@dataclass(frozen=True)
class Scored:
    """A trial's prediction and its measure, ms a step. code: of the finding."""

    code: str
    predicted_ms: float
    measured_ms: float

    @property
    def ratio(self) -> float:
        """A change that costs has gained nothing."""
        return min(max(self.measured_ms / self.predicted_ms, 0.0), LARGEST_RATIO)


def factor(code: str, scored: Iterable[Scored]) -> float:
    """By which a prediction for this finding is multiplied."""
    useful = [one for one in scored if one.predicted_ms > 0]
    own = [one.ratio for one in useful if one.code == code]
    ratios, prior = (own, OWN) if own else ([one.ratio for one in useful], OTHERS)
    return (prior + sum(ratios)) / (prior + len(ratios))


def corrected(gain: Mapping[str, Any], by: float) -> dict[str, float]:
    """A prediction (ms, low, high, percent) as trials correct it; its interval holds the first one's mean, too."""
    values = {name: float(gain[name]) * by for name in ("ms", "low", "high", "percent")}
    values["low"] = min(values["low"], float(gain["low"]))
    values["high"] = max(values["high"], values["ms"])
    return {name: round(value, 3) for name, value in values.items()}
