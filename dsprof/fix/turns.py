"""Original and changed job in turns, A B B A A B ..., until the paired difference decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dsprof.analyzer.text import ms

from .decide import FEWEST_PAIRS, Decision, decide
from .trial import Trial, read_trial

ORIGINAL: Final = "original"
CHANGED: Final = "changed"

Run = Callable[[Path, Mapping[str, Any]], None]
"""Runs the job under the profiler into a run folder, with these knobs turned."""
Tell = Callable[[str], None]


class TrialFailed(Exception):
    """A job of the comparison failed, or could not be judged: the message says which and why."""

    def __init__(self, side: str, message: str) -> None:
        super().__init__(message)
        self.side = side


@dataclass
class Comparison:
    """pairs: ms a step of the original and of the changed job, one after the other; decision: as yet."""

    pairs: list[tuple[float, float]] = field(default_factory=list)
    decision: Decision | None = None


@dataclass(frozen=True)
class Turns:
    """A comparison in `folder`, whose jobs that have ended well are not run again."""

    folder: Path
    knobs: Mapping[str, Any]
    run: Run
    tell: Tell
    most_pairs: int

    def compare(self) -> Comparison:
        """Raises TrialFailed where a job of either side fails."""
        comparison = Comparison()
        for number in range(1, self.most_pairs + 1):
            sides = (ORIGINAL, CHANGED) if number % 2 else (CHANGED, ORIGINAL)  # what grows or falls is on both
            took = {side: self._step_ms(side, number) for side in sides}
            comparison.pairs.append((took[ORIGINAL], took[CHANGED]))
            saved = took[ORIGINAL] - took[CHANGED]
            both = f"{ms(took[ORIGINAL])} a step, {ms(took[CHANGED])} with the change"
            self.tell(f"pair {number}: {both}: {'saves' if saved >= 0 else 'costs'} {ms(abs(saved))}")
            if number >= FEWEST_PAIRS:
                comparison.decision = decide(comparison.pairs, self.most_pairs)
                if comparison.decision.outcome != "undecided":
                    break
        return comparison

    def _step_ms(self, side: str, number: int) -> float:
        path = self.folder / f"{side}-{number}"
        trial = read_trial(path)
        if trial is None or trial.step_ms is None:  # what made it fail may be gone
            self.run(path, self.knobs if side == CHANGED else {})
            trial = read_trial(path) or Trial(None, "it left no verdict")
        if trial.step_ms is None:
            log = path.with_suffix(".txt")
            raise TrialFailed(side, f"the {side} job failed: {trial.why}; what it wrote is in {log}")
        if side == CHANGED and trial.lost:
            raise TrialFailed(side, f"{trial.lost[0]}; nothing is compared")
        return trial.step_ms
