"""Replay: how long the steps of a graph take, each operation beginning when the last that it depends on has ended.

Like-shaped steps are evaluated together, each from when its threads begin it and from what other steps supply. Those
are known when the other steps have been evaluated: so they are swept until nothing changes, which takes as many sweeps
as steps that a delay reaches through. Graphs that differ in their costs only are evaluated together too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ..arrays import Float, Int
from .longest_path import NEVER
from .step_graph import Costs, StepGraph, Steps

SETTLED: Final = 1e-9
"""Of the mean step: what moves by less between two sweeps has settled."""
MOST_NUMBERS: Final = 500_000
"""Evaluated at once: 4 MB of them, and several arrays of as many; a graph of more is replayed by itself."""


@dataclass(frozen=True)
class Replayed:
    """start, end: [T, N] of each thread's step, ms from the first step's start (of each stretch of steps that follow
    one another); `judged`: [N]; `leads`: how many of the threads lead a rank, the first ones."""

    start: Float
    end: Float
    judged: npt.NDArray[np.bool_]
    leads: int

    @property
    def durations(self) -> Float:
        """Of the judged steps, ms, mean over ranks, [S]."""
        mean: Float = (self.end - self.start)[: self.leads, self.judged].mean(axis=0)
        return mean


def replay(graph: StepGraph) -> Replayed:
    """Raises `evaluation_order.Cyclic`."""
    return replay_all([graph])[0]


def replay_all(graphs: Iterable[StepGraph]) -> list[Replayed]:
    """Each of `graphs`, in order; neighbours that differ in costs only, together. Raises `evaluation_order.Cyclic`.

    Of graphs that are made one by one, such as by a generator, only what they weigh is kept meanwhile.
    """
    found: list[Replayed] = []
    first: StepGraph | None = None
    weights: list[list[Float]] = []
    for graph in graphs:
        if first is not None and not _same_structure(first, graph):
            found += _Sweeps(first, weights).run()
            first, weights = None, []
        first = first or _without_costs(graph)
        weights.append([weights_of(steps) for steps in graph.templates])
        if len(weights) * graph.operations >= MOST_NUMBERS:
            found += _Sweeps(first, weights).run()
            first, weights = None, []
        del graph  # before the next one is made: of many ranks each is large, as are its weights
    return found + (_Sweeps(first, weights).run() if first is not None else [])


@dataclass(frozen=True)
class Moments:
    """When every node of a replayed graph begins. Of each template, rows: [plan.rows, S], weights: what `Plan.evaluate`
    took, both in ms, from `reference`, [N], of their step; start, end: [T, N] of each thread's step, from that too."""

    rows: tuple[Float, ...]
    weights: tuple[Float, ...]
    reference: Float
    start: Float
    end: Float


def moments(graph: StepGraph) -> Moments:
    """Replay a graph, and keep when everything in it begins. Raises `evaluation_order.Cyclic`."""
    sweeps = _Sweeps(graph, [[weights_of(steps) for steps in graph.templates]])
    sweeps.run()
    weights = tuple(of[:, 0] for of in sweeps.weights)
    return Moments(tuple(sweeps.moments()), weights, sweeps.reference[0], sweeps.start[:, 0], sweeps.end[:, 0])


def _without_costs(graph: StepGraph) -> StepGraph:
    """The graph, of which what operations take is in weights now."""
    nothing = np.empty(0)
    costs = Costs(nothing, nothing, nothing, nothing)
    return graph.with_templates(tuple(replace(steps, costs=costs) for steps in graph.templates))


def _same_structure(one: StepGraph, other: StepGraph) -> bool:
    return (
        one.cross_step_edges is other.cross_step_edges
        and len(one.templates) == len(other.templates)
        and all(a.structure is b.structure for a, b in zip(one.templates, other.templates, strict=True))
    )


class _Sweeps:
    """V graphs of one structure, evaluated together: the first, and `weights_of` every template of each. Inside a
    template, moments are from `reference` of their step."""

    def __init__(self, graph: StepGraph, weights: Sequence[Sequence[Float]]) -> None:
        self.graph = graph
        self.count = count = len(weights)
        self.columns = [graph.columns_of(index) for index in range(len(graph.templates))]
        self.weights = [_side_by_side([of[index] for of in weights]) for index in range(len(graph.templates))]
        steps = graph.start.shape[1]
        self.start = np.repeat(graph.start[:, None], count, axis=1)  # [T, V, N]
        self.end = self.start + graph.duration[:, None]
        self.outside = [np.repeat(template.outside[:, None], count, axis=1) for template in graph.templates]
        names = dict.fromkeys(lane for template in graph.templates for lane in template.structure.lanes)
        lanes = {lane: place for place, lane in enumerate(names)}
        self.lanes_of = [
            np.array([2 * lanes[lane] + i for lane in template.structure.lanes for i in (0, 1)], np.int64)
            for template in graph.templates
        ]
        self.free = np.full((2 * len(lanes), count, steps), NEVER)  # when each lane's workers are, at the start
        self.left = self.free.copy()  # and at the end
        self.reference = np.zeros((count, steps))
        self._rows: list[Float | None] = [None] * len(graph.templates)
        self._followers = np.flatnonzero(graph.follows)

    def run(self) -> list[Replayed]:
        graph = self.graph
        tolerance = SETTLED * max(float(graph.duration.mean()), 1e-9) if graph.duration.size else 0.0
        changed = np.ones(len(graph.numbers), bool)
        for _ in range(len(graph.numbers) + 2):
            for index, columns in enumerate(self.columns):
                moved = np.flatnonzero(changed[columns])
                if 2 * len(moved) > len(columns):  # to pick most of them out costs more than the rest
                    moved = np.arange(len(columns))
                if len(moved):
                    self._evaluate(index, moved)
            changed = self._pass_on(tolerance)
            if not changed.any():
                break
        start, end = self.start + self.reference, self.end + self.reference
        return [Replayed(start[:, v], end[:, v], graph.judged, graph.leads) for v in range(self.count)]

    def moments(self) -> list[Float]:
        """Of each template, after `run`: when its nodes begin, [plan.rows, S], of the first graph, each step's from its
        own reference."""
        found = []
        for index, (steps, columns) in enumerate(zip(self.graph.templates, self.columns, strict=True)):
            lanes = self.lanes_of[index]
            parts = self.start[:, 0, columns], self.outside[index][:, 0], self.free[lanes][:, 0, columns]
            found.append(steps.structure.plan.evaluate(np.concatenate(parts), self.weights[index][:, 0]))
        return found

    def _evaluate(self, index: int, moved: Int) -> None:
        """Evaluate these of the template's columns."""
        graph, template = self.graph, self.graph.templates[index]
        plan, columns = template.structure.plan, self.columns[index][moved]
        lanes = self.lanes_of[index]
        parts = (self.start, columns), (self.outside[index], moved), (self.free[lanes], columns)
        given = np.concatenate([of.take(chosen, axis=-1) for of, chosen in parts])
        weights = (
            self.weights[index] if len(moved) == len(template.numbers) else self.weights[index].take(moved, axis=-1)
        )
        flat = (-1, self.count * len(moved))
        rows = plan.evaluate(given.reshape(flat), weights.reshape(flat)).reshape(plan.rows, self.count, len(moved))
        self.end[..., columns] = rows[plan.chain_of[plan.last]] + weights[plan.last]
        self.left[..., columns] = self.free[..., columns]
        if len(lanes):
            state = rows[plan.lane_ends] + weights[plan.lane_weights]
            for row, lane in enumerate(lanes.tolist()):
                self.left[lane][:, columns] = state[row]
        if len(graph.cross_step_edges):
            whole = self._rows[index]
            if whole is None:
                whole = self._rows[index] = np.empty((plan.rows, self.count, len(template.numbers)))
            whole[..., moved] = rows

    def _pass_on(self, tolerance: float) -> npt.NDArray[np.bool_]:
        """Give each step what the others supply now; which steps it changed for."""
        graph = self.graph
        changed = np.zeros(len(graph.numbers), bool)
        # A step begins where the one before it ended: how far that is from the one before's own reference...
        at = self._followers
        if len(at):
            begins = self.end[..., at - 1] + graph.gap[:, None, at]
            earliest = begins.min(axis=0)
            begins -= earliest
            changed[at] |= (np.abs(begins - self.start[..., at]) > tolerance).any(axis=(0, 1))
            self.start[..., at] = begins
            if len(self.free):
                free = np.maximum(self.left[..., at - 1] - earliest, NEVER)
                # What was free before the step began is free, whenever that was.
                was, now = np.maximum(self.free[..., at], 0), np.maximum(free, 0)
                changed[at] |= (np.abs(now - was) > tolerance).any(axis=(0, 1))
                self.free[..., at] = free
            # ... and so the references, one after the other.
            step = np.zeros_like(self.reference)
            step[:, at] = earliest
            total = np.cumsum(step, axis=1)
            begin = np.where(graph.follows, 0, np.arange(len(graph.numbers)))
            self.reference = total - total[:, np.maximum.accumulate(begin)]
        cross_step_edges = graph.cross_step_edges
        for index in range(len(graph.templates)):
            into = np.flatnonzero(cross_step_edges.target_template == index)
            if not len(into):
                continue
            columns, row = cross_step_edges.target_column[into], cross_step_edges.target[into]
            value = np.empty((len(into), self.count))
            for other in np.unique(cross_step_edges.source_template[into]):
                chosen = cross_step_edges.source_template[into] == other
                value[chosen] = self._ends(int(other), into[chosen])
            value -= self.reference[:, self.columns[index][columns]].T
            before = self.outside[index][row, :, columns]
            moved = (np.abs(value - before) > tolerance).any(axis=1)
            changed[self.columns[index][columns[moved]]] = True
            self.outside[index][row, :, columns] = value
        return changed

    def _ends(self, index: int, crossing: Int) -> Float:
        """When the operations that these cross_step_edges come from end, from the stretch's first reference, [:, V]."""
        plan, structure = self.graph.templates[index].structure.plan, self.graph.templates[index].structure
        operation, column = (
            self.graph.cross_step_edges.source[crossing],
            self.graph.cross_step_edges.source_column[crossing],
        )
        rows = self._rows[index]
        assert rows is not None
        is_task = operation >= structure.segments
        row, weight = plan.chain_of[np.where(is_task, 0, operation)], operation.copy()
        task = operation[is_task] - structure.segments
        row[is_task], weight[is_task] = plan.task_row[task], plan.task_weight[task]
        end: Float = rows[row, :, column] + self.weights[index][weight, :, column]
        return end + self.reference[:, self.columns[index][column]].T


def _side_by_side(weights: Sequence[Float]) -> Float:
    """[.., V, S]. One alone is not copied: of many ranks it is large."""
    return np.stack(weights, axis=1) if len(weights) > 1 else weights[0][:, None]


def weights_of(steps: Steps) -> Float:
    """What `longest_path.Plan.evaluate` takes, [segments + 2 * tasks + 1, S]."""
    structure = steps.structure
    first = structure.plan.chain_first
    segments, tasks = structure.segments, len(structure.tasks)
    found = np.zeros((segments + 2 * tasks + 1, len(steps.numbers)))
    total = found[:segments]  # of many ranks there is not room for many such tables
    for part in range(steps.costs.given.shape[-1]):
        total += steps.costs.of_part(part)
    np.cumsum(total, axis=0, out=total)
    before = total[first - 1]
    before[first == 0] = 0.0
    total -= before
    found[segments : segments + tasks] = steps.transfer
    found[segments + tasks : -1] = steps.wire
    return found
