"""Why stages of a pipeline wait for each other: in parts that sum to what they wait.

What a stage takes in a step beyond what is typical of it, over its replicas and over the steps, is a *straggler's*;
what is typical of a stage beyond the mean of all is *imbalance*; messages under way are *communication*; input that is
not there is *data*; and what is left where none of these is, is the *schedule's*: filling and draining.

Each is taken away by itself and with others, and has its Shapley value of what stages then wait less: two that hide
each other share what they cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, permutations
from typing import Final

import numpy as np

from .. import signals
from ..arrays import Float
from ..budget.step_budget import WORK
from ..graph.replay import replay_all
from ..graph.segment_work import copy_work
from ..graph.step_graph import PARTS, WAKE_UP_DELAY, StepGraph, Steps
from ..signals import Absent
from ..study import Study, once
from ..whatif.overlapped_messages import pair_of
from ..whatif.work import within

SCHEDULE: Final = "schedule"
STRAGGLER, IMBALANCE, COMMUNICATION, DATA = CAUSES = ("straggler", "imbalance", "communication", "data")
COLUMNS: Final = sorted({column for part in WORK if part != DATA for column in within(part)})
"""Places in PARTS of what a stage does itself."""


@once
def bubble_shares(study: Study) -> Mapping[str, float] | None:
    """Cause -> ms a step, mean over ranks, largest first; they sum to what the budget has as `bubble`. None where
    replay does not tell, or where devices compute, whose waits are not the host's."""
    graph = signals.replay.look(study)
    if isinstance(graph, Absent) or study.led_by_devices or study.ranks_missing or not study.in_stages:
        return None
    waited = float(study.work("bubble").mean())
    every = [frozenset(some) for size in range(len(CAUSES) + 1) for some in combinations(CAUSES, size)]
    taken, own = _Taken(study, graph), list[float]()

    def each() -> Iterator[StepGraph]:
        for some in every:
            changed = taken.without(some)
            own.append(_work_ms(changed))
            yield changed

    durations = [float(of.durations.mean()) for of in replay_all(each())]
    waits = {some: took - own_ms for some, took, own_ms in zip(every, durations, own, strict=True)}
    parts = {cause: max(_shapley(cause, waits), 0.0) for cause in CAUSES}
    # What ranks wait for those of other replicas is no bubble.
    for_replicas = float((study.work("peer_wait") + study.work("comm_exposed")).mean())
    parts[SCHEDULE] = max(waits[frozenset(CAUSES)] - for_replicas, 0.0)
    whole = sum(parts.values())
    if whole <= 0 or waited <= 0:
        return None
    return dict(sorted(((cause, waited * of / whole) for cause, of in parts.items()), key=lambda one: -one[1]))


def _shapley(cause: str, waits: Mapping[frozenset[str], float]) -> float:
    orders = list(permutations(CAUSES))
    before = [frozenset(order[: order.index(cause)]) for order in orders]
    return float(np.mean([waits[some] - waits[some | {cause}] for some in before]))


def _work_ms(graph: StepGraph) -> float:
    """What a rank does itself in a judged step, mean."""
    total = np.zeros(len(graph.numbers))
    own = [column for column in range(len(PARTS)) if column != WAKE_UP_DELAY]
    for index, steps in enumerate(graph.templates):
        total[graph.columns_of(index)] = steps.work[..., own].sum(axis=(0, 2), dtype=np.float64)
    return float(total[graph.judged].mean()) / len(graph.ranks)


class _Taken:
    """What each rank takes in each step, and what it would take without some of the causes."""

    def __init__(self, study: Study, graph: StepGraph) -> None:
        self._graph = graph
        spent = np.zeros((len(graph.ranks), len(graph.numbers)))
        for index, steps in enumerate(graph.templates):
            each = np.zeros((len(graph.ranks), len(steps.numbers)))
            np.add.at(each, steps.structure.thread, steps.work[..., COLUMNS].sum(axis=-1, dtype=np.float64))
            spent[:, graph.columns_of(index)] = each
        typical = np.zeros(len(graph.ranks))
        for group in study.peer_groups:
            typical[group] = np.median(spent[group][:, graph.judged])
        self._typical: Float = np.maximum(typical, 1e-9)
        self._spent: Float = np.maximum(spent, 1e-9)

    def without(self, causes: frozenset[str]) -> StepGraph:
        graph, factor = self._graph, np.ones(self._spent.shape)
        if STRAGGLER in causes:
            factor *= self._typical[:, None] / self._spent
        if IMBALANCE in causes:
            factor *= (self._typical.mean() / self._typical)[:, None]

        def edited(index: int, steps: Steps) -> Steps:
            work, transfer = copy_work(steps.work), steps.transfer
            times = factor[:, graph.columns_of(index)][steps.structure.thread]
            work[..., COLUMNS] *= times[..., None]
            if DATA in causes:
                work[..., PARTS.index(DATA)] = 0.0
            if COMMUNICATION in causes:
                messages = np.array([pair_of(task) is not None for task in steps.structure.tasks], bool)
                transfer = np.where(messages[:, None], 0.0, transfer)
            return steps.with_costs(work=work, transfer=transfer)

        return graph.with_templates(tuple(edited(index, steps) for index, steps in enumerate(graph.templates)))
