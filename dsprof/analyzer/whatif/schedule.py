"""The graph of a pipeline's schedule: what its ranks would do in a step, from what an action takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from dsprof.engine.schedule import COMPUTE, Action, Plan

from ..arrays import Float
from ..graph.replay import replay
from ..graph.step_graph import PARTS, Edges, StepGraph, Steps, Structure, Task

WORK: Final = PARTS.index("compute")


def schedule_graph(plan: Plan, cost: Callable[[Action], Float | float], lag: float = 0.0, steps: int = 1) -> StepGraph:
    """Steps of `plan`, each on its own: the ranks of the pipeline are its threads, actions their segments.

    cost: of an F, B or W, ms: [steps], or the same in all of them
    lag:  what a transfer between ranks takes, ms; it holds neither of them up
    """
    thread: list[int] = []
    work: list[Float] = []
    segment: dict[Action, int] = {}
    for rank, actions in enumerate(plan.actions):
        for action in actions:
            if action.op in COMPUTE:
                segment[action] = len(work)
                thread.append(rank)
                work.append(np.broadcast_to(np.asarray(cost(action), np.float64), (steps,)))
    tasks: dict[Action, int] = {}
    issues, waits = [], []
    for action, target in segment.items():
        for need in plan.needs(action):
            if plan.owner(need.stage) == plan.owner(action.stage):
                continue  # program order says so
            if need not in tasks:
                tasks[need] = len(tasks)
                issues.append((segment[need], len(work) + tasks[need]))
            waits.append((len(work) + tasks[need], target))
    edges = np.array([*issues, *waits], np.int64).reshape(-1, 2)
    parts = np.zeros((len(work), steps, len(PARTS)))
    parts[..., WORK] = np.stack(work)
    structure = Structure(
        thread=np.array(thread, np.int64),
        backward=np.zeros(len(work), bool),
        action=np.array([action.op for action in segment], object),
        tasks=(Task("pipeline", "send_recv pipeline", workers=None),) * len(tasks),
        outside=0,
        edges=Edges(edges[:, 0], edges[:, 1]),
        threads=plan.ranks,
    )
    nothing = np.zeros((len(tasks), steps))
    alike = Steps(
        structure=structure,
        numbers=np.arange(steps),
        work=parts,
        transfer=nothing + lag,
        wire=nothing,
        size=nothing,
        outside=np.zeros((0, steps)),
        began=np.zeros((len(work), steps)),
        ended=nothing,
    )
    return StepGraph.of_one_template(alike)


def makespan(graph: StepGraph) -> Float:
    """From the first start of each step to its last end, ms, [steps]."""
    replayed = replay(graph)
    found: Float = replayed.end.max(axis=0) - replayed.start.min(axis=0)
    return found
