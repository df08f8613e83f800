"""Columns of whole numbers, row by row."""

from __future__ import annotations

import numpy as np
import pytest

from dsprof.analyzer.arrays import different_rows, places


@pytest.mark.parametrize("far", [0, 2**40], ids=["as one number each", "too far apart for that"])
def test_different_rows(far: int) -> None:
    first, second = np.array([3, -1, 3, -1, 3]), np.array([5, far, 5, 7, -far])
    third = np.array([0, far, 0, 0, 0])
    wanted = sorted(set(zip(first.tolist(), second.tolist(), third.tolist(), strict=True)))
    assert different_rows(first, second, third) == [list(row) for row in wanted]


def test_no_rows() -> None:
    nothing = np.empty(0, np.int64)
    assert different_rows(nothing, nothing) == []


def test_places_of_stretches() -> None:
    assert places(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
