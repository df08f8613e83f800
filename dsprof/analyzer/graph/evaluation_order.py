"""In which order the operations of a step are evaluated: nodes, the edges between them, their levels, rows.

A node is a chain (segments of a thread of which only the first waits for something), a task's start, or, of a task that
has the link of its lane to itself at its end, when it gets it. A negative source of an edge is a given row: -1 - row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..arrays import Bool, Int, places
from .longest_path import Level, Plan

Edge = tuple[Int, Int, Int]
"""Source node, row of the weight that the edge adds, target node."""


class Cyclic(Exception):
    """Operations that wait for one another: no order of them is possible."""


def make_plan(
    threads: int, thread: Int, lane: Int, workers: tuple[int, ...], linked: Bool, outside: int, source: Int, target: Int
) -> Plan:
    """Order the operations of a step. Raises Cyclic where they wait for one another.

    thread:  [W] of each segment, ascending; the segments of a thread follow one another
    lane:    [C] of each task, -1: none; the tasks of a lane are in the order in which it takes them
    workers: of each lane, 1 or 2
    linked:  [C] whether the task holds the link of its lane to itself at its end
    outside: how many ends of other steps are given
    source, target: of each edge; segments, then tasks, then what is given from outside
    """
    nodes = _Nodes(threads, thread, lane, workers, linked, outside, target)
    edges = nodes.edges(source, target)
    # A queued task depends on the one before it, by whose end the earlier worker is known.
    after = np.array([pair for pair in nodes.queues.items() if pair[1] >= 0], np.int64).reshape(-1, 2)
    depends = np.append(edges[0], nodes.end[after[:, 1]]), np.append(edges[2], nodes.chains + after[:, 0])
    rows = _Rows(nodes, _levels(nodes.count, *depends))
    return Plan(
        given=nodes.given,
        rows=rows.count,
        levels=rows.levels(edges),
        chain_of=rows.of_node[nodes.chain],
        chain_first=nodes.heads[nodes.chain],
        task_row=rows.of_node[nodes.end],
        task_weight=nodes.end_weight,
        last=np.searchsorted(thread, np.arange(threads), "right") - 1,
        lane_ends=rows.lane_ends[0],
        lane_weights=rows.lane_ends[1],
        edges=len(edges[0]) + len(nodes.queues),
    )


class _Nodes:
    """chain: [W] of each segment, the node; heads: [chains] its first segment
    end, end_weight: [C] from which node, and with which weight, each task's end follows
    zero:  row of the weight that adds nothing
    given: rows that come from outside: starts of threads, ends in other steps, and from `lane_row` on two a lane, when
           its earlier and its later worker are free
    """

    def __init__(
        self, threads: int, thread: Int, lane: Int, workers: tuple[int, ...], linked: Bool, outside: int, target: Int
    ) -> None:
        self.segments, self.tasks = len(thread), len(lane)
        self.threads, self.thread = threads, thread
        self.lane, self.workers, self.linked = lane, workers, linked
        self.lane_row = threads + outside
        self.given = self.lane_row + 2 * len(workers)
        self.first_of_thread = np.ones(self.segments, bool)
        self.first_of_thread[1:] = thread[1:] != thread[:-1]
        head = self.first_of_thread.copy()
        head[target[target < self.segments]] = True
        self.chain: Int = np.cumsum(head) - 1
        self.heads = np.flatnonzero(head)
        self.chains = len(self.heads)
        self.wired = np.flatnonzero(linked)
        self.wire = np.full(self.tasks, -1, np.int64)
        self.wire[self.wired] = self.chains + self.tasks + np.arange(len(self.wired))
        self.count = self.chains + self.tasks + len(self.wired)
        every, self.zero = np.arange(self.tasks), self.segments + 2 * self.tasks
        self.end = np.where(linked, self.wire, self.chains + every)
        self.end_weight = np.where(linked, self.segments + self.tasks + every, self.segments + every)

    def of_lane(self, index: int) -> Int:
        """The tasks of a lane, in its order."""
        return np.flatnonzero(self.lane == index)

    @cached_property
    def queues(self) -> dict[int, int]:
        """Task of a lane with two workers, in order -> the one before it there; -1 - the lane: it is the first."""
        found: dict[int, int] = {}
        for index, count in enumerate(self.workers):
            if count > 1:
                mine = self.of_lane(index).tolist()
                found |= dict(zip(mine, [-1 - index, *mine[:-1]], strict=False))
        return dict(sorted(found.items()))

    def edges(self, source: Int, target: Int) -> Edge:
        """All of them. source, target: operations."""
        found = [
            self._given_edges(source, target),
            self._program_order(),
            (self.chains + self.wired, self.segments + self.wired, self.wire[self.wired]),
            *self._lane_order(),
        ]
        arrived = np.zeros(self.count, bool)
        arrived[np.concatenate([edge[2] for edge in found])] = True
        alone = np.flatnonzero(~arrived)  # a task nobody was seen to issue begins with the step
        found.append((np.full(len(alone), -1), np.full(len(alone), self.zero), alone))
        of_source, weight, of_target = (np.concatenate([edge[i] for edge in found]) for i in range(3))
        return of_source, weight, of_target

    def _given_edges(self, source: Int, target: Int) -> Edge:
        node, weight = np.empty(len(source), np.int64), np.empty(len(source), np.int64)
        of_thread, outside = source < self.segments, source >= self.segments + self.tasks
        of_task = ~of_thread & ~outside
        node[of_thread], weight[of_thread] = self.chain[source[of_thread]], source[of_thread]
        task = source[of_task] - self.segments
        node[of_task], weight[of_task] = self.end[task], self.end_weight[task]
        node[outside] = -1 - (self.threads + source[outside] - self.segments - self.tasks)
        weight[outside] = self.zero
        into = np.where(target < self.segments, self.chain[np.minimum(target, self.segments - 1)], 0)
        to_task = target >= self.segments
        into[to_task] = self.chains + target[to_task] - self.segments
        return node, weight, into

    def _program_order(self) -> Edge:
        """From chain to chain of a thread; the first begins with the thread."""
        begins = self.first_of_thread[self.heads]
        before = self.heads - 1
        source = np.where(begins, -1 - self.thread[self.heads], self.chain[before])
        return source, np.where(begins, self.zero, before), self.chain[self.heads]

    def _lane_order(self) -> list[Edge]:
        """One worker takes a task when the one before is over; the link of a lane is had one after the other."""
        found = []
        for index, count in enumerate(self.workers):
            mine = self.of_lane(index)
            if count == 1 and len(mine):
                free = np.array([-1 - (self.lane_row + 2 * index + 1)])
                source = np.concatenate([free, self.end[mine[:-1]]])
                found.append((source, np.append(self.zero, self.end_weight[mine[:-1]]), self.chains + mine))
            linked = mine[self.linked[mine]]
            found.append((self.wire[linked[:-1]], self.segments + self.tasks + linked[:-1], self.wire[linked[1:]]))
        return found


@dataclass(frozen=True)
class _Band:
    """The rows of one level, `first` to `last`, and the queued tasks whose ends they tell."""

    first: int
    last: int
    queued: Int


class _Rows:
    """Rows of nodes, level by level, each followed by those of the two workers after each queued task of the level.

    of_node: [nodes]; later, earlier: [C] of the workers after a queued task
    """

    def __init__(self, nodes: _Nodes, level: Int) -> None:
        self._nodes = nodes
        self.of_node = np.empty(nodes.count, np.int64)
        self.later, self.earlier = np.full(nodes.tasks, -1, np.int64), np.full(nodes.tasks, -1, np.int64)
        queued_end = {int(nodes.end[task]): task for task in nodes.queues}
        order = np.argsort(level, kind="stable")
        self._bands: list[_Band] = []
        at, position = nodes.given, 0
        for count in np.bincount(level, minlength=1).tolist():
            members = order[position : position + count]
            position += count
            self.of_node[members] = at + np.arange(count)
            queued = np.array([queued_end[node] for node in members.tolist() if node in queued_end], np.int64)
            self._bands.append(_Band(at, at + count, queued))
            at += count
            self.later[queued] = at + 2 * np.arange(len(queued))
            self.earlier[queued] = self.later[queued] + 1
            at += 2 * len(queued)
        self.count = at

    def _worker_before(self, of: Int, given: int) -> Int:
        """Row of one of the workers before each queued task: `of` the task before, or of its lane as it was given."""
        before = np.array(list(self._nodes.queues.values()), np.int64)
        return np.where(before >= 0, of[np.maximum(before, 0)], self._nodes.lane_row + 2 * (-1 - before) + given)

    def levels(self, edges: Edge) -> tuple[Level, ...]:
        nodes, queued = self._nodes, np.array(list(self._nodes.queues), np.int64)
        source, weight, target = edges
        from_row = np.where(source >= 0, self.of_node[np.maximum(source, 0)], -1 - source)
        from_row = np.append(from_row, self._worker_before(self.earlier, 0))
        added = np.append(weight, np.full(len(queued), nodes.zero))
        into = np.append(self.of_node[target], self.of_node[nodes.chains + queued])
        order = np.argsort(into, kind="stable")
        from_row, added, into = from_row[order], added[order], into[order]
        before = np.full(nodes.tasks, -1, np.int64)
        before[queued] = self._worker_before(self.later, 1)
        found = []
        for band in self._bands:
            low, high = np.searchsorted(into, [band.first, band.last])
            begins = np.searchsorted(into[low:high], np.arange(band.first, band.last))
            here = band.queued
            found.append(
                Level(
                    band.first, band.last, from_row[low:high], added[low:high], begins,
                    self.of_node[nodes.end[here]], nodes.end_weight[here], before[here],
                    self.later[here], self.earlier[here],
                )
            )  # fmt: skip
        return tuple(found)

    @cached_property
    def lane_ends(self) -> tuple[Int, Int]:
        """Row from which each lane's state after the step follows, two a lane, and the row of the weight it adds."""
        nodes = self._nodes
        ends = nodes.lane_row + np.arange(2 * len(nodes.workers))
        weights = np.full(len(ends), nodes.zero)
        for index, count in enumerate(nodes.workers):
            mine, state = nodes.of_lane(index), slice(2 * index, 2 * index + 2)
            if len(mine) and count == 2:
                ends[state] = self.earlier[mine[-1]], self.later[mine[-1]]
            elif len(mine):
                ends[state], weights[state] = self.of_node[nodes.end[mine[-1]]], nodes.end_weight[mine[-1]]
        return ends, weights


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
        reached = target[places(begin[frontier], counts)]
        np.subtract.at(missing, reached, 1)
        reached = np.unique(reached)
        frontier, depth = reached[missing[reached] == 0], depth + 1
    if done < nodes:
        raise Cyclic
    return level
