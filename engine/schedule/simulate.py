"""When everything in a plan would happen, given what it costs, also as text; how many activations are held at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from .check import in_order
from .plan import COMPUTE, Action, Plan

Cost = Callable[[Action], float]
"""What an F, B or W takes, in seconds or any other unit."""

Lag = float | Callable[[int, int], float]
"""What a transfer between ranks takes, in the same unit: one number, or a function of its two stages, from and to."""


@dataclass(frozen=True)
class Simulation:
    """A step of a pipeline, from 0."""

    times: dict[Action, tuple[float, float]]
    """Start and end of each F, B and W."""
    makespan: float
    """The end of the last one."""
    busy_times: tuple[float, ...]
    """A rank, what its actions take."""

    def idle(self, rank: int) -> float:
        """What of the step `rank` does nothing for: before its first action, between actions and after the last."""
        return self.makespan - self.busy_times[rank]

    @property
    def bubble(self) -> float:
        """The part of all ranks' time that is idle, from 0 to 1."""
        total = self.makespan * len(self.busy_times)
        return 1 - math.fsum(self.busy_times) / total if total else 0.0


def simulate(plan: Plan, cost: Cost, lag: Lag = 0.0) -> Simulation:
    """Every action starts when its rank has done the one before and what it needs is there.

    Transfers hold no rank up: what one rank makes is there for another `lag` later, whatever else is under way. Those
    in `plan` are passed over. Takes time linear in the number of actions. Raises ScheduleError for a plan that
    can never finish; `check` finds those before.
    """
    plan = replace(plan, actions=tuple(tuple(a for a in actions if a.op in COMPUTE) for actions in plan.actions))
    lag_of = lag if callable(lag) else lambda _from, _to: lag
    ends: dict[Action, float] = {}
    times: dict[Action, tuple[float, float]] = {}
    clock = [0.0] * plan.ranks
    for action in in_order(plan, plan.needs):
        rank = plan.owner(action.stage)
        start = clock[rank]
        for need in plan.needs(action):
            away = plan.owner(need.stage) != rank
            there = ends[need] + (lag_of(need.stage, action.stage) if away else 0.0)
            start = max(start, there)
        clock[rank] = ends[action] = start + cost(action)
        times[action] = (start, clock[rank])
    busy = tuple(math.fsum(times[a][1] - times[a][0] for a in actions) for actions in plan.actions)
    return Simulation(times, max(clock), busy)


def peak_activations(plan: Plan, until: Literal["B", "W"] = "B") -> list[int]:
    """A rank, the most activations (of one stage and one micro-batch) that it holds at once.

    One is held from its F to its B. Where the plan splits the backward, W needs a part of it still: ZB-H1's authors,
    and "B" here, leave that out of the count; "W" counts it as a whole.
    """
    last = until if plan.splits else "B"

    def peak(actions: tuple[Action, ...]) -> int:
        held = most = 0
        for action in actions:
            held += (action.op == "F") - (action.op == last)
            most = max(most, held)
        return most

    return [peak(actions) for actions in plan.actions]


def render(plan: Plan, simulation: Simulation, width: int = 100) -> str:
    """A line a rank, `width` columns for the step: actions as in `F0==`, with the stage if ranks hold several; idle
    time as dots. A name that its action is too short for is cut off."""
    scale = width / simulation.makespan if simulation.makespan else 0.0
    lines = []
    for rank, actions in enumerate(plan.actions):
        line = ["."] * width
        for action in actions:
            if action.op in COMPUTE:
                start, end = (round(time * scale) for time in simulation.times[action])
                name = str(action) if plan.virtual_stages > 1 else f"{action.op}{action.microbatch}"
                line[start:end] = name[: end - start].ljust(end - start, "=")
        lines.append(f"rank {rank:<3} {''.join(line)}")
    return "\n".join(lines)
