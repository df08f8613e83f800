"""Whether a replay can be trusted: does it give what was measured, and do the measured times agree with its edges?

Replaying steps with what their own operations took gives the measured steps by construction, if only every wait is
explained; what tells is that nothing began before what it is said to have waited for, and that the costs of some steps
give the time of others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..text import percent
from .evaluation_order import Cyclic
from .replay import replay, replay_all
from .step_graph import WAKE_UP_DELAY, StepGraph

MOST_ERROR: Final = 0.01
"""Of the step: an unchanged replay that misses by more has lost something."""
MOST_CONTRADICTED: Final = 0.01
"""Of the edges."""
CONTRADICTION_MS: Final = 0.1
"""An operation that begins so much before what it waits for, and by more than clocks may be apart, contradicts it: a
time is taken a little before or after what it is the time of."""
FEWEST_HELD_OUT: Final = 4
"""Judged steps of a template, for half of them to predict the others."""


@dataclass(frozen=True)
class ReplayCheck:
    """error:     by how much the unchanged replay misses the mean measured step, as a share of it
    contradicted: share of the edges that measured times contradict
    held_out:     by how much steps replayed with the mean costs of every other one miss what they took, as a share of
                  the step; None where too few are alike
    """

    error: float
    contradicted: float
    held_out: float | None

    def to_dict(self) -> dict[str, float | None]:
        """As `capture.replay` of findings.json."""
        return {
            "error_percent": 100 * self.error,
            "contradicted_percent": 100 * self.contradicted,
            "held_out_error_percent": None if self.held_out is None else 100 * self.held_out,
        }

    @property
    def refusal(self) -> str | None:
        """Why no gain can be told; None where it can."""
        if self.error > MOST_ERROR:
            return (
                f"replaying the measured steps misses them by {percent(100 * self.error)}, so what a change gains "
                "cannot be told"
            )
        if self.contradicted > MOST_CONTRADICTED:
            return (
                f"{percent(100 * self.contradicted)} of what is taken to have waited for something went on before that "
                "had come, so what a change gains cannot be told"
            )
        return None


def check(graph: StepGraph, clock_error_ms: float = 0.0) -> ReplayCheck:
    """Compare the graph with what was measured."""
    try:
        replayed = replay(graph).durations
    except Cyclic:
        return ReplayCheck(0.0, 1.0, None)
    measured = graph.measured
    error = abs(float(replayed.mean() / measured.mean()) - 1) if len(measured) and measured.mean() > 0 else 0.0
    return ReplayCheck(error, contradicted(graph, clock_error_ms), held_out_error(graph))


def contradicted(graph: StepGraph, clock_error_ms: float = 0.0) -> float:
    """Share of the edges by which something waited, whose target began before their source had ended."""
    slack = max(CONTRADICTION_MS, clock_error_ms)
    wrong = every = 0
    for steps in graph.templates:
        structure, segments = steps.structure, steps.structure.segments
        source, target = structure.edges.source, structure.edges.target
        over = steps.began + steps.work.sum(axis=-1) - steps.work[..., WAKE_UP_DELAY]
        ends = np.concatenate([over, steps.ended, steps.outside])
        of_wait = target < segments
        early = steps.began[target[of_wait]] < ends[source[of_wait]] - slack
        wrong += int(early.sum())
        every += early.size
    return wrong / every if every else 0.0


def held_out(graph: StepGraph) -> tuple[StepGraph, npt.NDArray[np.bool_]]:
    """The graph with the costs of every second judged step of a template replaced by the means of the others', and
    which of the judged steps these are, [S]."""
    chosen = np.zeros(len(graph.numbers), bool)
    templates = []
    for index, steps in enumerate(graph.templates):
        columns = graph.columns_of(index)
        judged = np.flatnonzero(graph.judged[columns])
        if len(judged) < FEWEST_HELD_OUT:
            templates.append(steps)
            continue
        odd, even = judged[1::2], judged[0::2]
        chosen[columns[even]] = True
        work, transfer = steps.work.copy(), steps.transfer.copy()
        work[:, even] = steps.work[:, odd].mean(axis=1, keepdims=True)
        transfer[:, even] = steps.transfer[:, odd].mean(axis=1, keepdims=True)
        templates.append(steps.with_costs(work=work, transfer=transfer))
    return graph.with_templates(tuple(templates)), chosen[graph.judged]


def held_out_error(graph: StepGraph) -> float | None:
    """The mean of the steps held out, against what they took, as a share of it."""
    changed, chosen = held_out(graph)
    if not chosen.any():
        return None
    measured = float(graph.measured[chosen].mean())
    (replayed,) = replay_all([changed])
    return abs(float(replayed.durations[chosen].mean()) / measured - 1) if measured > 0 else None
