"""When receives are posted and sends waited for: told by how the measured steps did it, so that another plan is run
with the same habits.

A framework posts a receive right before it waits for it (torch's pipelines of one stage a rank), a few receives early
(the engine), or when the sender is about to send by a table made beforehand (torch's pipelines of several stages a
rank). It sends what an action has made right after it, or after another one that it runs as one with it (torch's
DualPipeV). And it may go on computing once what it sent is under way, or wait until the other side has taken it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Final

import numpy as np

from dsprof.engine.schedule import Action, Plan

from ...arrays import Bool, Float, Int
from ...graph.step_graph import Steps, Structure
from .program import MeasuredPlan, need_elsewhere, needed_by

Posted = Mapping[Action, int]
"""Of each action that needs something of another rank: before which of its rank's actions the receive is posted, 0:
before the first."""
Sent = Mapping[Action, Action]
"""Of each action whose result is sent after another one of its rank: that one."""


def at_once(plan: Plan) -> Sent:
    """Each right after it was made."""
    return {}


@dataclass(frozen=True)
class Habits:
    """posted:         of a plan, when receives are posted; None: they need not be, what is sent is on its way at once
    waits_for_send: (name of an action, that of the next) between which a rank waits until what the first has made is
                    with the other rank
    waits_for_hand_over: likewise, until it has handed that over
    asks_after_send: likewise, between which it only asks for what the second needs when it has waited so, as blocking
                    sends make it
    sent:           of a plan, which actions' results are sent after another action"""

    posted: Callable[[Plan], Posted] | None
    waits_for_send: frozenset[tuple[str, str]]
    waits_for_hand_over: frozenset[tuple[str, str]] = frozenset()
    asks_after_send: frozenset[tuple[str, str]] = frozenset()
    sent: Callable[[Plan], Sent] = at_once

    def of(self, ran: Plan, plan: Plan) -> Habits:
        """The habits with another plan: of ranks with several stages, where they had one, those of torch, which runs
        such schedules otherwise, unless receives were posted early before."""
        if (ran.virtual_stages > 1) == (plan.virtual_stages > 1):
            return self
        if plan.virtual_stages > 1:
            sent = at_once if self.posted is None else overlapped
            return Habits(by_table if self.posted is in_turn else self.posted, frozenset(), sent=sent)
        return Habits(in_turn if self.posted is by_table else self.posted, frozenset())

    def eager(self) -> Habits:
        """Nobody waits for what it has sent, and receives are posted early: habits with which every plan can finish."""
        return Habits(None if self.posted is None else by_table, frozenset(), sent=self.sent)


def habits(structure: Structure, measured: MeasuredPlan) -> Habits:
    """How the ranks of these steps send and receive."""
    issues, waits = _by_task(structure, structure.issues[:, ::-1]), _by_task(structure, structure.waits)
    waited: dict[tuple[str, str], Counter[bool]] = defaultdict(Counter)
    handed: dict[tuple[str, str], Counter[bool]] = defaultdict(Counter)
    asked: dict[tuple[str, str], Counter[bool]] = defaultdict(Counter)
    posted: list[tuple[Action, int]] = []
    sent: list[tuple[Action, Action]] = []
    plan = measured.plan
    for pipeline, messages, hand_overs in zip(measured.pipelines, measured.messages, measured.hand_overs, strict=True):
        for action, tasks in messages.items():
            stage = needed_by(plan, action)
            assert stage is not None  # it was sent to it
            receiver, sender = (pipeline.programs[plan.owner(of)] for of in (stage, action.stage))
            begun = [s for task in tasks for s in issues.get((sender.thread, task), ())]
            computed = [block.action for block in sender.blocks if begun and block.ends <= min(begun)]
            sent += [(action, computed[-1])] if computed else []
            at = [s for task in tasks for s in issues.get((receiver.thread, task), ())]
            if at:
                done = sum(block.ends <= min(at) for block in receiver.blocks)
                posted.append((Action(action.op, stage, action.microbatch), done))
        for program in pipeline.programs:
            for block, following in pairwise(program.blocks):
                tasks = messages.get(block.action, ())
                if not tasks:
                    continue
                pair, until = (block.action.op, following.action.op), following.begins
                over, given = (
                    [s for t in of for s in waits.get((program.thread, t), ()) if block.ends <= s <= until]
                    for of in (tasks, hand_overs.get(block.action, ()))
                )
                waited[pair][bool(over)] += 1
                handed[pair][bool(given)] += 1
                over += given
                need = need_elsewhere(plan, following.action)
                asks = [s for t in messages.get(need, ()) for s in issues.get((program.thread, t), ())] if need else []
                if asks:
                    asked[pair][bool(over) and min(asks) >= max(over)] += 1
    return Habits(
        _posted_like(plan, posted) if posted else None, _mostly(waited), _mostly(handed), _mostly(asked),
        _sent_like(plan, sent) if posted else at_once,
    )  # fmt: skip


def _mostly(seen: Mapping[tuple[str, str], Counter[bool]]) -> frozenset[tuple[str, str]]:
    """The pairs of actions between which it was so more often than not; where it was so between all that were seen,
    those that were not are like them."""
    found = frozenset(pair for pair, of in seen.items() if of[True] > of[False])
    return frozenset(product("FB", "FBW")) if found and len(found) == len(seen) else found


def _by_task(structure: Structure, pairs: Int) -> Mapping[tuple[int, int], list[int]]:
    """(thread, task) -> the segments of that thread. pairs: task, segment."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for task, segment in pairs.tolist():
        found[int(structure.thread[segment]), task].append(segment)
    return found


# --- when receives are posted


def in_turn(plan: Plan) -> Posted:
    """Each right before it is waited for."""
    return {
        action: at
        for actions in plan.actions for at, action in enumerate(actions) if need_elsewhere(plan, action) is not None
    }  # fmt: skip


def early(plan: Plan, more: int) -> Posted:
    """So many beside the next one are always posted, forwards and backwards apart."""
    found: dict[Action, int] = {}
    turns = in_turn(plan)
    for actions in plan.actions:
        for op in "FB":
            mine = [action for action in actions if action.op == op and action in turns]
            for number, action in enumerate(mine):
                found[action] = turns[mine[number - more - 1]] + 1 if number > more else 0
    return found


def by_table(plan: Plan) -> Posted:
    """As torch puts sends and receives into a table of computations: in rounds in which each rank does its next action
    if it can, or the two that it runs as one if it can do both, a receive comes to stand where the receiver is when the
    sender has computed."""
    found: dict[Action, int] = {}
    consumers = {need: action for action in in_turn(plan) if (need := need_elsewhere(plan, action)) is not None}
    beside = overlapped(plan)
    done: set[Action] = set()
    at = [0] * plan.ranks
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(plan.actions):
            turn = actions[at[rank] : at[rank] + 1]
            turn += tuple(beside[action] for action in turn if action in beside)
            if not turn or not done.issuperset(need for action in turn for need in plan.needs(action)):
                continue
            done.update(turn)
            at[rank] += len(turn)
            progress = True
            for action in turn:
                if action in consumers:
                    found[consumers[action]] = at[plan.owner(consumers[action].stage)]
    return found


RULES: Final[tuple[Callable[[Plan], Posted], ...]] = (
    in_turn, lambda plan: early(plan, 1), lambda plan: early(plan, 2), lambda plan: early(plan, 3), by_table,
)  # fmt: skip


def _posted_like(plan: Plan, seen: Sequence[tuple[Action, int]]) -> Callable[[Plan], Posted]:
    """The rule by which the most receives were posted when they were seen to be."""

    def agreeing(rule: Callable[[Plan], Posted]) -> int:
        told = rule(plan)
        return sum(told.get(action) == at for action, at in seen)

    return max(RULES, key=agreeing)


# --- when is sent what an action has made


def overlapped(plan: Plan) -> Sent:
    """The forwards that torch's DualPipeV runs as one with the backward behind them, of the rank's other stage, and
    that backward. Of plans that are not v-shaped, none. The last rank's first pair is two actions there, too
    (`torch.distributed.pipelining.schedules.ScheduleDualPipeV`, `OVERLAP_F_B`)."""
    if not plan.v_shaped:
        return {}
    found: dict[Action, Action] = {}
    for rank, actions in enumerate(plan.actions):
        pairs = [
            (action, following)
            for action, following in pairwise(actions)
            if (action.op, following.op) == ("F", "B") and action.stage != following.stage
            and following[1:] not in plan.split
        ]  # fmt: skip
        found.update(pairs[1:] if rank == plan.ranks - 1 else pairs)
    return found


def _sent_like(plan: Plan, seen: Sequence[tuple[Action, Action]]) -> Callable[[Plan], Sent]:
    """The rule by which the most results were sent when they were seen to be; where both are alike, torch's, which is
    another one in v-shaped plans alone."""

    def agreeing(rule: Callable[[Plan], Sent]) -> int:
        told = rule(plan)
        return sum(told.get(action, action) == after for action, after in seen)

    return max((overlapped, at_once), key=agreeing)


# --- how long messages are under way

LEAST_IDLE_MS: Final = 0.02
"""A rank that stood still for less did not wait for what it received."""


def awaited(steps: Steps) -> Bool:
    """[C, S] whether some rank stood still until a task had ended, as it was measured. Of others it is not seen when
    they had: a receiver that computes looks for what has come when it is through."""
    structure = steps.structure
    over = steps.began + steps.work.sum(axis=-1, dtype=np.float64)
    before = np.roll(over, 1, axis=0)
    idle = steps.began - before > LEAST_IDLE_MS
    idle[np.searchsorted(structure.thread, np.arange(structure.threads))] = False
    found = np.zeros((len(structure.tasks), len(steps.numbers)), bool)
    np.logical_or.at(found, structure.waits[:, 0], idle[structure.waits[:, 1]])
    return found


def typical_transfer(transfer: Float, waited: Bool, tasks: Sequence[int]) -> Float | None:
    """What such a message takes, mean of those that were waited for, [S] ms; None where none was.

    transfer: [C, S]
    """
    seen = np.where(waited[tasks], transfer[tasks], np.nan)
    if np.isnan(seen).all():
        return None
    whole = float(np.nanmean(seen))
    return np.array([np.nanmean(of) if not np.isnan(of).all() else whole for of in seen.T])
