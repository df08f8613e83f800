"""What a forward or a backward takes whatever the size of its micro-batch: calls and launches take their time, and
weights and their gradients move through memory.

A run in which all micro-batches are of one size does not tell it. Nor do their smallest actions: those of a stage with
fewer layers have fewer calls. So it is taken from what models of many shapes take (benchmarks/constants.py, `fixed`): a
few ms, for actions of 3 ms as for those of 100; and all that it may be is in the interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class FixedPart:
    """`ms` of an action, or this part of it if that is more, and no more than `most` of it."""

    ms: float
    part: float = 0.0
    most: float = 1.0

    def of(self, ms: float) -> float:
        """The part of an action that takes so long."""
        return min(max(self.ms / max(ms, 1e-9), self.part), self.most)

    def times(self, ms: float, size: float) -> float:
        """How many times as long it takes with a micro-batch that is so many times as large."""
        part = self.of(ms)
        return part + (1 - part) * size


FIXED: Final = FixedPart(2.0, most=0.5)
FIXED_BETWEEN: Final = (FixedPart(0.0), FixedPart(6.0, 0.3))
"""Its ends."""
SAID: Final = (
    f"what a forward or a backward takes whatever the size of its micro-batch was not measured: {FIXED.ms:g} ms are "
    f"taken for it, where it may be nothing, {FIXED_BETWEEN[1].ms:g} ms, or {100 * FIXED_BETWEEN[1].part:.0f} %"
)
