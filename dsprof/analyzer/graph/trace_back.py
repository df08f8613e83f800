"""From an operation of a replayed graph back to what bound it: the operation at whose end it began."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from ..align.match import SEND_RECV
from ..arrays import Float
from .chains import DEPENDS, LAUNCH, STEP, SYNC
from .longest_path import Level, Plan
from .path_operations import (
    ACROSS,
    COMMUNICATION,
    COPY,
    GAP,
    JOIN,
    MESSAGE,
    ON_LINK,
    PROGRAM,
    SHARED,
    WAIT,
    PathOperation,
)
from .replay import Moments
from .step_graph import PARTS, StepGraph, Steps, Task

TIE_MS: Final = 1e-7
"""Of two that end so close to each other, the one on the same chain is taken."""


@dataclass(frozen=True)
class _At:
    """An operation as `longest_path` has it: from the begin of node `row`, for `weight`, in the step at this place."""

    step: int
    row: int
    weight: int


class _Step:
    """A step of the graph, and when all in it begins, ms from the first reference of its stretch."""

    def __init__(self, graph: StepGraph, of: Moments, place: int) -> None:
        self.place, self.index, self.column = place, int(graph.template[place]), int(graph.column[place])
        self.steps: Steps = graph.templates[self.index]
        self.structure, self.plan = self.steps.structure, self.steps.structure.plan
        self.rows: Float = of.rows[self.index][:, self.column] + of.reference[place]
        self.weights: Float = of.weights[self.index][:, self.column]

    def operation(self, weight: int) -> int:
        """Which one a row of the weights belongs to: its place in the structure; -1: none."""
        structure = self.structure
        if weight < structure.segments + len(structure.tasks):
            return weight
        wire = weight - len(structure.tasks)
        return wire if wire < structure.segments + len(structure.tasks) else -1

    def task(self, operation: int) -> Task | None:
        return (
            self.structure.tasks[operation - self.structure.segments] if operation >= self.structure.segments else None
        )

    @cached_property
    def workers(self) -> dict[int, tuple[int, int, int, bool]]:
        """Row of a worker after a queued task -> (row of the task, its weight, row of the other end, the later one)."""
        found = {}
        for level in self.plan.levels:
            columns = (level.queued, level.queued_weights, level.before, level.later, level.earlier)
            for row, weight, before, later, earlier in zip(*(one.tolist() for one in columns), strict=True):
                found[later] = row, weight, before, True
                found[earlier] = row, weight, before, False
        return found


class TraceBack:
    """Backwards through a replayed graph: from each operation to the one at whose end it began."""

    def __init__(self, graph: StepGraph, of: Moments) -> None:
        self._graph, self._of = graph, of
        self._steps: dict[int, _Step] = {}
        crossing = graph.cross_step_edges
        into = zip(
            crossing.target_template.tolist(), crossing.target.tolist(), crossing.target_column.tolist(), strict=True
        )
        self._outside = {key: edge for edge, key in enumerate(into)}

    def _step(self, place: int) -> _Step:
        if place not in self._steps:
            self._steps[place] = _Step(self._graph, self._of, place)
        return self._steps[place]

    def operations(self, place: int, thread: int, moment: float = math.inf) -> Iterator[PathOperation]:
        """From the end of a thread's step, at this place in the graph, backwards, as far as is known; or from the end
        of the thread's own work that is not over at a moment."""
        step = self._step(place)
        plan, last = step.plan, int(step.plan.last[thread])
        mine = np.flatnonzero(step.structure.thread == thread)
        unfinished = mine[step.rows[plan.chain_of[mine]] + step.weights[mine] >= moment]
        last = int(unfinished[0]) if len(unfinished) else last
        at: _At | None = _At(place, int(plan.chain_of[last]), last)
        target = -1
        while at is not None:
            of = self._step(at.step)
            *later, first = self._operations(of, at, target)
            target = first.operation
            came, edge, gap = self._binding(of, at.row, target)
            yield from later
            yield replace(first, edge=edge)
            if gap is not None:
                yield gap
            at = came

    def _operations(self, of: _Step, at: _At, target: int) -> Iterator[PathOperation]:
        """What lies between the begin of a node and the end of one of its weights, last first; the first of them, whose
        edge is not known yet, comes at the end."""
        operation, number = of.operation(at.weight), int(self._graph.numbers[at.step])
        begin, structure = float(of.rows[at.row]), of.structure
        task = of.task(operation)
        if task is not None:
            rank, chain, kind = SHARED, task.lane, COMMUNICATION
            if task.kind.startswith(SEND_RECV):
                kind = MESSAGE
            if task.owner >= 0:
                rank, kind = self._graph.ranks[task.owner], COPY
            if _is_flow(task):
                thread = int(structure.thread[target]) if 0 <= target < structure.segments else 0
                rank, chain, kind = self._graph.ranks[thread], self._chain(thread), task.kind
            ms = float(of.weights[at.weight])
            name = task.kind if at.weight == operation else f"{task.kind} {ON_LINK}"
            yield PathOperation(rank, chain, kind, name, begin, ms, PROGRAM, number, operation, {kind: ms})
            return
        thread, first = int(structure.thread[operation]), int(of.plan.chain_first[operation])
        for segment in range(operation, first - 1, -1):
            before = float(of.weights[segment - 1]) if segment > first else 0.0
            work = of.steps.work[segment, of.column]
            parts = {part: float(ms) for part, ms in zip(PARTS, work.tolist(), strict=True) if ms}
            yield PathOperation(
                self._graph.ranks[thread], self._chain(thread), PARTS[int(work.argmax())],
                str(structure.action[segment]), begin + before, float(of.weights[segment]) - before, PROGRAM, number,
                segment, parts,
            )  # fmt: skip

    def _chain(self, thread: int) -> str:
        return self._graph.chain_names[thread] if self._graph.chain_names else "host"

    # --- what an operation waited for

    def _binding(self, of: _Step, row: int, target: int) -> tuple[_At | None, str, PathOperation | None]:
        """What ended when a node began; None: it is not in the graph. With the edge from it to `target`, and what lies
        between."""
        while row in of.workers:
            queued, weight, before, later = of.workers[row]
            end = of.rows[queued] + of.weights[weight]
            if (end >= of.rows[before]) == later:
                return _At(of.place, queued, weight), PROGRAM, None
            row = before
        if row < of.plan.given:
            return self._given(of, row, target)
        level = next(one for one in of.plan.levels if one.first <= row < one.last)
        source, weight = self._latest(of, level, row, target)
        if of.operation(weight) < 0:  # it has what it is given at once, such as the start of its thread
            return self._binding(of, source, target)
        return _At(of.place, source, weight), _edge(of, of.operation(weight), target), None

    def _latest(self, of: _Step, level: Level, row: int, target: int) -> tuple[int, int]:
        """The edge into a node by which it began, (row, weight)."""
        begins = [*level.begins.tolist(), len(level.sources)]
        edges = range(begins[row - level.first], begins[row - level.first + 1])
        sources, weights = level.sources[edges.start : edges.stop], level.weights[edges.start : edges.stop]
        ends = of.rows[sources] + of.weights[weights]
        near = np.flatnonzero(ends >= ends.max() - TIE_MS)
        structure = of.structure
        same = [
            i
            for i in near.tolist()
            if target < structure.segments
            and weights[i] < structure.segments
            and structure.thread[weights[i]] == structure.thread[target]
        ]
        best = same[0] if same else int(ends.argmax())
        return int(sources[best]), int(weights[best])

    def _given(self, of: _Step, row: int, target: int) -> tuple[_At | None, str, PathOperation | None]:
        """The operation of another step that supplied a row."""
        graph, threads = self._graph, of.structure.threads
        if row < threads:
            if not graph.follows[of.place]:
                return None, ACROSS, None
            before = self._step(of.place - 1)
            last = int(before.plan.last[row])
            return (
                _At(before.place, int(before.plan.chain_of[last]), last), ACROSS, self._gap(of, row, before, last),
            )  # fmt: skip
        if row < threads + of.structure.outside:
            edge = self._outside.get((of.index, row - threads, of.column))
            if edge is None:
                return None, ACROSS, None
            crossing = graph.cross_step_edges
            index, operation = int(crossing.source_template[edge]), int(crossing.source[edge])
            source = self._step(int(graph.columns_of(index)[crossing.source_column[edge]]))
            at = _At(source.place, *_end_of(source.plan, operation, source.structure.segments))
            return at, _edge(source, operation, target, of), None
        lane, worker = divmod(row - threads - of.structure.outside, 2)
        name, place = of.structure.lanes[lane], of.place
        while graph.follows[place]:
            place -= 1
            before = self._step(place)
            if name in before.structure.lanes:
                state = 2 * before.structure.lanes.index(name) + worker
                freed, weight = int(before.plan.lane_ends[state]), int(before.plan.lane_weights[state])
                if before.operation(weight) >= 0:
                    return _At(place, freed, weight), PROGRAM, None
                came, _, gap = self._binding(before, freed, -1)
                return came, PROGRAM, gap
        return None, ACROSS, None

    def _gap(self, of: _Step, thread: int, before: _Step, last: int) -> PathOperation | None:
        ms = float(self._graph.gap[thread, of.place])
        if not ms:
            return None
        begin = float(before.rows[before.plan.chain_of[last]] + before.weights[last])
        rank, number = self._graph.ranks[thread], int(self._graph.numbers[of.place])
        return PathOperation(rank, self._chain(thread), GAP, "", begin, ms, ACROSS, number, parts={GAP: ms})


def _end_of(plan: Plan, operation: int, segments: int) -> tuple[int, int]:
    """The node and the weight whose end is that of an operation."""
    if operation < segments:
        return int(plan.chain_of[operation]), operation
    return int(plan.task_row[operation - segments]), int(plan.task_weight[operation - segments])


def _is_flow(task: Task) -> bool:
    return task.kind in (LAUNCH, SYNC, DEPENDS, STEP)


def _edge(of: _Step, source: int, target: int, into: _Step | None = None) -> str:
    """What an edge is, from operation to operation; into: the step of `target`, where it is another one."""
    giver, taker = of.task(source), (into or of).task(target)
    if giver is not None and taker is not None:
        return PROGRAM
    task = giver or taker
    if task is None:
        return PROGRAM
    if _is_flow(task):
        return task.kind
    if task.owner >= 0:
        return LAUNCH if giver is None else SYNC
    if giver is not None:
        return WAIT
    return MESSAGE if task.kind.startswith(SEND_RECV) else JOIN
