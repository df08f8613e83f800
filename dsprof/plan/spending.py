"""What a training costs: GPU hours, and money where a price is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

THOUSAND: Final = 1000.0
"""Steps that a price is told for where the whole training is not given."""


@dataclass(frozen=True)
class Spending:
    """steps: of the whole training. gpu_hours, money (None without a price): with the ends of their intervals."""

    steps: float
    gpu_hours: tuple[float, float, float]
    money: tuple[float, float, float] | None


def spending(ms: tuple[float, float, float], ranks: int, steps: float | None, price: float | None) -> Spending | None:
    """ms: of a step, with the ends of its interval. steps: of the whole training; None: THOUSAND where there is a
    price. price: of a rank's hour. None where neither is given."""
    if steps is None and price is None:
        return None
    whole = THOUSAND if steps is None else steps
    hours = (ms[0] * whole * ranks / 3.6e6, ms[1] * whole * ranks / 3.6e6, ms[2] * whole * ranks / 3.6e6)
    return Spending(whole, hours, None if price is None else (hours[0] * price, hours[1] * price, hours[2] * price))
