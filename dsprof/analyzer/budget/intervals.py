"""Sets of disjoint time intervals, and how much of one lies before a moment: the arithmetic of every breakdown."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..arrays import Bool, Int


@dataclass(frozen=True, slots=True)
class Intervals:
    """Sorted, disjoint, half-open [start, end) in ns."""

    start: Int
    end: Int

    @staticmethod
    def union(start: Int, end: Int) -> Intervals:
        """The union of arbitrary intervals; those without length vanish."""
        keep = end > start
        start, end = start[keep], end[keep]
        order = np.argsort(start, kind="stable")
        start, reach = start[order], np.maximum.accumulate(end[order]) if len(end) else end
        opens = np.ones(len(start), bool)
        opens[1:] = start[1:] > reach[:-1]
        closes = np.append(opens[1:], True)[: len(opens)]
        return Intervals(start[opens], reach[closes])

    @staticmethod
    def empty() -> Intervals:
        nothing = np.empty(0, np.int64)
        return Intervals(nothing, nothing)

    def __or__(self, other: Intervals) -> Intervals:
        if not len(self.start) or not len(other.start):
            return self if len(self.start) else other
        return Intervals.union(np.concatenate([self.start, other.start]), np.concatenate([self.end, other.end]))

    def __sub__(self, other: Intervals) -> Intervals:
        """What of this set is not in `other`."""
        if not len(self.start) or not len(other.start):
            return self
        edges = np.sort(np.concatenate([self.start, self.end, other.start, other.end]))
        edges = edges[np.append(True, edges[1:] != edges[:-1])[: len(edges)]]  # np.unique takes three times as long
        if len(edges) < 2:
            return self
        mine, theirs = np.diff(self.before(edges)) > 0, np.diff(other.before(edges)) > 0
        keep = mine & ~theirs
        return Intervals.union(edges[:-1][keep], edges[1:][keep])

    def __and__(self, other: Intervals) -> Intervals:
        """What of this set is in `other`."""
        if not len(self.start) or not len(other.start):
            return Intervals.empty()
        return self - (self - other)

    def holds(self, when: Int) -> npt.NDArray[np.bool_]:
        """Whether each moment lies in the set."""
        at = np.searchsorted(self.start, when, "right") - 1
        return (at >= 0) & (when < np.append(self.end, 0)[at])

    def before(self, when: Int) -> Int:
        """Total length of the part of the set that lies before each moment of `when`."""
        if len(self.start) == 0:
            return np.zeros_like(when)
        total = np.concatenate([[0], np.cumsum(self.end - self.start)])
        index = np.searchsorted(self.start, when, side="right")
        last = np.maximum(index - 1, 0)
        over = np.where(index > 0, np.maximum(self.end[last] - when, 0), 0)
        result: Int = total[index] - over
        return result


def nest(start: Int, end: Int) -> tuple[Int, Int]:
    """Intervals that are to lie one inside another, in order of start, the longer first: where each ends, at the latest
    with the one that it began inside of, and which that is, -1: none."""
    count = len(start)
    end, parent = end.copy(), np.full(count, -1, np.int64)
    if not count:
        return end, parent
    # The next that begins when this one has ended; within what both are inside of, its next neighbour.
    following = np.maximum(np.searchsorted(start, end, "left"), np.arange(1, count + 1))
    jumps = [np.append(following, count)]
    while (jumps[-1][:-1] < count).any():
        jumps.append(jumps[-1][jumps[-1]])
    outer = np.array([-1])
    first, behind = np.array([0]), np.array([count])  # of each of `outer`, what is inside of it
    while len(outer):
        found, of = first, np.arange(len(outer))
        for jump in reversed(jumps):  # every neighbour: first those far away, then those between
            further = jump[found]
            within = further < behind[of]
            found, of = np.concatenate([found, further[within]]), np.concatenate([of, of[within]])
        parent[found] = outer[of]
        inside = outer[of] >= 0
        end[found[inside]] = np.minimum(end[found[inside]], end[outer[of[inside]]])
        behind = np.searchsorted(start, end[found], "left")
        outer, first = found, found + 1
        holds = first < behind
        outer, first, behind = outer[holds], first[holds], behind[holds]
    return end, parent


def outermost(start: Int, end: Int) -> Bool:
    """Which intervals, in any order, begin inside no other. Of those that are equal it is the first."""
    order = np.lexsort((-end, start))
    found = np.ones(len(start), bool)
    found[order] = nest(start[order], end[order])[1] < 0
    return found
