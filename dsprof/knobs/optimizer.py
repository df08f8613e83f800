"""Knobs of torch.optim."""

from __future__ import annotations

from typing import Final

from .knob import ROUNDING, Knob, TrueOrFalse

_OPTIMIZER: Final = "an optimizer of torch.optim that has it"

KNOBS: Final = (
    Knob("optimizer.fused", "one kernel updates all parameters", TrueOrFalse(), ROUNDING, _OPTIMIZER),
    Knob(
        "optimizer.foreach",
        "a kernel for each operation of the update, for all parameters",
        TrueOrFalse(),
        ROUNDING,
        _OPTIMIZER,
    ),
)
