"""What a change that a user asks about does to the steps, before anything is known of what it saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .arrays import Float
from .candidate import Between
from .whatif import WhatIf

WhatIfs = tuple[WhatIf, ...]


def _as_replayed(before: Float, saved: Float) -> Float:
    return saved


@dataclass(frozen=True, eq=False)
class Effect:
    """A change to the steps.

    then:    what it changes
    now:     what the present steps are compared as, where the change is modelled: with the same model of what there is
             now, its own error cancels from the difference
    others:  (now, then) that it may as well be, such as over a slower link: they widen the interval
    latency, bandwidth: by what those of every link are multiplied
    correct: (the steps before, what is saved of each), ms, [S] -> what is saved with what no replay knows, such as
             cores that computation and communication share
    like:    the code of the rule whose predictions are of the same kind: their error is this one's
    per_batch: what a step is then divided by, to be of as much as it is of now: 2.0 of a batch twice as large
    counts_cores, between: as of `Candidate`
    unsure_ms: how much more or less than is replayed it may save, ms, of what no replay knows
    notes:   what the prediction rests on, or is of, each in a sentence
    """

    like: str
    then: WhatIfs = ()
    now: WhatIfs = ()
    others: tuple[tuple[WhatIfs, WhatIfs], ...] = ()
    latency: float = 1.0
    bandwidth: float = 1.0
    correct: Callable[[Float, Float], Float] = _as_replayed
    per_batch: float = 1.0
    counts_cores: bool = False
    between: Between | None = None
    unsure_ms: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def variants(self) -> tuple[tuple[WhatIfs, WhatIfs], ...]:
        """(now, then) that it is, and then those that it may as well be."""
        return ((self.now, self.then), *self.others)
