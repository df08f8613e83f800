"""Whether two jobs train alike: their losses, step by step, on each rank.

Two jobs differ by the sum over the first steps of how far their losses are apart, over the sum of the losses' sizes.
How far two runs of the job as it was are apart says what the job itself does from run to run: where that is much, as it
is not seeded, nothing is compared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dsprof.analyzer.text import percent
from dsprof.knobs import KnobError, find
from dsprof.knobs.knob import ROUNDING, SAME

Losses = Mapping[int, Mapping[int, float]]
"""Rank -> step -> loss."""

FIRST_STEPS: Final = 20
"""That are compared: what rounding changes grows from step to step."""
ALLOWED: Final = {SAME: 1e-5, ROUNDING: 0.01}
"""What a knob says of the numbers -> how far the losses may be apart."""
OF_THE_JOB: Final = 3.0
"""They may also be so many times as far apart as two runs of the job as it was."""


@dataclass(frozen=True)
class LossCheck:
    """apart:   how far the losses of original and changed job are apart, a share; None: not compared, and `why`
    allowed: how far they may be, by what the knobs promise and what the job itself does
    """

    apart: float | None
    allowed: float = 0.0
    why: str = ""

    @property
    def broken(self) -> str:
        """What is wrong, in words; empty: nothing is."""
        if self.apart is None or self.apart <= self.allowed:
            return ""
        by = f"by {percent(100 * self.apart)}" if math.isfinite(self.apart) else "in which of them are numbers"
        shares = f"{by}, where at most {percent(100 * self.allowed)} is to be expected"
        return f"the losses of the first steps differ {shares}: it trains differently than it promises"

    def to_dict(self) -> dict[str, Any]:
        return {"apart": self.apart, "allowed": self.allowed, **({"why": self.why} if self.why else {})}


def check(knobs: Iterable[str], original: Sequence[Losses], changed: Sequence[Losses]) -> LossCheck:
    """Compare the losses of the jobs of both sides, by what the knobs of these keys promise."""
    promised = [_promise(key) for key in knobs]
    if any(one not in ALLOWED for one in promised):
        return LossCheck(None, why="the change may train differently")
    original, changed = [one for one in original if one], [one for one in changed if one]
    pairs = [_apart(one, other) for one in original for other in changed]
    known = [one for one in pairs if one is not None]
    if not known:
        return LossCheck(None, why="the job calls backward of no single number")
    own = [apart for pair in itertools.combinations(original, 2) if (apart := _apart(*pair)) is not None]
    if not own:
        return LossCheck(None, why="two runs of the job as it was are needed to compare its losses")
    allowed = max(ALLOWED[one] for one in promised)
    if max(own) > max(ALLOWED.values()):
        differs = percent(100 * max(own))
        return LossCheck(None, why=f"the job's own losses differ from run to run by {differs}: seed it to compare them")
    return LossCheck(min(known), max(allowed, OF_THE_JOB * max(own)))


def _promise(key: str) -> str:
    try:
        return find(key).numbers
    except KnobError:
        return ""


def _apart(one: Losses, other: Losses) -> float | None:
    """How far two jobs are apart; None: they have no step of a rank in common."""
    both = [
        (losses[step], other[rank][step])
        for rank, losses in one.items()
        if rank in other
        for step in sorted(losses.keys() & other[rank].keys())[:FIRST_STEPS]
    ]
    if not both:
        return None
    both = [(a, b) for a, b in both if math.isfinite(a) or math.isfinite(b)]  # a job may diverge, changed or not
    if not all(math.isfinite(a) and math.isfinite(b) for a, b in both):
        return math.inf
    size = sum(abs(a) + abs(b) for a, b in both) / 2
    return sum(abs(a - b) for a, b in both) / size if size else 0.0
