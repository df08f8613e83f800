"""Whether a plan is whole and can finish, before anybody waits for it; and what waits for whom where it cannot.

At the end: when each action would happen, given what it costs, and how many activations are held at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from .plan import COMPUTE, TRANSFERS, Action, Plan, with_transfers

MOST_LISTED: Final = 16
"""Lines of a message that are alike."""

Needs = Callable[[Action], Iterable[Action]]
"""What must have been done, by whichever rank, before an action can be."""


class ScheduleError(ValueError):
    """A plan that is not whole, or can never finish."""


def check(plan: Plan, *, mixed: bool = False) -> None:
    """Raise ScheduleError unless `plan` has each action once, on its rank and after what it needs, and can finish.

    mixed: whether some backwards may be in two parts and others whole. The engine runs no such plan, and where one
           lacks a W, gradients would be missing without a word.

    A plan without transfers is checked with those of `with_transfers`. It must finish where sends are buffered, which
    return at once, and also where they are not: each waits for its receive, of which every channel (F or B, from one
    stage to the next) posts one at a time, in the receiver's order and ahead of the receiver's getting there. Sends
    that wait until the receiver gets there no 1F1B could do with.
    """
    if len(plan.actions) != plan.ranks:
        raise ScheduleError(
            f"{_title(plan)} has the actions of {len(plan.actions)} ranks; give it a tuple for each rank"
        )
    transfers = any(action.op in TRANSFERS for actions in plan.actions for action in actions)
    _check_whole(plan, transfers, mixed)
    if not transfers:
        plan = with_transfers(plan)
    try:
        list(in_order(plan, _needs(plan, buffered=False)))
    except ScheduleError as error:
        list(in_order(plan, _needs(plan, buffered=True)))
        raise ScheduleError(
            f"{error}\n  It could if sends were buffered: some are not in the order of their receives."
        ) from None


def in_order(plan: Plan, needs: Needs) -> Iterator[Action]:
    """All actions of `plan`, each after those it needs and those before it on its rank.

    Takes time linear in the number of actions. Raises ScheduleError, after the last action that can be done, if not all
    can.
    """
    done: set[Action] = set()
    at = [0] * plan.ranks
    waiting: dict[Action, list[int]] = {}
    ready = list(range(plan.ranks))
    while ready:
        rank = ready.pop()
        actions = plan.actions[rank]
        while at[rank] < len(actions):
            action = actions[at[rank]]
            missing = [need for need in needs(action) if need not in done]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            yield action
            done.add(action)
            at[rank] += 1
            if action in waiting:
                ready += waiting.pop(action)
    if waiting:
        raise ScheduleError(_dump(plan, at, {rank: action for action, ranks in waiting.items() for rank in ranks}))


def _needs(plan: Plan, buffered: bool) -> Needs:
    """What actions of a plan with transfers wait for."""
    earlier: dict[Action, Action] = {}
    """Send -> the one that is received before it, on the same channel."""
    if not buffered:
        for actions in plan.actions:
            latest: dict[tuple[str, int], Action] = {}
            for action in actions:
                if action.op.startswith("RECV"):
                    channel = (action.op, action.stage)
                    if channel in latest:
                        earlier[action.partner] = latest[channel]
                    latest[channel] = action.partner

    def needs(action: Action) -> tuple[Action, ...]:
        if action.op.startswith("RECV"):
            return (action.partner,)
        if action.op.startswith("SEND"):
            made = Action(action.op[-1], action.stage, action.microbatch)
            return (made, earlier[action]) if action in earlier else (made,)
        receive, _ = plan.transfers(action)
        if receive is None:
            return plan.needs(action)
        rank = plan.owner(action.stage)
        return (receive, *(need for need in plan.needs(action) if plan.owner(need.stage) == rank))

    return needs


def _check_whole(plan: Plan, transfers: bool, mixed: bool) -> None:
    """Each action that there must be is there once, on its rank, and nothing else."""
    ranks_of: dict[Action, list[int]] = {}
    for rank, actions in enumerate(plan.actions):
        for action in actions:
            ranks_of.setdefault(action, []).append(rank)
    computed = [
        Action(op, s, m) for op in COMPUTE for s in range(plan.stages) for m in range(plan.microbatches)
        if op != "W" or (s, m) in plan.split or (plan.splits and not mixed)
    ]  # fmt: skip
    wanted = dict.fromkeys(computed)
    if transfers:
        wanted |= {each: None for action in computed for each in plan.transfers(action) if each is not None}

    problems = [
        f"{action} of rank {plan.owner(action.stage)} is missing" for action in wanted if action not in ranks_of
    ]
    for action, ranks in ranks_of.items():
        if action not in wanted:
            problems.append(f"{action} of rank {ranks[0]} is none of this plan's actions")
        elif len(ranks) > 1:
            problems.append(f"{action} is there {len(ranks)} times, on ranks {', '.join(map(str, ranks))}")
        elif ranks[0] != plan.owner(action.stage):
            problems.append(f"{action} is on rank {ranks[0]}, and stage {action.stage} on {plan.owner(action.stage)}")
    if problems:
        raise ScheduleError(_listed(f"{_title(plan)} is not whole:", problems))


def _dump(plan: Plan, at: list[int], missing: dict[int, Action]) -> str:
    """What each rank did last, at what it waits and for whom; the cycle if there is one.

    `at` is how far each rank has come, `missing` what those that wait need.
    """
    target = {rank: plan.owner(need.stage) for rank, need in missing.items()}

    def state(rank: int) -> str:
        did = f"rank {rank} did {plan.actions[rank][at[rank] - 1] if at[rank] else 'nothing'}"
        if rank not in missing:
            return f"{did} last, and has finished"
        whose = "which it does later itself" if target[rank] == rank else f"of rank {target[rank]}"
        return f"{did}, waits at {plan.actions[rank][at[rank]]} for {missing[rank]} {whose}"

    path = [min(target)]
    while path[-1] in target and path[-1] not in path[:-1]:
        path.append(target[path[-1]])
    cycle = path[path.index(path[-1]) :] if path[-1] in target else []
    # Those of the cycle come first, lest they be left out.
    ranks = sorted(range(plan.ranks), key=lambda rank: (rank not in cycle, rank not in missing, rank))
    dump = _listed(f"{_title(plan)} can never finish:", map(state, ranks))
    return f"{dump}\n  cycle: {' -> '.join(f'rank {rank}' for rank in cycle)}" if cycle else dump


def _title(plan: Plan) -> str:
    virtual = f" with {plan.virtual_stages} stages each" if plan.virtual_stages > 1 else ""
    return f'pipeline plan "{plan.schedule}" of {plan.ranks} ranks{virtual} and {plan.microbatches} micro-batches'


def _listed(title: str, lines: Iterable[str]) -> str:
    every = list(lines)
    rest = [f"and {len(every) - MOST_LISTED} more"] if len(every) > MOST_LISTED else []
    return "\n  ".join([title, *every[:MOST_LISTED], *rest])


# --- When everything in a plan would happen, given what it costs, also as text; how many activations are held at once


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
