"""The what-ifs of what is communicated for nothing: which segments are packing."""

from __future__ import annotations

import pytest

from dsprof.analyzer.whatif.needless import bursts


@pytest.mark.parametrize(
    ("broadcasts", "expected"),
    [
        ([(3, 5)], [(3, 5)]),
        ([(5, 9), (3, 7)], [(3, 9)]),  # two under way at once
        ([(3, 5), (6, 8)], [(3, 8)]),  # one right after the other
        ([(3, 5), (20, 22)], [(3, 5), (20, 22)]),  # of two forwards
        ([(3, 3)], [(3, 3)]),  # not waited for
        ([], []),
    ],
)
def test_bursts(broadcasts: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    assert bursts(broadcasts) == expected
