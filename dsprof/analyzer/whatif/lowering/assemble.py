"""Another structure put together of copies of measured operations, and what each of them takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from dsprof.engine.schedule import Action, Plan

from ...arrays import Bool, Float, Int
from ...graph.evaluation_order import Cyclic
from ...graph.step_graph import PARTS, Costs, Edges, Steps, Structure, Task
from ..edit import GONE, Recut
from .messages import Habits, Posted, habits, typical_transfer
from .program import MESSAGE, MeasuredPlan, NotLowered, Pipeline, need_elsewhere
from .recipe import ActionPiece, Recipe, Stages, source_microbatch, source_stage

COMPUTED: Final = tuple(PARTS.index(part) for part in ("compute", "sharding"))
"""What of a segment takes another time in a stage that has other layers."""
DATA: Final = PARTS.index("data")
NO_SOURCE: Final = -1

NO_ACTION: Final = Action("", -1, -1)

Key = tuple[int, Action] | None
"""Of which action of which pipeline a copy is; None: of a prologue or an epilogue."""


def assemble(
    structure: Structure, measured: MeasuredPlan, plan: Plan, stages: Stages, waited: Bool | None = None
) -> Recut:
    """The structure in which every pipeline runs `plan`. Raises NotLowered.

    waited: [C, S] whether a rank stood still for each task (`messages.awaited`): those messages tell what one takes
            in another plan. None: each takes what the measured one does that it is like
    """
    as_seen = habits(structure, measured).of(measured.plan, plan)
    for each in (as_seen, as_seen.eager()):
        recut = _Assembly(structure, measured, plan, stages, each, waited).recut()
        try:
            recut.structure.plan  # noqa: B018  # kept there: it is worked out for the replay anyway
        except Cyclic:
            continue
        return recut
    raise NotLowered("its actions would wait for each other for ever, as messages are sent and received in this run")


@dataclass(frozen=True)
class _Placed:
    """An action in the new structure: its first segment, the one that waits for what it needs, the one at whose end it
    sends; numbers of the new structure."""

    first: int
    waits: int
    sends: int


class _Assembly:
    def __init__(
        self,
        structure: Structure,
        measured: MeasuredPlan,
        plan: Plan,
        stages: Stages,
        how: Habits,
        waited: Bool | None,
    ) -> None:
        self._old, self._measured, self._plan, self._stages = structure, measured, plan, stages
        self._habits = how
        self._waited = waited
        self._posted: Posted = {} if self._habits.posted is None else self._habits.posted(plan)
        self._sent = self._habits.sent(plan)
        # Of each new segment.
        self._source: list[int] = []
        self._factor: list[float] = []
        self._loads: list[bool] = []
        self._key: list[Key] = []
        self._carried: list[str] = []
        self._thread: list[int] = []
        self._action: list[Action] = []
        self._copies: dict[int, list[int]] = defaultdict(list)
        # Of each new task.
        self._tasks: list[Task] = []
        self._task_source: list[int] = []
        self._task_place: list[tuple[int, int]] = []
        self._edges: list[tuple[int, int, int, int]] = []  # whether the source is a task, it, the same of the target
        self._placed: dict[tuple[int, Action], _Placed] = {}

    def recut(self) -> Recut:
        of_thread = {
            program.thread: (which, rank, program)
            for which, pipeline in enumerate(self._measured.pipelines)
            for rank, program in enumerate(pipeline.programs)
        }
        for thread in range(self._old.threads):
            which, rank, program = of_thread[thread]
            self._append(range(program.start, program.blocks[0].first), thread)
            self._actions(which, rank, self._measured.pipelines[which], thread)
            self._append(range(program.blocks[-1].stop, program.end), thread)
        self._other_tasks()
        for which in range(len(self._measured.pipelines)):
            self._messages(which)
        return self._finish()

    # --- segments

    def _append(
        self,
        segments: range,
        thread: int,
        key: Key = None,
        factor: float = 1.0,
        carried: str = "all",
        acts: bool = False,
        loads: bool = True,
    ) -> None:
        for segment in segments:
            self._copies[segment].append(len(self._source))
            self._source.append(segment)
            self._factor.append(factor)
            self._loads.append(loads)
            self._key.append(key)
            self._carried.append(carried)
            self._thread.append(thread)
            self._action.append(key[1] if acts and key is not None else NO_ACTION)

    def _actions(self, which: int, rank: int, pipeline: Pipeline, thread: int) -> None:
        recipe = Recipe(self._old, pipeline, rank, self._plan, self._stages)
        for action in self._plan.actions[rank]:
            key = which, action
            pieces = recipe.pieces(action)
            first = len(self._source)
            waits = self._before(pieces[0], thread, key)
            for piece in pieces:
                block = piece.block
                own = range(block.begins, block.ends)
                self._append(own, thread, key, piece.factor, piece.carried, acts=True, loads=piece.loads)
            first_piece = pieces[0]
            if first_piece.whole:
                after = range(first_piece.block.ends, first_piece.block.stop)
                self._append(after, thread, key, carried=first_piece.carried, loads=first_piece.loads)
            self._placed[key] = _Placed(first, waits, len(self._source) - 1)

    def _before(self, piece: ActionPiece, thread: int, key: Key) -> int:
        """What comes before an action; the segment that waits for what it needs."""
        block = piece.block
        if not piece.whole:
            return len(self._source)
        self._append(range(block.first, block.waits), thread, key, carried=piece.carried, loads=piece.loads)
        waits = len(self._source)
        self._append(range(block.waits, block.begins), thread, key, carried=piece.carried, loads=piece.loads)
        return waits

    # --- tasks

    def _other_tasks(self) -> None:
        """Tasks that are no messages of the pipeline come with the segments that issue them: one for each action that
        does, which its ranks issue together."""
        old = self._old
        gone = self._measured.carried
        made: dict[tuple[int, Key], int] = {}
        instances: dict[int, list[Key]] = defaultdict(list)
        for segment, task in old.issues.tolist():
            if task in gone:
                continue
            for copy in self._copies[segment]:
                if not self._carries(copy, old.tasks[task]):
                    continue
                key = self._of_all(self._key[copy])
                if (task, key) not in made:
                    made[task, key] = self._new_task(old.tasks[task], task, (self._thread[copy], copy))
                    instances[task].append(key)
                self._edges.append((0, copy, 1, made[task, key]))
        issued = set(old.issues[:, 1].tolist())
        for task in range(len(old.tasks)):
            if task not in gone and task not in issued:
                made[task, None] = self._new_task(old.tasks[task], task, (old.threads, task))
                instances[task].append(None)
        for task, segment in old.waits.tolist():
            for copy in self._copies[segment] if task not in gone else ():
                key = self._of_all(self._key[copy])
                if (task, key) in made:
                    self._edges.append((1, made[task, key], 0, copy))
                elif key is None:  # an epilogue waits for what any action has issued
                    self._edges += [(1, made[task, one], 0, copy) for one in instances[task]]
        first_outside = old.segments + len(old.tasks)
        for source, target in zip(old.edges.source.tolist(), old.edges.target.tolist(), strict=True):
            if source < first_outside:
                continue
            if target < old.segments:
                self._edges += [(2, source - first_outside, 0, copy) for copy in self._copies[target][:1]]
            elif target - old.segments not in gone:
                task = target - old.segments
                self._edges += [(2, source - first_outside, 1, made[task, one]) for one in instances[task][:1]]

    def _carries(self, copy: int, task: Task) -> bool:
        carried = self._carried[copy]
        return carried == "all" or task.gradient == (carried == "gradients")

    @staticmethod
    def _of_all(key: Key) -> Key:
        """The same for all pipelines: their ranks reduce together."""
        return None if key is None else (0, key[1])

    def _new_task(self, task: Task, source: int, place: tuple[int, int]) -> int:
        self._tasks.append(task)
        self._task_source.append(source)
        self._task_place.append(place)
        return len(self._tasks) - 1

    def _messages(self, which: int) -> None:
        """What actions of one rank need of another's, posted and waited for as the measured ones were."""
        plan, pipeline = self._plan, self._measured.pipelines[which]
        carrying: dict[Action, list[int]] = defaultdict(list)
        over: dict[Action, list[int]] = defaultdict(list)  # what its rank waits for when it waits for what it sent
        for rank, actions in enumerate(plan.actions):
            program = pipeline.programs[rank]
            ends = [self._placed[which, action].sends for action in actions]
            begins = self._placed[which, actions[0]].first if program.start < program.blocks[0].first else 0
            for action in actions:
                need = need_elsewhere(plan, action)
                if need is None:
                    continue
                last = self._sent.get(need, need)
                sent, here = self._placed[which, last], self._placed[which, action]
                turn = self._posted.get(action, 0)
                post = ends[turn - 1] if turn else begins - 1
                following = self._following(last)
                for source, task in self._message_sources(which, need):
                    number = self._new_task(task, source, (self._thread[sent.sends], sent.sends))
                    carrying[need].append(number)
                    self._edges.append((0, sent.sends, 1, number))
                    if post >= 0 and self._posted:
                        self._edges.append((0, post, 1, number))
                    self._edges.append((1, number, 0, here.waits))
                    if following is not None and (last.op, following.op) in self._habits.waits_for_send:
                        self._edges.append((1, number, 0, self._placed[which, following].waits))
                        over[need].append(number)
                if following is not None and (last.op, following.op) in self._habits.waits_for_hand_over:
                    goes_on = self._placed[which, following].waits
                    over[need] += self._hand_overs(which, need, sent.sends, post, goes_on)
        self._asked_after(over, carrying)

    def _hand_overs(self, which: int, action: Action, sends: int, post: int, goes_on: int) -> list[int]:
        """Tasks until whose ends a rank does not go on, as it first hands over what an action has made. sends, post:
        the segments at whose ends that is sent, and asked for; goes_on: the one that begins then."""
        made = []
        for source, task in self._sources(self._measured.hand_overs[which], action):
            made.append(number := self._new_task(task, source, (self._thread[sends], sends)))
            self._edges += [(0, sends, 1, number), (1, number, 0, goes_on)]
            if post >= 0 and self._posted:
                self._edges.append((0, post, 1, number))
        return made

    def _asked_after(self, over: Mapping[Action, Sequence[int]], carrying: Mapping[Action, Sequence[int]]) -> None:
        """Receives that are posted when the rank has waited for what it sent before. Of actions, over: the tasks until
        whose ends it does; carrying: those that carry what the action made."""
        for actions in self._plan.actions:
            for turn, (before, action) in enumerate(pairwise(actions), 1):
                need = need_elsewhere(self._plan, action)
                if need is None or (before.op, action.op) not in self._habits.asks_after_send:
                    continue
                if self._posted.get(action) == turn:
                    self._edges += [(1, sent, 1, asked) for sent in over.get(before, ()) for asked in carrying[need]]

    def _following(self, action: Action) -> Action | None:
        actions = self._plan.actions[self._plan.owner(action.stage)]
        at = actions.index(action) + 1
        return actions[at] if at < len(actions) else None

    def _message_sources(self, which: int, need: Action) -> list[tuple[int, Task]]:
        """The measured messages that one is like, and what it then is."""
        found = self._sources(self._measured.messages[which], need)
        return found or [(NO_SOURCE, Task("pipeline", MESSAGE, workers=None))]

    def _sources(self, seen: Mapping[Action, Sequence[int]], action: Action) -> list[tuple[int, Task]]:
        """Of the tasks that are seen of each action, those that an action's are like."""
        was, plan = self._measured.plan, self._plan
        micro = source_microbatch(was.microbatches, plan.microbatches, action.microbatch)
        like = Action(action.op, source_stage(was, plan, action.stage), micro)
        found = seen.get(like)
        if found is None:
            alike = {made.stage: tasks for made, tasks in seen.items() if made[::2] == like[::2]}
            nearest = min(alike, key=lambda stage: (abs(stage - like.stage), stage), default=None)
            found = () if nearest is None else alike[nearest]
        return [(task, self._old.tasks[task]) for task in found]

    def _messages_by_op(self) -> list[list[int]]:
        """The measured messages of activations, and those of gradients."""
        found: dict[str, list[int]] = defaultdict(list)
        for messages in self._measured.messages:
            for action, tasks in messages.items():
                found[action.op] += tasks
        return list(found.values())

    # --- all together

    def _finish(self) -> Recut:
        old = self._old
        segments, tasks = len(self._source), len(self._tasks)
        order = sorted(range(tasks), key=lambda number: self._task_place[number])
        place = {number: i for i, number in enumerate(order)}
        source = np.array(self._source, np.int64)
        task_source = np.array([self._task_source[number] for number in order], np.int64)

        def number(kind: int, which: int) -> int:
            return (which, segments + place.get(which, 0), segments + tasks + which)[kind]

        pairs = sorted({(number(a, b), number(c, d)) for a, b, c, d in self._edges})
        edges = np.array(pairs, np.int64).reshape(-1, 2)
        operations = np.full(old.segments + len(old.tasks), GONE)
        known = np.where(task_source == NO_SOURCE, NO_SOURCE, task_source + old.segments)
        every = np.concatenate([source, known])
        was, first = np.unique(every, return_index=True)
        operations[was[was != NO_SOURCE]] = first[was != NO_SOURCE]
        kept = np.zeros(len(every), bool)
        kept[first[was != NO_SOURCE]] = True
        ids = np.where(kept, old.ids[every], 0)
        ids[~kept] = old.ids_used + np.arange(int((~kept).sum()))
        backward = old.backward[source]
        structure = replace(
            old,
            thread=np.array(self._thread, np.int64),
            backward=backward,
            action=np.array([op for op, _, _ in self._action], object),
            place=np.array([of[1:] for of in self._action], np.int64).reshape(-1, 2),
            tasks=tuple(self._tasks[number] for number in order),
            edges=Edges(edges[:, 0], edges[:, 1]),
            ids=ids,
            ids_used=old.ids_used + int((~kept).sum()),
        )
        factor, loads, waited = np.array(self._factor), np.array(self._loads), self._waited
        other = self._plan.actions != self._measured.plan.actions
        alike = [(was, np.flatnonzero(np.isin(task_source, was))) for was in self._messages_by_op() if other]

        def costs(steps: Steps) -> Costs:
            work = steps.work[source]
            work[..., COMPUTED] *= factor[:, None, None]
            work[..., DATA] *= loads[:, None]
            transfer, wire, size = (_taken(of, task_source) for of in (steps.transfer, steps.wire, steps.size))
            for was, now in alike:
                typical = None if waited is None else typical_transfer(steps.transfer, waited, was)
                if typical is not None:
                    transfer[now] = typical
            return Costs(work, transfer, wire, size)

        return Recut(structure, operations, costs)


def _taken(of_tasks: Float, source: Int) -> Float:
    """What each new task takes, [C, S]: nothing where it is like none that was measured."""
    found = np.zeros((len(source), of_tasks.shape[1]))
    known = source != NO_SOURCE
    found[known] = of_tasks[source[known]]
    return found
