"""Propose, predict, verify, keep, and again, until nothing worth it is left or the budget is spent.

Each change is compared with the job that has all that was kept before, so whatever is kept has been measured beside it.
Where several are kept, the job with all of them is at last compared with the job as it was, and where that does not pay
nothing is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsprof.analyzer.text import count

from .corrections import corrected, factor
from .journal import Attempt, Journal
from .proposals import Proposal, slug
from .turns import CHANGED, Comparison, Run, Tell, Turns

LEAST_PERCENT: Final = 2.0
"""Of the step: what is predicted to save less is not tried."""
FAILURES: Final = 3
"""So many comparisons in a row whose unchanged job fails: then the job does not run any more."""
ALL: Final = "all"
"""Folder of the comparison of all that was kept with the job as it was; their number follows."""

Propose = Callable[[Path], Sequence[Proposal]]
"""What a run's findings offer, by its folder."""


@dataclass(frozen=True)
class Tuning:
    """A job that is tuned.

    first:    the run it begins at; place: the folder of the trials, and of tune.json
    propose:  what a run offers; run: runs the job
    budget_s: seconds of all jobs together, those of an interrupted call included; most_trials: changes to try
    """

    first: Path
    place: Path
    propose: Propose
    run: Run
    tell: Tell
    budget_s: float
    most_trials: int
    most_pairs: int
    clock: Callable[[], float] = time.monotonic

    def tune(self, journal: Journal) -> Journal:
        """Try until it is over; what the journal says was tried is not tried again. Raises OSError where the journal
        cannot be written, and KeyboardInterrupt, after which it goes on where it stopped."""
        if journal.together is not None and journal.together["outcome"] == "withdrawn":
            return journal
        known = len(journal.which_kept) if journal.together is not None and not journal.together.get("cut") else 1
        journal.ended = self._try_all(journal)
        if len(journal.which_kept) > known:
            journal.together = self._compare_all(journal)
        journal.write()
        return journal

    def _try_all(self, journal: Journal) -> str:
        """Gives why it is over."""
        failures = 0
        why = self._why_not(journal)
        while not why:
            attempt = self._next(journal)
            if attempt is None:
                why = f"nothing is left that should save {LEAST_PERCENT:g} % of the step"
                break
            comparison = self._compare(journal, attempt)
            failures = failures + 1 if comparison.failed and comparison.failed != CHANGED else 0
            if failures == FAILURES:
                why = f"the job without a new change failed {FAILURES} times: {comparison.why}"
            else:
                why = self._why_not(journal)
        return why

    def _why_not(self, journal: Journal) -> str:
        """Why nothing more is tried; empty: something may be."""
        if journal.spent_s >= self.budget_s:
            return f"the budget of {self.budget_s:g} s is spent"
        finished = sum(one.is_done for one in journal.attempts)
        if finished < self.most_trials:
            return ""
        return f"{count(finished, 'change')} {'was' if finished == 1 else 'were'} tried"

    def _next(self, journal: Journal) -> Attempt | None:
        """What was interrupted, or what should save most of what was not tried yet, with its prediction written."""
        if journal.attempts and not journal.attempts[-1].is_done:
            return journal.attempts[-1]
        base = journal.kept
        best: tuple[float, Attempt] | None = None
        for one in self.propose(self._newest(journal)):
            if one.gain is None or one.gain.get("method") == "none" or not _changes(one.knobs, base):
                continue
            if journal.was_tried(one.knobs, base):
                continue
            now = corrected(one.gain, factor(one.code, journal.scored))
            if now["percent"] < LEAST_PERCENT or (best is not None and now["ms"] <= best[0]):
                continue
            best = now["ms"], Attempt(one.code, one.title, dict(one.knobs), base, dict(one.gain), now)
        if best is None:
            return None
        journal.attempts.append(best[1])
        journal.write()
        return best[1]

    def _newest(self, journal: Journal) -> Path:
        """The run whose findings say what is left: the newest with all that was kept."""
        kept = journal.which_kept
        return self.place / kept[-1].newest if kept else self.first

    def _compare(self, journal: Journal, attempt: Attempt) -> Comparison:
        number = journal.attempts.index(attempt) + 1
        name = f"{number}-{slug(attempt.knobs)}"
        says = "" if attempt.corrected is None else f", should save {attempt.corrected['percent']:.1f} % of the step"
        self.tell(f"change {number}: {attempt.proposal.shown}{says}")
        comparison = self._turns(journal, name, attempt.proposal, attempt.base).compare()
        attempt.measured, attempt.failed = comparison.to_dict(), comparison.failed == CHANGED
        attempt.newest = f"{name}/{CHANGED}-{len(comparison.pairs)}" if comparison.pairs else ""
        journal.write()
        self.tell(f"change {number}: {comparison.outcome}{f': {comparison.why}' if comparison.why else ''}")
        return comparison

    def _compare_all(self, journal: Journal) -> dict[str, Any]:
        """All that was kept, beside the job as it was. Where only the budget ends it early, what was kept stays: each
        of it was measured."""
        self.tell("all that was kept, beside the job as it was")
        of_whole = [one.predicted for one in journal.which_kept if one.proposal.is_of_whole_run]
        everything = Proposal("", "", journal.kept, of_whole[0] if of_whole else None)
        name = f"{ALL}-{len(journal.which_kept)}"
        found = self._turns(journal, name, everything, {}).compare().to_dict()
        if found.get("ms", 0.0) < 0:  # undecided, but it seems to cost
            found["outcome"] = "withdrawn"
        return found

    def _turns(self, journal: Journal, name: str, change: Proposal, base: Mapping[str, Any]) -> Turns:
        place = self.place / name
        place.mkdir(mode=0o700, parents=True, exist_ok=True)

        def timed(path: Path, turned: Mapping[str, Any]) -> str:
            began = self.clock()
            try:
                return self.run(path, turned)
            finally:
                journal.spent_s += self.clock() - began
                journal.write()

        def go_on() -> bool:
            return journal.spent_s < self.budget_s

        whole, predicted = change.is_of_whole_run, change.interval_ms
        return Turns(place, change.knobs, timed, self.tell, self.most_pairs, base, whole, go_on, predicted)


def _changes(knobs: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """Whether they turn anything that is not so already."""
    return any(key not in base or base[key] != value for key, value in knobs.items())
