"""Whether a plan is whole and can finish, before anybody waits for it; and what waits for whom where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

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
