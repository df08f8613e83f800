"""Original and changed job in turns, A B B A A B ..., until the paired difference decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dsprof.analyzer.text import ms

from .decide import FEWEST_PAIRS, Decision, Outcome, decide
from .losses import LossCheck, Losses, check
from .trial import Trial, read_trial

ORIGINAL: Final = "original"
CHANGED: Final = "changed"
NEITHER: Final = "neither"

Run = Callable[[Path, Mapping[str, Any]], str]
"""Runs the job under the profiler into a run folder, with these knobs turned. Gives why it was ended; empty: it ended
by itself."""
Tell = Callable[[str], None]


class TrialFailed(Exception):
    """A job of the comparison failed, or could not be judged: the message says which and why. side: whose job failed,
    or NEITHER."""

    def __init__(self, side: str, message: str) -> None:
        super().__init__(message)
        self.side = side


@dataclass
class Comparison:
    """pairs: ms a step of the original and of the changed job, one after the other
    decision: of two pairs or more, as yet
    why:      of what is undecided, and of what failed
    failed:   the side whose job failed; "neither": a job ended well and could not be analyzed; empty: all is well
    cut:      it ended before its last pair, as `Turns.go_on` said so
    losses:   whether both train alike, of a change that pays
    """

    pairs: list[tuple[float, float]] = field(default_factory=list)
    decision: Decision | None = None
    why: str = ""
    failed: str = ""
    cut: bool = False
    losses: LossCheck | None = None

    @property
    def outcome(self) -> Outcome:
        """A change whose jobs fail is withdrawn."""
        if self.failed:
            return "withdrawn" if self.failed == CHANGED else "undecided"
        if self.losses is not None and self.losses.broken:
            return "withdrawn"
        return "undecided" if self.decision is None else self.decision.outcome

    def to_dict(self) -> dict[str, Any]:
        """As findings.json and tune.json have it."""
        decided = {} if self.decision is None or self.failed else self.decision.to_dict()
        pairs = {"pairs": [list(pair) for pair in self.pairs]} if self.pairs else {}
        told: dict[str, Any] = {"why": self.why} if self.why else {}
        told |= {"losses": self.losses.to_dict()} if self.losses is not None else {}
        return {**decided, **pairs, "outcome": self.outcome, **told, **({"cut": True} if self.cut else {})}


def always() -> bool:
    """Jobs may go on."""
    return True


@dataclass(frozen=True)
class Turns:
    """A comparison in `folder`, whose jobs that have ended well are not run again.

    knobs:  what the changed job turns beside `base`, which both turn
    whole:  compare the means of all steps, not of the ordinary ones: of a change that makes irregular steps rarer
    predicted: low and high end of what the change should save, ms
    go_on:  asked before each pair; where it says no, the comparison ends as it stands
    """

    folder: Path
    knobs: Mapping[str, Any]
    run: Run
    tell: Tell
    most_pairs: int
    base: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False
    go_on: Callable[[], bool] = always
    predicted: tuple[float, float] | None = None

    def compare(self) -> Comparison:
        """Run pairs until they decide. A job that fails ends the comparison."""
        comparison = Comparison()
        try:
            self._compare(comparison)
        except TrialFailed as failed:
            comparison.failed, comparison.why = failed.side, str(failed)
        return comparison

    def _compare(self, comparison: Comparison) -> None:
        losses: dict[str, list[Losses]] = {ORIGINAL: [], CHANGED: []}
        for number in range(1, self.most_pairs + 1):
            if not self.go_on():
                comparison.cut = True
                comparison.why = f"the budget was spent after {number - 1} of {self.most_pairs} pairs"
                return
            sides = (ORIGINAL, CHANGED) if number % 2 else (CHANGED, ORIGINAL)  # what grows or falls is on both
            trials = {side: self._trial(side, number) for side in sides}
            took = {side: self._step_ms(trial) for side, trial in trials.items()}
            for side, trial in trials.items():
                losses[side].append(trial.losses)
            comparison.pairs.append((took[ORIGINAL], took[CHANGED]))
            saved = took[ORIGINAL] - took[CHANGED]
            both = f"{ms(took[ORIGINAL])} a step, {ms(took[CHANGED])} with the change"
            self.tell(f"pair {number}: {both}: {'saves' if saved >= 0 else 'costs'} {ms(abs(saved))}")
            if number > 1:
                comparison.decision = decide(comparison.pairs, self.most_pairs, self.predicted)
            if number >= FEWEST_PAIRS and comparison.outcome != "undecided":
                if comparison.outcome == "kept":
                    comparison.losses = check(self.knobs, losses[ORIGINAL], losses[CHANGED])
                    comparison.why = comparison.losses.broken
                return
        comparison.why = f"{self.most_pairs} pairs do not decide"

    def _step_ms(self, trial: Trial) -> float:
        assert trial.step_ms is not None
        return trial.whole_ms if self.whole and trial.whole_ms is not None else trial.step_ms

    def _trial(self, side: str, number: int) -> Trial:
        """A job that has ended well, run where there is none yet. Raises TrialFailed."""
        path = self.folder / f"{side}-{number}"
        trial = read_trial(path)
        tries = 1 + (side == ORIGINAL)  # what made it fail may be gone; the job as it was is known to run
        while tries and (trial is None or trial.step_ms is None):
            tries -= 1
            trial = self._try(path, {**self.base, **(self.knobs if side == CHANGED else {})})
        assert trial is not None
        if trial.step_ms is None:
            log = path.with_name(f"{path.name}.txt")
            what = "failed" if trial.failed else "tells nothing"
            side_of = side if trial.failed else NEITHER
            raise TrialFailed(side_of, f"the {side} job {what}: {trial.why}; what it wrote is in {log}")
        if side == CHANGED and trial.lost:
            raise TrialFailed(side, f"{trial.lost[0]}; nothing is compared")
        return trial

    def _try(self, path: Path, knobs: Mapping[str, Any]) -> Trial:
        ended = self.run(path, knobs)
        if ended:
            return Trial(None, ended, failed=True)
        return read_trial(path) or Trial(None, "it left no verdict", failed=True)
