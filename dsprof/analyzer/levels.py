"""Longest paths through the operations of like-shaped steps, for many steps and variants at once.

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
import numpy.typing as npt

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]

NEVER: Final = -1e18
"""ms: before anything."""
NARROW: Final = 24
"""Numbers a level below which the plain loop is faster: a numpy call costs as much as about so many turns of it."""


class Cyclic(Exception):
    """Operations that wait for one another: no order of them is possible."""


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


def make_plan(
    threads: int,
    thread: Int,
    lane: Int,
    workers: tuple[int, ...],
    linked: npt.NDArray[np.bool_],
    outside: int,
    source: Int,
    target: Int,
) -> Plan:
    """Order the operations of a step. Raises Cyclic where they wait for one another.

    thread:  [W] of each segment, ascending; the segments of a thread follow one another
    lane:    [C] of each task, -1: none; the tasks of a lane are in the order in which it takes them
    workers: of each lane, 1 or 2
    linked:  [C] whether the task holds the link of its lane to itself at its end
    outside: how many ends of other steps are given
    source, target: of each edge; segments, then tasks, then what is given from outside
    """
    segments, tasks, lanes = len(thread), len(lane), len(workers)
    given = threads + outside + 2 * lanes
    # --- chains: a segment that waits for something begins one
    head = np.ones(segments, bool)
    head[1:] = thread[1:] != thread[:-1]
    first_of_thread = head.copy()
    head[target[target < segments]] = True
    chain = np.cumsum(head) - 1
    heads = np.flatnonzero(head)
    chains = len(heads)
    # Nodes: chains, tasks, then for linked tasks the time on the link.
    wired = np.flatnonzero(linked)
    wire_node = np.full(tasks, -1, np.int64)
    wire_node[wired] = chains + tasks + np.arange(len(wired))
    nodes = chains + tasks + len(wired)
    zero = segments + 2 * tasks
    end_node = np.where(linked, wire_node, chains + np.arange(tasks))
    end_weight = np.where(linked, segments + tasks + np.arange(tasks), segments + np.arange(tasks))

    def node_and_weight(operation: Int) -> tuple[Int, Int]:
        """The node an edge from `operation` comes from (negative: -1 - the given row), and its weight."""
        node, weight = np.empty(len(operation), np.int64), np.empty(len(operation), np.int64)
        of_thread, of_task = operation < segments, (operation >= segments) & (operation < segments + tasks)
        node[of_thread], weight[of_thread] = chain[operation[of_thread]], operation[of_thread]
        task = operation[of_task] - segments
        node[of_task], weight[of_task] = end_node[task], end_weight[task]
        rest = ~of_thread & ~of_task
        node[rest], weight[rest] = -1 - (threads + operation[rest] - segments - tasks), zero
        return node, weight

    from_node, weight = node_and_weight(source)
    to_node = np.where(target < segments, chain[np.minimum(target, segments - 1)], 0)
    of_task = target >= segments
    to_node[of_task] = chains + target[of_task] - segments
    edges = [(from_node, weight, to_node)]
    # Program order, and where each thread starts.
    follows = heads[~first_of_thread[heads]]
    edges.append((chain[follows - 1], follows - 1, chain[follows]))
    begins = heads[first_of_thread[heads]]
    edges.append((-1 - thread[begins], np.full(len(begins), zero), chain[begins]))
    # From a linked task to its time on the link.
    edges.append((chains + wired, segments + wired, wire_node[wired]))
    # Lanes.
    lane_row = threads + outside
    pairs: dict[int, tuple[int, int]] = {}  # task -> (lane, the task before it or -1)
    for index, count in enumerate(workers):
        mine = np.flatnonzero(lane == index)
        before = np.concatenate([[-1], mine[:-1]]).astype(np.int64) if len(mine) else mine
        if count == 1:
            rest = before >= 0
            edges.append((end_node[before[rest]], end_weight[before[rest]], chains + mine[rest]))
            if len(mine):
                start = np.array([-1 - (lane_row + 2 * index + 1)])
                edges.append((start, np.array([zero]), chains + mine[:1]))
        else:
            for task, previous in zip(mine.tolist(), before.tolist(), strict=True):
                pairs[task] = (index, previous)
        on_link = mine[linked[mine]]
        if len(on_link) > 1:
            edges.append((wire_node[on_link[:-1]], segments + tasks + on_link[:-1], wire_node[on_link[1:]]))
    arrived = np.zeros(nodes, bool)
    arrived[np.concatenate([edge[2] for edge in edges])] = True
    alone = np.flatnonzero(~arrived)  # a task nobody was seen to issue begins with the step
    edges.append((np.full(len(alone), -1), np.full(len(alone), zero), alone))
    # A queued task depends on the one before it, by whose end the earlier worker is known.
    after = [(previous, task) for task, (_, previous) in pairs.items() if previous >= 0]
    ordered = np.array(after, np.int64).reshape(-1, 2)
    depends = (
        np.concatenate([*(edge[0] for edge in edges), end_node[ordered[:, 0]]]),
        np.concatenate([*(edge[2] for edge in edges), chains + ordered[:, 1]]),
    )
    level = _levels(nodes, *depends)
    # --- rows, level by level: its nodes, then the two workers after each queued task
    queue_node = {int(end_node[task]): task for task in pairs}
    order = np.argsort(level, kind="stable")
    row = np.empty(nodes, np.int64)
    later, earlier = np.full(tasks, -1, np.int64), np.full(tasks, -1, np.int64)
    counts = np.bincount(level, minlength=1)
    at, bounds, position = given, [], 0
    for count in counts.tolist():
        members = order[position : position + count]
        position += count
        row[members] = at + np.arange(count)
        bounds.append((at, at + count, [queue_node[node] for node in members.tolist() if node in queue_node]))
        at += count
        for task in bounds[-1][2]:
            later[task], earlier[task] = at, at + 1
            at += 2
    every = [np.concatenate([edge[i] for edge in edges]) for i in range(3)]
    queued = np.array(sorted(pairs), np.int64)
    before_later = np.array(
        [later[p] if p >= 0 else lane_row + 2 * i + 1 for i, p in (pairs[task] for task in queued.tolist())], np.int64
    )
    before_earlier = np.array(
        [earlier[p] if p >= 0 else lane_row + 2 * i for i, p in (pairs[task] for task in queued.tolist())], np.int64
    )
    of_node = every[0] >= 0
    from_row = np.concatenate([np.where(of_node, row[np.where(of_node, every[0], 0)], -1 - every[0]), before_earlier])
    added = np.concatenate([every[1], np.full(len(queued), zero)])
    into = np.concatenate([row[every[2]], row[chains + queued]])
    by_target = np.argsort(into, kind="stable")
    from_row, added, into = from_row[by_target], added[by_target], into[by_target]
    levels = []
    previous_later = dict(zip(queued.tolist(), before_later.tolist(), strict=True))
    for first, last, members_queued in bounds:
        low, high = np.searchsorted(into, [first, last])
        begins_at = np.searchsorted(into[low:high], np.arange(first, last))
        here = np.array(members_queued, np.int64)
        levels.append(
            Level(
                first, last, from_row[low:high], added[low:high], begins_at,
                row[end_node[here]], end_weight[here], np.array([previous_later[t] for t in members_queued], np.int64),
                later[here], earlier[here],
            )
        )  # fmt: skip
    lane_ends, lane_weights = lane_row + np.arange(2 * lanes), np.full(2 * lanes, zero)
    for index, count in enumerate(workers):
        mine = np.flatnonzero(lane == index)
        state = slice(2 * index, 2 * index + 2)
        if len(mine) and count == 2:
            lane_ends[state] = earlier[mine[-1]], later[mine[-1]]
        elif len(mine):
            lane_ends[state], lane_weights[state] = row[end_node[mine[-1]]], end_weight[mine[-1]]
    return Plan(
        given=given,
        rows=at,
        levels=tuple(levels),
        chain_of=row[chain],
        chain_first=heads[chain],
        task_row=row[end_node],
        task_weight=end_weight,
        last=np.searchsorted(thread, np.arange(threads), "right") - 1,
        lane_ends=lane_ends,
        lane_weights=lane_weights,
        edges=len(from_row),
    )


def _levels(nodes: int, source: Int, target: Int) -> Int:
    """Length of the longest way to each node. Edges from negative sources count for nothing."""
    inner = source >= 0
    source, target = source[inner], target[inner]
    order = np.argsort(source, kind="stable")
    source, target = source[order], target[order]
    begin = np.searchsorted(source, np.arange(nodes + 1))
    missing = np.bincount(target, minlength=nodes)
    level = np.zeros(nodes, np.int64)
    frontier, depth, done = np.flatnonzero(missing == 0), 0, 0
    while len(frontier):
        level[frontier] = depth
        done += len(frontier)
        counts = begin[frontier + 1] - begin[frontier]
        offsets = np.repeat(begin[frontier] - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
        reached = target[offsets + np.arange(int(counts.sum()))]
        np.subtract.at(missing, reached, 1)
        reached = np.unique(reached)
        frontier, depth = reached[missing[reached] == 0], depth + 1
    if done < nodes:
        raise Cyclic
    return level
