"""Whether a replay can be trusted: does it give what was measured, and do the measured times agree with its edges?

Replaying steps with what their own operations took gives the measured steps by construction, if only every wait is
explained; what tells is that nothing began before what it is said to have waited for, and that steps in another order
take what they took in theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..arrays import Int
from ..budget.rhythm import period
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
DRAWS: Final = 6
"""Halves of the steps that are held out."""
MOST_MISSED: Final = 0.05
"""Of the step, by replays with what other steps took."""
MOST_TIMES: Final = 20
"""As many steps is what somebody may run; where more would be needed, it is not only their number."""
MOST_DIFFERING: Final = 0.25
"""Of the step, between half of the steps and the others; ENOUGH: what is aimed at."""
ENOUGH: Final = 0.05


@dataclass(frozen=True)
class HeldOut:
    """Steps that were replayed with what whole other steps took.

    missed:  by how much they miss what those steps took, as a share of it: what a step takes depends on more than on
             its own operations, or the graph does not have all of them
    differs: by how much half of the steps misses the other half, as a share of the step: so few steps, or so unlike
             ones, tell that little of the next ones
    """

    missed: float
    differs: float


@dataclass(frozen=True)
class ReplayCheck:
    """error:     by how much the unchanged replay misses the mean measured step, as a share of it
    contradicted: share of the edges that measured times contradict
    held_out:     what steps tell of others; None where too few are alike
    """

    error: float
    contradicted: float
    held_out: HeldOut | None

    def to_dict(self) -> dict[str, float | None]:
        """As `capture.replay` of findings.json."""
        return {
            "error_percent": 100 * self.error,
            "contradicted_percent": 100 * self.contradicted,
            "held_out_error_percent": None if self.held_out is None else 100 * self.held_out.missed,
            "halves_differ_percent": None if self.held_out is None else 100 * self.held_out.differs,
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
        seen = self.held_out
        if seen is not None and seen.missed > MOST_MISSED:
            return (
                f"steps that are replayed with what others took miss it by {percent(100 * seen.missed)}: what a step "
                "takes depends on more than is known of it, so what a change gains cannot be told"
            )
        if seen is not None and seen.differs > MOST_DIFFERING:
            more = math.ceil((seen.differs / ENOUGH) ** 2)
            quiet = "profile many more steps, on a machine that has nothing else to do"
            advice = f"profile at least {more} times as many steps" if more <= MOST_TIMES else quiet
            return (
                f"one half of the steps misses what the other half takes by {percent(100 * seen.differs)}, so what a "
                f"change gains cannot be told: {advice}"
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
    return ReplayCheck(error, contradicted(graph, clock_error_ms), hold_out(graph))


def contradicted(graph: StepGraph, clock_error_ms: float = 0.0) -> float:
    """Share of the edges by which something waited, whose target began before their source had ended."""
    slack = max(CONTRADICTION_MS, clock_error_ms)
    wrong = every = 0
    for steps in graph.templates:
        structure, segments = steps.structure, steps.structure.segments
        source, target = structure.edges.source, structure.edges.target
        over = steps.began + steps.work.sum(axis=-1, dtype=np.float64) - steps.work[..., WAKE_UP_DELAY]
        ends = np.concatenate([over, steps.ended, steps.outside])
        of_wait = target < segments
        early = steps.began[target[of_wait]] < ends[source[of_wait]] - slack
        wrong += int(early.sum())
        every += early.size
    return wrong / every if every else 0.0


def hold_out(graph: StepGraph) -> HeldOut | None:
    """Give half of the judged steps of each template what the other half took, step by step and not in the mean: the
    longest of several paths is longer in the mean than that of mean costs. None where too few are alike.

    The halves are drawn step by step, or by whole periods of a fixed rhythm. How far a host is ahead of its device
    depends on the steps before, so that what collections of garbage cost, say, is another thing in another order: there
    halves that are of steps in a row are asked too, and what fits better counts.
    """
    draw = np.random.default_rng(0)
    found = _held_out(graph, draw.permutation)
    if found is None or len(graph.ranks) == graph.leads:
        return found
    in_a_row = _held_out(graph, lambda steps: np.roll(steps, int(draw.integers(max(len(steps), 1)))))
    if in_a_row is None:
        return found
    return HeldOut(min(found.missed, in_a_row.missed), min(found.differs, in_a_row.differs))


def _held_out(graph: StepGraph, ordered: Callable[[Int], Int]) -> HeldOut | None:
    """ordered: of the numbers of a template's judged steps, or periods of them, those that are given what others took
    come first."""
    graph = _of_one_part(graph)
    columns = [graph.columns_of(index) for index in range(len(graph.templates))]
    periods = [_periods(graph, of) for of in columns]
    drawn = [[_halves(of[ordered(np.arange(len(of)))]) for of in periods] for _ in range(DRAWS)]
    places = np.cumsum(graph.judged) - 1
    halves, others = (
        [np.concatenate([places[of[half[side]]] for of, half in zip(columns, one, strict=True)]) for one in drawn]
        for side in (0, 1)
    )
    if not len(halves[0]):
        return None
    took = np.array([float(graph.measured[of].mean()) for of in others])
    themselves = np.array([float(graph.measured[into].mean()) for into in halves])
    replayed = replay_all(_exchanged(graph, one) for one in drawn)
    found = np.array([float(one.durations[into].mean()) for one, into in zip(replayed, halves, strict=True)])
    if not (took > 0).all() or not (themselves > 0).all():
        return None
    missed = abs(float(found.sum() / took.sum()) - 1)
    return HeldOut(missed, float(np.sqrt(np.mean((found / themselves - 1) ** 2))))


Halves = tuple[Int, Int]
"""Columns of a template that are given what others took, and those others."""


def _periods(graph: StepGraph, columns: Int) -> Int:
    """The judged ones among the columns of a template, [N, P]: each by itself, or, where long steps come in a fixed
    rhythm, as whole periods, so that halves have as many of them and each is given what a like one took."""
    judged = np.flatnonzero(graph.judged[columns])
    each = period(graph.duration[: graph.leads, columns[judged]].mean(axis=0))
    whole = len(judged) // each
    found: Int = judged[: whole * each].reshape(whole, each)
    return found


def _halves(ordered: Int) -> Halves:
    """ordered: [N, P]"""
    half = len(ordered) // 2 if ordered.size >= FEWEST_HELD_OUT else 0
    return ordered[:half].ravel(), ordered[half : 2 * half].ravel()


def _of_one_part(graph: StepGraph) -> StepGraph:
    """The graph with the work of each segment as one number: what it consists of makes no difference to a replay, and
    of many ranks each copy of it is large."""
    whole = (steps.work.sum(axis=-1) for steps in graph.templates)
    templates = (steps.with_costs(work=work[..., None]) for steps, work in zip(graph.templates, whole, strict=True))
    return graph.with_templates(tuple(templates))


def _exchanged(graph: StepGraph, halves: Sequence[Halves]) -> StepGraph:
    templates = []
    for steps, (chosen, others) in zip(graph.templates, halves, strict=True):
        given = np.arange(len(steps.numbers))
        given[chosen] = others
        templates.append(steps.with_costs(work=steps.work.take(given, 1), transfer=steps.transfer.take(given, 1)))
    return graph.with_templates(tuple(templates))
