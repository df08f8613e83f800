"""The way from a trace to an answer: study, judge, answer."""

from __future__ import annotations

from dsprof.trace import Trace

from .analysis import Analysis
from .judge import judge
from .study import study
from .verdict.answer import answer

__all__ = ["analyze"]


def analyze(trace: Trace) -> Analysis:
    """Explain a run. Never raises for a poor capture: what cannot be judged is named in `not_judged`."""
    measured = study(trace)  # everything measured, and nothing judged
    judgement = judge(measured)  # what every rule says of it
    return answer(measured, judgement)  # what holds the job back, and what that rests on
