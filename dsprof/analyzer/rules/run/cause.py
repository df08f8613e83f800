"""A cause of a late rank, and what causes are held against: how late it is, and what it has more than its peers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from dsprof import gauges

from ...arrays import Bool, Float
from ...finding import Evidence, Fix
from ...study import Study
from ...text import ranks as ranks_in_words
from .late import mine_and_others

MOSTLY: Final = 0.5
"""Of what a rank is late by, that a cause explains."""
CORE_WAIT: Final = "core_wait_seconds"
TAKEN: Final = (gauges.THROTTLED, gauges.STOPPED, gauges.MEMORY_STALL, CORE_WAIT, gauges.PYTHON_THREAD)
"""Gauges, or what their names begin with, of what something else takes of a rank's time, and not its own work."""


@dataclass(frozen=True)
class Cause:
    """name: of the cause, as findings.json has it; words: for the title, behind what the rank is late by; sure: what
    was measured can be nothing else"""

    name: str
    words: str
    evidence: tuple[Evidence, ...]
    fixes: tuple[Fix, ...]
    sure: bool = True


@dataclass(frozen=True)
class Late:
    """A rank, or several, that are late. slow: [R] which; ms: by how much, in the mean of the steps."""

    study: Study
    slow: Bool
    ms: float

    @property
    def who(self) -> str:
        return ranks_in_words(self.study.ranks_where(self.slow))

    @property
    def step_ms(self) -> float:
        """How long a step of the slow ranks takes."""
        return float(self._lengths[self.slow].mean())

    @property
    def _lengths(self) -> Float:
        return np.asarray(np.nanmean(self.study.gauges.wall_ms, axis=1))

    def gauge(self, name: str) -> tuple[float, float]:
        """By how much a gauge of seconds rises in a step, ms: on the slow ranks, and the median of the others; 0 where
        it is not known. What is taken from a rank (`TAKEN`) is that of a step as long as the slow ranks': where ranks
        do not wait for each other, longer steps lose more without being late for it."""
        spent = self.study.gauges.spent(name).mean(axis=1)
        if name.startswith(TAKEN):
            spent = spent * self.step_ms / np.maximum(self._lengths, 1e-9)
        return mine_and_others(spent, self.slow)

    def beyond(self, name: str) -> float:
        """What the slow ranks have of it more than the others."""
        mine, others = self.gauge(name)
        return mine - others

    def mine_and_others(self, by_rank: Float) -> tuple[float, float]:
        """Mean of the slow ranks, and median of the others, of what is known of each, [R]."""
        return mine_and_others(by_rank, self.slow)

    def known_on_both(self, by_rank: Float) -> bool:
        """Whether something is known of a slow rank and of another one."""
        known = np.isfinite(by_rank)
        return bool(known[self.slow].any() and known[~self.slow].any())

    def mostly(self, beyond: float) -> bool:
        return self.ms > 0 and beyond > MOSTLY * self.ms
