"""The graph of a pipeline's schedule: what its ranks would do in a step, from what an action takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from dsprof.engine.schedule import COMPUTE, Action, Plan

from ..arrays import Float, Int
from ..graph.replay import replay
from ..graph.step_graph import PARTS, Costs, Edges, Measured, StepGraph, Steps, Structure, Task
from .apply import Refused, Turn, WhatIf, measured
from .edit import Recut, Restructure

WORK: Final = PARTS.index("compute")
PLAN: Final = "plan"
"""In `StepGraph.kept`: the plan that a graph was made of."""


def schedule_graph(plan: Plan, cost: Callable[[Action], Float | float], lag: float = 0.0, steps: int = 1) -> StepGraph:
    """Steps of `plan`, each on its own: the ranks of the pipeline are its threads, actions their segments.

    cost: of an F, B or W, ms: [steps], or the same in all of them
    lag:  what a transfer between ranks takes, ms; it holds neither of them up
    """
    structure, segments, tasks = _lay_out(plan)
    parts = np.zeros((len(segments), steps, len(PARTS)))
    for action, number in segments.items():
        parts[number, :, WORK] = cost(action)
    nothing = np.zeros((len(tasks), steps))
    alike = Steps(
        structure=structure,
        numbers=np.arange(steps),
        costs=Costs(parts, nothing + lag, nothing, nothing),
        measured=Measured(np.zeros((0, steps)), np.zeros((len(segments), steps)), nothing, nothing),
    )
    graph = StepGraph.of_one_template(alike)
    graph.kept[PLAN] = plan
    return graph


def _lay_out(plan: Plan) -> tuple[Structure, dict[Action, int], dict[Action, int]]:
    """The structure of its steps, and which segment each action is, and which task carries its result."""
    thread: list[int] = []
    segment: dict[Action, int] = {}
    for rank, actions in enumerate(plan.actions):
        for action in actions:
            if action.op in COMPUTE:
                segment[action] = len(thread)
                thread.append(rank)
    tasks: dict[Action, int] = {}
    issues, waits = [], []
    for action, target in segment.items():
        for need in plan.needs(action):
            if plan.owner(need.stage) == plan.owner(action.stage):
                continue  # program order says so
            if need not in tasks:
                tasks[need] = len(tasks)
                issues.append((segment[need], len(thread) + tasks[need]))
            waits.append((len(thread) + tasks[need], target))
    edges = np.array([*issues, *waits], np.int64).reshape(-1, 2)
    structure = Structure(
        thread=np.array(thread, np.int64),
        backward=np.zeros(len(thread), bool),
        action=np.array([action.op for action in segment], object),
        place=np.array([action[1:] for action in segment], np.int64),
        tasks=(Task("pipeline", "send_recv pipeline", workers=None),) * len(tasks),
        outside=0,
        edges=Edges(edges[:, 0], edges[:, 1]),
        threads=plan.ranks,
    )
    return structure, segment, tasks


@dataclass(frozen=True)
class Reschedule(WhatIf):
    """The same actions in the order of another plan: of a graph that `schedule_graph` made."""

    plan: Plan
    turn = Turn.SCHEDULE

    @property
    def name(self) -> str:
        return f"schedule {self.plan.schedule}"

    def against(self, other: WhatIf) -> str | None:
        return "both say in which order the same actions run" if isinstance(other, Reschedule) else None

    def change(self, graph: StepGraph) -> StepGraph:
        now = measured(graph).kept.get(PLAN)
        if now is None:
            raise Refused(self.name, "which action of which schedule these steps consist of is not known")
        _, was, sent = _lay_out(now)
        structure, segments, tasks = _lay_out(self.plan)
        if set(was) != set(segments) or set(sent) != set(tasks):
            raise Refused(self.name, f"it does not run the actions that {now.schedule} runs")
        segment, task = _places(was, segments), _places(sent, tasks)

        def ordered(steps: Steps) -> Recut:
            ids, count = steps.structure.ids, steps.structure.segments

            def costs(steps: Steps) -> Costs:
                now = steps.costs
                return Costs(now.work[segment], now.transfer[task], now.wire[task], now.size[task])

            new = replace(structure, ids=np.concatenate([ids[segment], ids[count + task]]), ids_used=len(ids))
            return Recut(new, np.concatenate([np.argsort(segment), count + np.argsort(task)]), costs)

        return Restructure(ordered)(graph)


def _places(was: dict[Action, int], new: dict[Action, int]) -> Int:
    """Of each in the new order, where it was."""
    return np.array([was[action] for action in new], np.int64)


def makespan(graph: StepGraph) -> Float:
    """From the first start of each step to its last end, ms, [steps]."""
    replayed = replay(graph)
    found: Float = replayed.end.max(axis=0) - replayed.start.min(axis=0)
    return found
