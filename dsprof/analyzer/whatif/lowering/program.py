"""What was measured of a pipeline's steps: of each rank its prologue, its actions in order and its epilogue; and which
message carries what from which action to which."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from dsprof.engine.schedule import COMPUTE, Action, Plan

from ...graph.step_graph import Structure, Task
from ...graph.tasks import HANDED

MESSAGE: Final = "send_recv pipeline"
"""Kind of the tasks that carry activations and their gradients from stage to stage."""


class NotLowered(Exception):
    """These steps are not the plan of a pipeline, or not one that is known whole; the message says why."""


@dataclass(frozen=True)
class ActionBlock:
    """An action of a rank as it was measured: segments `first` up to, without, `stop`.

    first:  where the rank turned to it, after it had sent what the action before made
    waits:  the segment that begins when what it needs is there; `begins` where it waits for nothing
    begins, ends: its own segments, up to, without, `ends`
    stop:   after it has sent what it made
    """

    action: Action
    first: int
    waits: int
    begins: int
    ends: int
    stop: int


@dataclass(frozen=True)
class RankProgram:
    """One rank's segments: `start` up to, without, the first block's `first` are its prologue; from the last one's
    `stop` up to, without, `end` its epilogue."""

    thread: int
    start: int
    end: int
    blocks: tuple[ActionBlock, ...]


@dataclass(frozen=True)
class Pipeline:
    """One pipeline: of replicas there are several. programs: of its ranks, in the order of their stages."""

    plan: Plan
    programs: tuple[RankProgram, ...]

    @cached_property
    def blocks(self) -> Mapping[Action, ActionBlock]:
        """Of each action that ran."""
        return {block.action: block for program in self.programs for block in program.blocks}


@dataclass(frozen=True)
class MeasuredPlan:
    """The pipelines of like-shaped steps, which all run the same plan.

    messages: of each pipeline, the action that made it -> its tasks; `needed_by` tells which stage needs it
    hand_overs: likewise, until when its sender has handed it over, where that is a task of its own
    carried:  every task that is a message of one of them, or the hand-over of one
    """

    pipelines: tuple[Pipeline, ...]
    messages: tuple[Mapping[Action, tuple[int, ...]], ...]
    hand_overs: tuple[Mapping[Action, tuple[int, ...]], ...]
    carried: frozenset[int]

    @property
    def plan(self) -> Plan:
        return self.pipelines[0].plan


def measured_plan(structure: Structure) -> MeasuredPlan:
    """What these steps ran. Raises NotLowered."""
    raw = {thread: _actions(structure, thread) for thread in range(structure.threads)}
    acting = [thread for thread, blocks in raw.items() if blocks]
    if not acting:
        raise NotLowered("no actions of a pipeline's schedule (forward and backward of a stage and micro-batch) were "
                         "recorded in its steps")  # fmt: skip
    idle = [thread for thread in range(structure.threads) if thread not in acting]
    if idle:
        raise NotLowered("not every chain of the ranks runs actions of the schedule: where a device computes beside "
                         "its host, only the host's were recorded")  # fmt: skip
    sent = _senders(structure)
    pipelines, messages, hand_overs = [], [], []
    for threads in _connected(structure, acting, sent):
        pipeline, carried, handed = _pipeline(structure, threads, raw, sent)
        pipelines.append(pipeline)
        messages.append(carried)
        hand_overs.append(handed)
    shapes = {(one.plan.ranks, one.plan.microbatches, one.plan.actions) for one in pipelines}
    if len(shapes) > 1:
        raise NotLowered("the replicas of the pipeline do not run the same actions in the same order")
    every = frozenset(task for of in messages for tasks in of.values() for task in tasks)
    every |= {number for number, task in enumerate(structure.tasks) if task.kind == HANDED}
    return MeasuredPlan(tuple(pipelines), tuple(messages), tuple(hand_overs), every)


def is_message(task: Task) -> bool:
    """Whether it carries something from stage to stage."""
    return task.kind == MESSAGE


@dataclass(frozen=True)
class _Acted:
    """An action and its own segments, up to, without, `ends`."""

    op: str
    stage: int
    microbatch: int
    begins: int
    ends: int


def _actions(structure: Structure, thread: int) -> list[_Acted]:
    """The actions of a thread, in order."""
    mine = structure.of_thread(thread)
    found: list[_Acted] = []
    for segment in range(mine.start, mine.stop):
        op = str(structure.action[segment])
        if op not in COMPUTE:
            continue
        stage, microbatch = structure.place[segment].tolist()
        if found and found[-1] == replace(found[-1], op=op, stage=stage, microbatch=microbatch, ends=segment):
            found[-1] = replace(found[-1], ends=segment + 1)
        else:
            found.append(_Acted(op, stage, microbatch, segment, segment + 1))
    return found


@dataclass(frozen=True)
class _Sent:
    """A message: the segment at whose end it is sent, and the thread that receives it."""

    task: int
    segment: int
    receiver: int


def _senders(structure: Structure) -> list[_Sent]:
    """Messages of which it is known who sent and who received them. The receiver waits for a message. Its sender may
    wait for it too, and then the lane says who is who (`0 2>3`: from rank 2 to rank 3)."""
    issued: dict[int, dict[int, int]] = defaultdict(dict)
    for segment, task in structure.issues.tolist():
        if is_message(structure.tasks[task]):
            issued[task][int(structure.thread[segment])] = segment
    waiting: dict[int, set[int]] = defaultdict(set)
    for task, segment in structure.waits.tolist():
        waiting[task].add(int(structure.thread[segment]))
    found = []
    for task, segments in sorted(issued.items()):
        ends = sorted({*segments, *waiting[task]})
        if len(ends) != 2:
            continue
        low, high = ends
        waits = waiting[task]
        up = high in waits if len(waits) == 1 else _goes_up(structure.tasks[task].lane)
        sender, receiver = (low, high) if up else (high, low)
        if sender in segments:
            found.append(_Sent(task, segments[sender], receiver))
    return found


def _goes_up(lane: str) -> bool:
    """Whether a pair's lane says that a lower rank sends to a higher one."""
    pair = next((word for word in reversed(lane.split()) if ">" in word), "0>1")
    source, _, target = pair.partition(">")
    return not (source.isdecimal() and target.isdecimal()) or int(source) < int(target)


def _connected(structure: Structure, acting: Sequence[int], sent: Sequence[_Sent]) -> list[list[int]]:
    """Threads that send each other messages, each pipeline's in one list."""
    leader = {thread: thread for thread in acting}

    def find(thread: int) -> int:
        while leader[thread] != thread:
            thread = leader[thread]
        return thread

    for one in sent:
        a, b = find(int(structure.thread[one.segment])), find(one.receiver)
        leader[max(a, b)] = min(a, b)
    together: dict[int, list[int]] = defaultdict(list)
    for thread in acting:
        together[find(thread)].append(thread)
    return list(together.values())


def _pipeline(
    structure: Structure, threads: Sequence[int], raw: Mapping[int, Sequence[_Acted]], sent: Sequence[_Sent]
) -> tuple[Pipeline, Mapping[Action, tuple[int, ...]], Mapping[Action, tuple[int, ...]]]:
    order = sorted(threads, key=lambda thread: min(one.stage for one in raw[thread]))
    numbers = sorted({one.microbatch for thread in threads for one in raw[thread]})
    number = {microbatch: i for i, microbatch in enumerate(numbers)}
    actions = tuple(
        tuple(Action(one.op, one.stage, number[one.microbatch]) for one in raw[thread]) for thread in order
    )  # fmt: skip
    plan = _whole_plan(actions, len(numbers))
    mine = [one for one in sent if int(structure.thread[one.segment]) in threads]
    programs = []
    carried: dict[Action, tuple[int, ...]] = {}
    handed: dict[Action, tuple[int, ...]] = {}
    asked = {one.task: _asked_for(structure, plan, order.index(one.receiver), raw[one.receiver], one) for one in mine}
    for position, thread in enumerate(order):
        program, made = _program(structure, plan, position, thread, order, raw[thread], mine, asked)
        programs.append(program)
        carried.update(made)
        handed.update(_hand_overs(structure, thread, made, mine))
    return Pipeline(plan, tuple(programs)), carried, handed


def _hand_overs(
    structure: Structure, thread: int, made: Mapping[Action, tuple[int, ...]], sent: Sequence[_Sent]
) -> Mapping[Action, tuple[int, ...]]:
    """Of what a rank's actions send, the tasks that it may wait for itself: on a message's lane, begun with it."""
    tasks = structure.tasks
    begun: dict[int, list[int]] = defaultdict(list)
    for segment, task in structure.issues.tolist():
        if tasks[task].kind == HANDED and structure.thread[segment] == thread:
            begun[segment].append(task)
    segment_of = {one.task: one.segment for one in sent}
    found = {}
    for action, messages in made.items():
        mine = [
            task for message in messages for task in begun[segment_of[message]]
            if tasks[task].lane == tasks[message].lane
        ]  # fmt: skip
        if mine:
            found[action] = tuple(dict.fromkeys(mine))
    return found


def _whole_plan(actions: tuple[tuple[Action, ...], ...], microbatches: int) -> Plan:
    """The plan that these actions are. Raises NotLowered where it is none that is whole."""
    stages = sorted({action.stage for mine in actions for action in mine})
    if stages != list(range(len(stages))):
        seen = ", ".join(map(str, stages)) if stages[0] >= 0 else "none that is named"
        raise NotLowered(f"of the pipeline's stages these were captured: {seen}; the steps of all are needed")
    ranks = len(actions)
    if len(stages) % ranks:
        raise NotLowered(f"{len(stages)} stages on {ranks} ranks: each has to hold as many")
    dealt = (Plan("as measured", ranks, microbatches, len(stages) // ranks, actions, v) for v in (False, True))
    plan = next((one for one in dealt if one.places_its_actions), None)
    if plan is None:
        raise NotLowered("the stages are not dealt out to the ranks in turns, stage 0 to the first")
    every = {Action(op, stage, micro) for op in "FB" for stage in stages for micro in range(microbatches)}
    done = [action for mine in actions for action in mine if action.op != "W"]
    if len(done) != len(every) or set(done) != every:
        raise NotLowered("not every stage runs one forward and one backward of every micro-batch in each step")
    if sum(action.op == "W" for mine in actions for action in mine) != len(plan.split):
        raise NotLowered("a part of a backward ran twice in a step")
    return plan


def _program(
    structure: Structure,
    plan: Plan,
    position: int,
    thread: int,
    order: Sequence[int],
    acted: Sequence[_Acted],
    sent: Sequence[_Sent],
    asked: Mapping[int, Action | None],
) -> tuple[RankProgram, Mapping[Action, tuple[int, ...]]]:
    """A rank's program, and what it sends. asked: of each message, what its receiver waits for with it.

    A message carries what its receiver needs next when it waits for it, where this rank has made that; else what this
    rank has made last of what the receiver needs. What is made last alone would not do: torch's DualPipeV sends what a
    forward has made after the backward that it runs beside it.
    """
    mine = structure.of_thread(thread)
    actions = plan.actions[position]
    ends = [one.ends for one in acted]
    carried: dict[Action, list[int]] = defaultdict(list)
    stop = list(ends)
    for one in sent:
        if structure.thread[one.segment] != thread:
            continue
        to = order.index(one.receiver)
        made = int(np.searchsorted(ends, one.segment + 1, "right")) - 1
        needed = asked[one.task]
        of = next((at for at in range(made, -1, -1) if actions[at] == needed), made)
        while of >= 0 and not _is_needed_on(plan, actions[of], to):
            of -= 1
        if of < 0:
            raise NotLowered("the pipeline's ranks send each other what no action has made")
        carried[actions[of]].append(one.task)
        following = acted[made + 1].begins if made + 1 < len(acted) else mine.stop
        if one.segment < following:
            stop[made] = max(stop[made], one.segment + 1)
    received = {one.task for one in sent if one.receiver == thread}
    awaited = {segment for task, segment in structure.waits.tolist() if task in received}
    blocks = []
    for i, (done, action) in enumerate(zip(acted, actions, strict=True)):
        first = stop[i - 1] if i else mine.start
        waits = next((segment for segment in range(first, done.begins) if segment in awaited), done.begins)
        blocks.append(ActionBlock(action, first if i else waits, waits, done.begins, done.ends, stop[i]))
    return (
        RankProgram(thread, mine.start, mine.stop, tuple(blocks)),
        {action: tuple(tasks) for action, tasks in carried.items()},
    )


def _asked_for(structure: Structure, plan: Plan, position: int, acted: Sequence[_Acted], one: _Sent) -> Action | None:
    """What the receiver of a message needs of another rank for the action before which it first waits for it."""
    waits = structure.first_waits.get((one.receiver, one.task))
    turn = next((at for at, action in enumerate(acted) if waits is not None and waits < action.ends), None)
    return None if turn is None else need_elsewhere(plan, plan.actions[position][turn])


def needed_by(plan: Plan, action: Action) -> int | None:
    """The other stage that needs what an action makes; None: none does."""
    step = {"F": 1, "B": -1}.get(action.op, 0)
    stage = action.stage + step
    return stage if step and 0 <= stage < plan.stages else None


def _is_needed_on(plan: Plan, action: Action, rank: int) -> bool:
    stage = needed_by(plan, action)
    return stage is not None and plan.owner(stage) == rank


def need_elsewhere(plan: Plan, action: Action) -> Action | None:
    """What an action needs that another rank makes; None: nothing."""
    rank = plan.owner(action.stage)
    return next((need for need in plan.needs(action) if plan.owner(need.stage) != rank), None)
