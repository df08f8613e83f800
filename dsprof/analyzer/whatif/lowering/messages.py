"""When receives are posted and sends waited for: told by how the measured steps did it, so that another plan is run
with the same habits.

A framework posts a receive right before it waits for it (torch's pipelines) or a few receives early (the engine); and
it may go on computing once what it sent is under way, or wait until the other side has taken it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dsprof.engine.schedule import Action, Plan

from ...graph.step_graph import Structure
from .program import MeasuredPlan, RankProgram, need_elsewhere


@dataclass(frozen=True)
class Habits:
    """early: `F` or `B` -> how many receives of that kind are posted before their turn, beside the next one
    waits_for_send: (name of an action, that of the next) between which a rank waits until what the first has made is
                    with the other rank"""

    early: Mapping[str, int]
    waits_for_send: frozenset[tuple[str, str]]


def habits(structure: Structure, measured: MeasuredPlan) -> Habits:
    """How the ranks of these steps send and receive."""
    issues, waits = _by_task(structure, structure.issues[:, ::-1]), _by_task(structure, structure.waits)
    early: dict[str, int] = defaultdict(int)
    waited: dict[tuple[str, str], Counter[bool]] = defaultdict(Counter)
    plan = measured.plan
    for pipeline, messages in zip(measured.pipelines, measured.messages, strict=True):
        for (action, stage), tasks in messages.items():
            receiver = pipeline.programs[plan.owner(stage)]
            posted = [s for task in tasks for s in issues.get((receiver.thread, task), ())]
            if posted:
                ahead = _ahead(plan, receiver, Action(action.op, stage, action.microbatch), min(posted))
                early[action.op] = max(early[action.op], ahead)
        for program in pipeline.programs:
            for block, following in pairwise(program.blocks):
                tasks = [t for (action, _), of in messages.items() if action == block.action for t in of]
                if tasks:
                    until = following.begins
                    soon = any(block.ends <= s <= until for t in tasks for s in waits.get((program.thread, t), ()))
                    waited[block.action.op, following.action.op][soon] += 1
    return Habits(dict(early), frozenset(pair for pair, seen in waited.items() if seen[True] > seen[False]))


def receiving(plan: Plan, actions: Sequence[Action], op: str) -> list[Action]:
    """Those of a rank's actions of one name that need something of another rank, in order."""
    return [action for action in actions if action.op == op and need_elsewhere(plan, action) is not None]


def _by_task(structure: Structure, pairs: np.typing.NDArray[np.int64]) -> Mapping[tuple[int, int], list[int]]:
    """(thread, task) -> the segments of that thread. pairs: task, segment."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for task, segment in pairs.tolist():
        found[int(structure.thread[segment]), task].append(segment)
    return found


def _ahead(plan: Plan, program: RankProgram, action: Action, posted: int) -> int:
    """How many receives of its kind were still to be taken before that of `action` when it was posted."""
    ends = {block.action: block.ends for block in program.blocks}
    taking = receiving(plan, [block.action for block in program.blocks], action.op)
    taken = sum(ends[one] <= posted for one in taking)
    return max(taking.index(action) - taken, 0)
