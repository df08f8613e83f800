"""What a change that a user, or a rule, asks about does to the steps, before anything is known of what it saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .candidate import Between
from .whatif import WhatIf

WhatIfs = tuple[WhatIf, ...]


@dataclass(frozen=True)
class Fewer:
    """Collectives of which there are fewer, or more.

    share:       the part of these collectives that a change removes, and with them what each costs by itself; negative:
                 it adds some
    part_of_all: the part that these are of all that the job communicates, by number
    moved_bytes: by these, of one rank in a step
    """

    share: float
    part_of_all: float = 1.0
    moved_bytes: float = 0.0


@dataclass(frozen=True, eq=False)
class Effect:
    """A change to the steps: what is replayed of it, and what is known of it that no replay knows. `price.effects`
    says what it saves.

    then:    what it changes
    now:     what the present steps are compared as, where the change is modelled: with the same model of what there is
             now, its own error cancels from the difference
    others:  (now, then) that it may as well be, such as over a slower link: they widen the interval
    latency, bandwidth: by what those of every link are multiplied
    overlaps: whether what it saves is communication that moves beside computation, or that no longer is there
             ("no more"), for which both need cores
    fewer:   the collectives of which there are fewer; None: there are as many
    costs_ms: what it costs in each step beside what is replayed; below 0: what it saves
    costs_between: so many times as much it may cost at least, and at most
    at_most_ms: no more can be saved of a step, in the mean
    part:    of what is saved, such as half of it where two steps have it between them
    like:    the code of the rule whose predictions are of the same kind: their error is this one's
    per_batch: what a step is then divided by, to be of as much as it is of now: 2.0 of a batch twice as large
    counts_cores, between, spell: as of `Candidate`
    unsure_ms: how much more or less than is replayed it may save, ms, of what no replay knows
    notes:   what the prediction rests on, or is of, each in a sentence
    """

    like: str
    then: WhatIfs = ()
    now: WhatIfs = ()
    others: tuple[tuple[WhatIfs, WhatIfs], ...] = ()
    latency: float = 1.0
    bandwidth: float = 1.0
    overlaps: Literal["", "more", "no more"] = ""
    fewer: Fewer | None = None
    costs_ms: float = 0.0
    costs_between: tuple[float, float] = (1.0, 1.0)
    at_most_ms: float | None = None
    part: float = 1.0
    per_batch: float = 1.0
    counts_cores: bool = False
    between: Between | None = None
    spell: tuple[int, int] | None = None
    unsure_ms: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def variants(self) -> tuple[tuple[WhatIfs, WhatIfs], ...]:
        """(now, then) that it is, and then those that it may as well be."""
        return ((self.now, self.then), *self.others)
