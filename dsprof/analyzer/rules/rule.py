"""A rule: one record that holds all that is known of a code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..finding import Finding, Gain
from ..price.calibration import ModelError
from ..signals import Signal
from ..study import Study
from ..whatif.work import Change


@dataclass(frozen=True, eq=False)
class Fault:
    """Work that would go away if a fault were fixed. It is replayed, alone and with all other faults.

    change:   what would go away; None where nothing is lost to it
    describe: (study, change, the gain of fixing it alone, its share of what fixing all gains) -> finding
    counts_cores: `change` itself says what the cores that there are allow; else busy cores take a part of the gain
    """

    change: Callable[[Study], Change | None]
    describe: Callable[[Study, Change, Gain, Gain], Finding]
    counts_cores: bool = False


@dataclass(frozen=True, eq=False)
class Look:
    """A function that finds and says what it gains by itself. One that is about several codes is in the records of all.

    needs:      it is not asked where one of these signals is absent
    settles:    codes that it judges by itself where kernels were traced, whatever else could not
    """

    find: Callable[[Study], list[Finding]]
    needs: tuple[Signal[Any], ...] = ()
    settles: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """All that is known of a code, but for the collectors without which it cannot be told: those say so in their own
    records (`collectors/catalogue.py`). A module of the folders of `rules/` that has RULES adds its records to these.

    code:       never changes meaning
    says:       what a finding of it says, as docs/findings.md lists it
    explains:   parts of the step's budget, or kinds of the run's time, that it can explain
    fault, looks: what finds it
    needs:      signals without which there is nothing to judge, whatever was captured
    outranked_by: codes that its gain takes to be fixed: beside one of them it is no more severe
    error:      what its predictions by replay miss by, beside the noise of the steps
    came_true:  of how many predictions the interval held what was then measured, and how many there were (all runs of
                all pairs of benchmarks/predictions.py); None: none was ever tried
    place:      where it is listed
    """

    code: str
    says: str
    explains: tuple[str, ...] = ()
    fault: Fault | None = None
    looks: tuple[Look, ...] = ()
    needs: tuple[Signal[Any], ...] = ()
    outranked_by: tuple[str, ...] = ()
    error: ModelError | None = None
    came_true: tuple[int, int] | None = None
    place: int = 1000

    @property
    def confidence(self) -> float | None:
        """The share of its predictions that came true, 0 to 1; None: none was ever tried."""
        if self.came_true is None:
            return None
        held, made = self.came_true
        return round(held / made, 2)
