"""Sets of intervals."""

from __future__ import annotations

import numpy as np
import pytest

from dsprof.analyzer.budget.intervals import Intervals, nest, outermost

Pairs = list[tuple[int, int]]


def of(pairs: Pairs) -> Intervals:
    return Intervals.union(np.array([a for a, _ in pairs], np.int64), np.array([b for _, b in pairs], np.int64))


def pairs(intervals: Intervals) -> Pairs:
    return list(zip(intervals.start.tolist(), intervals.end.tolist(), strict=True))


@pytest.mark.parametrize(
    ("mine", "other", "left"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([], [(0, 10)], []),
        ([(0, 10)], [(3, 5)], [(0, 3), (5, 10)]),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10), (20, 30)], [(5, 25)], [(0, 5), (25, 30)]),
        ([(5, 6)], [(0, 5), (6, 9)], [(5, 6)]),
    ],
)
def test_difference(mine: Pairs, other: Pairs, left: Pairs) -> None:
    assert pairs(of(mine) - of(other)) == left


def test_union_joins_what_touches() -> None:
    assert pairs(of([(0, 5), (5, 7)]) | of([(9, 9), (6, 8)])) == [(0, 8)]


@pytest.mark.parametrize(
    ("intervals", "ends", "parents"),
    [
        ([], [], []),
        ([(0, 10), (2, 4), (4, 6), (5, 6), (10, 12)], [10, 4, 6, 6, 12], [-1, 0, 0, 2, -1]),
        ([(0, 10), (5, 15), (8, 20), (12, 13)], [10, 10, 10, 13], [-1, 0, 1, -1]),  # what reaches beyond is cut
        ([(0, 10), (3, 3), (3, 3), (4, 5)], [10, 3, 3, 5], [-1, 0, 0, 0]),
    ],
)
def test_intervals_that_nest(intervals: Pairs, ends: list[int], parents: list[int]) -> None:
    start, end = (np.array([pair[i] for pair in intervals], np.int64) for i in (0, 1))
    found = nest(start, end)
    assert [each.tolist() for each in found] == [ends, parents]


def test_outermost_of_intervals_in_any_order() -> None:
    intervals = [(4, 6), (20, 30), (0, 10), (5, 15), (20, 30), (10, 12)]
    start, end = (np.array([pair[i] for pair in intervals], np.int64) for i in (0, 1))
    assert outermost(start, end).tolist() == [False, True, True, False, False, True]
    assert outermost(start[:0], end[:0]).tolist() == []
