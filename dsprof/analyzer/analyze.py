"""The way from a trace to an answer: study, judge, answer."""

from __future__ import annotations

from concurrent.futures import Executor

from dsprof.trace import Trace
from dsprof.trace.map_ranks import Observer
from dsprof.trace.strings import plain_strings

from .analysis import Analysis
from .judge import judge
from .study import Study, study
from .verdict.answer import answer

__all__ = ["analyze", "explain"]


@plain_strings()
def analyze(trace: Trace, executor: Executor | None = None, observer: Observer | None = None) -> Analysis:
    """Explain a run. Never raises for a poor capture: what cannot be judged is named in `not_judged`. `executor`,
    `observer`: as in `study`."""
    return explain(study(trace, executor, observer))  # everything measured, and nothing judged


@plain_strings()
def explain(measured: Study) -> Analysis:
    """Explain a run that was measured."""
    judgement = judge(measured)  # what every rule says of it
    return answer(measured, judgement)  # what holds the job back, and what that rests on
