"""A rule: one record that holds all that is known of a code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import signals
from ..candidate import Between, Candidate, Price
from ..finding import Finding, Gain
from ..price.calibration import ModelError
from ..signals import Signal
from ..study import Study
from ..whatif.work import Change, LessWork

Found = Sequence[Candidate | Finding]
"""What a rule found: candidates, which are priced; findings only where there is nothing to price, as of a hang."""


@dataclass(frozen=True, eq=False)
class Look:
    """A function that looks for something. One that is about several codes is in the records of all.

    needs:      it is not asked where one of these signals is absent
    settles:    codes that it judges by itself where kernels were traced, whatever else could not
    """

    find: Callable[[Study], Found]
    needs: tuple[Signal[Any], ...] = ()
    settles: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """All that is known of a code, but for the collectors without which it cannot be told: those say so in their own
    records (`collectors/catalogue.py`). A module of the folders of `rules/` that has RULES adds its records to these.

    code:       never changes meaning
    says:       what a finding of it says, as docs/findings.md lists it
    explains:   parts of the step's budget, or kinds of the run's time, that it can explain
    exhausts:   those of them for which it tries every change that there is: where none gains anything, the part of the
                budget is explained
    looks:      what finds it
    needs:      signals without which there is nothing to judge, whatever was captured
    outranked_by: codes of faults that its gain takes to be fixed: beside one that gains as much as is sure of it, it is
                no more severe
    causes:     codes whose findings it is the reason of, where they are of the same ranks: what mending them gains is
                what mending it does
    ends_run:   the job did not do what it was started for: it stands first, and the run has failed
    told_by_replay: it is judged wherever replay can tell gains at all: where it is not, no job is called healthy
    of_snapshot: it is what a snapshot of memory without steps is judged by
    error:      what its predictions by replay miss by, beside the noise of the steps
    came_true:  of how many predictions the interval held what was then measured, and how many there were (all runs of
                all pairs of benchmarks/predictions.py); None: none was ever tried
    place:      where it is listed
    """

    code: str
    says: str
    explains: tuple[str, ...] = ()
    exhausts: tuple[str, ...] = ()
    looks: tuple[Look, ...] = ()
    needs: tuple[Signal[Any], ...] = ()
    outranked_by: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    ends_run: bool = False
    told_by_replay: bool = False
    of_snapshot: bool = False
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


def fault(
    code: str,
    change: Callable[[Study], Change | None],
    describe: Callable[[Study, Change, Gain, Gain], Finding],
    *,
    counts_cores: bool = False,
    between: Callable[[Study], Between | None] = lambda study: None,
    by_rank: Callable[[Study, Change], Mapping[int, Change]] = lambda study, change: {},
    spell: Callable[[Study, Change], tuple[int, int] | None] = lambda study, change: None,
) -> Look:
    """What looks for work that would go away if something were fixed.

    change:   which work; None where nothing is lost to it
    describe: (study, change, the gain of fixing it alone, its share of what fixing all gains) -> finding
    counts_cores, between, by_rank, spell: as of `Candidate`
    """

    def find(study: Study) -> Found:
        gone = change(study)
        if gone is None:
            return []

        def say(price: Price) -> Finding:
            return describe(study, gone, price.gain, price.gain if price.share is None else price.share)

        def without(what: str, some: Change) -> LessWork:
            return LessWork(what, some, study.peer_groups)

        alone = {rank: without(f"{code}:{rank}", some) for rank, some in by_rank(study, gone).items()}
        return [Candidate(code, without(code, gone), say, counts_cores, between(study), alone, spell(study, gone))]

    return Look(find, needs=(signals.replay,))
