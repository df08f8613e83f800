"""What-ifs in Python's own words, and their answers as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from dsprof.analyzer.ask import Answers
from dsprof.knobs import typed
from dsprof.knobs.questions import answer_questions, read_questions

if TYPE_CHECKING:
    from dsprof.analyzer.study import Study


@dataclass(frozen=True)
class WhatIfAnswers:
    """What changes would save, each alone and all together.

    step_ms: the mean ordinary step as it was measured
    answers: as `dsprof whatif` has them
    """

    answers: Answers

    @property
    def step_ms(self) -> float:
        return self.answers.step_ms

    @property
    def table(self) -> pd.DataFrame:
        """A row for each question: asked, then_ms (the step), saved_ms with the ends of its 95 % interval (low_ms,
        high_ms), saved_percent of the step, and the reason where nothing can be said."""
        rows = []
        for row in self.answers.rows:
            gain = row.gain
            rows.append(
                {
                    "asked": " + ".join(row.asked),
                    "then_ms": None if gain is None else self.step_ms - gain.ms,
                    "saved_ms": None if gain is None else gain.ms,
                    "low_ms": None if gain is None else gain.low,
                    "high_ms": None if gain is None else gain.high,
                    "saved_percent": None if gain is None else gain.percent,
                    "reason": row.reason,
                }
            )
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        from dsprof.reports.answers import render

        return render(self.answers).rstrip()

    def _repr_html_(self) -> str:
        from .in_cells import as_text

        return as_text(repr(self))


def ask(
    study: Study, run: str, without: Any, scale: Mapping[str, float], settings: Mapping[str, Any],
    sweep: Mapping[str, Sequence[Any]],
) -> WhatIfAnswers:  # fmt: skip
    """The answers. run: as it is named to the user. Raises KnobError for what is no such question, NotAnswered where
    the run's steps cannot be replayed."""
    codes = [without] if isinstance(without, str) else list(without)
    questions = read_questions(
        codes,
        [f"{part}={factor}" for part, factor in scale.items()],
        [f"{key}={typed(key, value)}" for key, value in settings.items()],
        [f"{key}={','.join(typed(key, value) for value in values)}" for key, values in sweep.items()],
        run,
    )
    return WhatIfAnswers(answer_questions(study, questions))
