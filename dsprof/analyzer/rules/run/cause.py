"""A cause of a late rank, and what causes are held against: how late it is, and what it has more than its peers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ...arrays import Bool, Float
from ...finding import Evidence, Fix
from ...study import Study
from ...text import ranks as ranks_in_words
from .late import mine_and_others

MOSTLY: Final = 0.5
"""Of what a rank is late by, that a cause explains."""


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

    def gauge(self, name: str) -> tuple[float, float]:
        """By how much a gauge of seconds rises in a step, ms: on the slow ranks, and the median of the others; 0 where
        it is not known."""
        return mine_and_others(self.study.gauges.spent(name).mean(axis=1), self.slow)

    def gauge_of_time(self, name: str) -> tuple[float, float]:
        """As `gauge`, for a step as long as those of the slow ranks: of others whose steps are longer or shorter, as
        where ranks step without waiting for each other, it is the same share of the time."""
        length = np.nanmean(self.study.gauges.wall_ms, axis=1)
        share = self.study.gauges.spent(name).mean(axis=1) / np.maximum(length, 1e-9)
        return mine_and_others(share * float(length[self.slow].mean()), self.slow)

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
