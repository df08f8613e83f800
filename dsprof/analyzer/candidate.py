"""What a rule finds before anything is known of what it gains: where, on what evidence, and what mending it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from .arrays import Float
from .finding import Finding, Gain
from .whatif import WhatIf


@dataclass(frozen=True, eq=False)
class Excess:
    """A cost that was measured or simulated by itself, and that no replay of ordinary steps tells.

    ms:     how much longer it takes: on each occasion, or in each step
    per:    what `ms` has an entry of: occasions that make steps irregular; those of them that come at random and are
            rare; or ordinary steps
    method: `Gain.method`; None: the usual one of `per`
    less_ms: so much less may be gained than chance alone tells, as what would still be lost is not known;
    least_part: but surely this part of it (None: that is not known either)
    """

    ms: Float
    per: Literal["occasion", "rare occasion", "step"]
    method: str | None = None
    less_ms: float | None = None
    least_part: float | None = None


@dataclass(frozen=True, eq=False)
class OneOf:
    """Several changes, any one of which would do. The one is taken that surely gains most; `also`: what could be done
    instead, which is priced and not taken, as less is known of it."""

    of: tuple[Excess, ...]
    also: tuple[Excess, ...] = ()


@dataclass(frozen=True, eq=False)
class DeviceCost:
    """What devices stand idle for, measured of their own operations in the traced steps.

    ms:      [R, S] of the traced ranks in the judged ones of the traced steps
    took_ms: how long those steps took, mean: tracing kernels makes them longer than ordinary ones
    idle_ms: for how long they did nothing then, where `ms` is a part of that, mean. None: `ms` is of what they did
    busy_ms: for how long they did something, mean: that takes as long when it is not traced, so that an ordinary step
             has the rest for standing idle
    less:    what mending a part of it, and what mending all of it changes, where a replay tells that: then the gain is
             between the two, and no more than was measured
    at_most: a change that gains as much as mending it can, and nobody knows how much of that: from nothing to what it
             gains, or where no replay tells that, to what was measured
    """

    ms: Float
    took_ms: float
    idle_ms: float | None = None
    busy_ms: float = 0.0
    less: tuple[WhatIf, WhatIf] | None = None
    at_most: WhatIf | None = None


@dataclass(frozen=True)
class Between:
    """Of a change that is known up to a factor: between which parts of it the true one lies, and the most that it can
    gain, ms. A step is the longest of many paths, so its length is convex in the work: a part of a change gains that
    part of its gain or more, a multiple that multiple or less."""

    part: float
    multiple: float
    most_ms: float


@dataclass(frozen=True)
class Price:
    """What mending a candidate gains.

    gain:   if it alone is mended
    share:  its part of what mending all that were replayed together gains; None: it was priced by itself
    tried:  of a `OneOf`, what each gains, and then what is `also` possible; `chosen`: which of them `gain` is of. Of a
            `DeviceCost`, what `less` gains by replay
    """

    gain: Gain
    share: Gain | None = None
    tried: tuple[Gain, ...] = ()
    chosen: int = 0


@dataclass(frozen=True, eq=False)
class Candidate:
    """Something that may hold the job up. `judge` prices it, and drops what costs next to nothing.

    code:    of its rule
    change:  what mending it changes in the steps, which is replayed; or the cost itself
    say:     the finding, once its price is known: where, the evidence and the fixes
    counts_cores: `change` itself says what the cores that there are allow; else busy cores take a part of the gain
    between: where the change is known up to a factor only
    by_rank: rank -> the same mended on this rank alone, where it is on several
    spell:   the first and the last step of the one time in which it was there: how long that was is taken as given, as
             one time does not tell how often it comes
    a_trade: it is paid for with something else, such as memory: nobody has lost it, and it has no share of what mending
             all gains
    """

    code: str
    change: WhatIf | Excess | OneOf | DeviceCost
    say: Callable[[Price], Finding]
    counts_cores: bool = False
    between: Between | None = None
    by_rank: Mapping[int, WhatIf] = field(default_factory=dict)
    spell: tuple[int, int] | None = None
    a_trade: bool = False
