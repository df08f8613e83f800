"""Longest paths through the operations of steps of one template, for many steps and variants at once.

What begins when the last of several others has ended is a node; what merely follows one other is part of that one's
chain, at a distance known beforehand (a prefix sum). Nodes are evaluated level by level: all nodes of a level over all
columns in one numpy call. Where that is too few numbers for a call to pay, a plain loop does the same.

A lane with two workers takes its tasks in order: each begins when it has all it needs and the first of the workers is
free. That is no longest path, but a minimum over two ends, which is evaluated beside the task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ..arrays import Float, Int

NEVER: Final = -1e18
"""ms: before anything."""
NARROW: Final = 24
"""Numbers a level below which the plain loop is faster: a numpy call costs as much as about so many turns of it."""


@dataclass(frozen=True)
class Level:
    """Nodes that depend on earlier levels only: rows `first` to `last`.

    sources, weights: of each edge into them, the row it comes from and the row of the weights that it adds
    begins:    index of each node's first edge
    queued:    of the tasks among them that a lane of two workers runs: their row, and the row of their weight
    before:    the later of the two workers' ends before each; `later`, `earlier`: rows of the two after it
    """

    first: int
    last: int
    sources: Int
    weights: Int
    begins: Int
    queued: Int
    queued_weights: Int
    before: Int
    later: Int
    earlier: Int


@dataclass(frozen=True)
class Plan:
    """In which order operations are evaluated.

    given:     rows that come from outside: a start of each thread, the ends of what happens in other steps, and for
               each lane when its earlier and its later worker are free
    rows:      how many there are in all
    chain_of:  [W] row of each segment's chain; `chain_first`: [W] the chain's first segment
    task_row:  [C] row of each task's start; `task_weight`: row of the weights from there to its end
    last:      [threads] the last segment of each thread
    lane_ends: [2 * lanes] row from which each lane's state after the step is known; `lane_weights`: of what it adds
    edges:     how many there are
    """

    given: int
    rows: int
    levels: tuple[Level, ...]
    chain_of: Int
    chain_first: Int
    task_row: Int
    task_weight: Int
    last: Int
    lane_ends: Int
    lane_weights: Int
    edges: int

    def evaluate(self, given: Float, weights: Float) -> Float:
        """The rows, [rows, columns]: when each node begins.

        given:   [given, columns]
        weights: [segments + 2 * tasks + 1, columns]: from a chain's start to each segment's end; the duration of each
                 task; its time on the link of its group, after that; a zero.
        """
        columns = given.shape[1]
        if self.levels and self.edges * columns < NARROW * len(self.levels):
            return self._evaluate_by_loop(given, weights)
        rows = np.empty((self.rows, columns))
        rows[: self.given] = given
        for level in self.levels:
            reached = rows[level.sources]
            reached += weights[level.weights]
            if len(level.begins) == len(level.sources):
                rows[level.first : level.last] = reached
            else:
                np.maximum.reduceat(reached, level.begins, axis=0, out=rows[level.first : level.last])
            if len(level.queued):
                end = rows[level.queued]
                end += weights[level.queued_weights]
                before = rows[level.before]
                rows[level.later] = np.maximum(before, end)
                rows[level.earlier] = np.minimum(before, end)
        return rows

    def _evaluate_by_loop(self, given: Float, weights: Float) -> Float:
        rows = np.empty((self.rows, given.shape[1]))
        steps = [
            (
                level.first,
                level.sources.tolist(),
                level.weights.tolist(),
                [*level.begins.tolist(), len(level.sources)],
                list(zip(*(values.tolist() for values in (
                    level.queued, level.queued_weights, level.before, level.later, level.earlier
                )), strict=True)),
            )
            for level in self.levels
        ]  # fmt: skip
        for column in range(given.shape[1]):
            value = given[:, column].tolist() + [0.0] * (self.rows - self.given)
            weight = weights[:, column].tolist()
            for first, sources, added, begins, queued in steps:
                for i in range(len(begins) - 1):
                    value[first + i] = max(
                        value[sources[edge]] + weight[added[edge]] for edge in range(begins[i], begins[i + 1])
                    )
                for task, of_task, before, later, earlier in queued:
                    end = value[task] + weight[of_task]
                    other = value[before]
                    value[later], value[earlier] = (end, other) if end > other else (other, end)
            rows[:, column] = value
        return rows
