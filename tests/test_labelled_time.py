"""Time in which every moment has one label: what each label gets before a moment is what unions of intervals say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest

from dsprof.analyzer.budget.intervals import Intervals
from dsprof.analyzer.budget.labelled_time import LabelledTime
from dsprof.analyzer.columns import RankRows
from dsprof.schema import COLUMNS


def spans(*pairs: tuple[int, int]) -> Intervals:
    start, end = np.array(pairs, np.int64).reshape(-1, 2).T
    return Intervals.union(start, end)


def pairs_of(found: Intervals) -> list[tuple[int, int]]:
    return [*zip(found.start.tolist(), found.end.tolist(), strict=True)]


def drawn(draw: np.random.Generator) -> Intervals:
    start = draw.integers(0, 60, draw.integers(0, 6))
    return Intervals.union(start, start + draw.integers(0, 12, len(start)))


def each_alone(parts: Sequence[Intervals]) -> list[Intervals]:
    """What of each part no earlier one has."""
    found, before = [], Intervals.empty()
    for part in parts:
        found.append(part - before)
        before = before | part
    return found


def test_the_first_of_parts_that_overlap_counts() -> None:
    time = LabelledTime.of([spans((10, 20)), spans((5, 15), (18, 30)), spans((40, 50))])
    assert time.when.tolist() == [5, 10, 20, 30, 40, 50]
    assert time.label.tolist() == [1, 0, 1, -1, 2, -1]
    assert pairs_of(time.spans(1)) == [(5, 10), (20, 30)]
    assert time.before(np.array([0, 7, 25, 60])).tolist() == [[0, 0, 10, 10], [0, 2, 10, 15], [0, 0, 0, 10]]
    inside = time.before_within(np.array([0, 7, 25, 60]), spans((6, 12), (22, 45)))
    assert inside.tolist() == [[0, 0, 2, 2], [0, 1, 7, 12], [0, 0, 0, 5]]


@pytest.mark.parametrize("seed", range(40))
def test_labels_are_what_unions_of_intervals_say(seed: int) -> None:
    draw = np.random.default_rng(seed)
    parts = [drawn(draw) for _ in range(int(draw.integers(1, 5)))]
    within, when = drawn(draw), draw.integers(-5, 80, 12)
    time, alone = LabelledTime.of(parts), each_alone(parts)
    for label, part in enumerate(alone):
        assert pairs_of(time.spans(label)) == pairs_of(part)
        assert time.of_label(label, when).tolist() == part.before(when).tolist()
    assert time.before(when).tolist() == [part.before(when).tolist() for part in alone]
    assert time.before_within(when, within).tolist() == [(part & within).before(when).tolist() for part in alone]


def test_time_without_a_label() -> None:
    time = LabelledTime.of([Intervals.empty(), Intervals.empty()])
    assert time.before(np.array([3, 9])).tolist() == [[0, 0], [0, 0]]
    assert time.before_within(np.array([3, 9]), spans((1, 4))).tolist() == [[0, 0], [0, 0]]
    assert pairs_of(time.spans(1)) == []


def test_columns_of_a_ranks_rows_are_arrays() -> None:
    told = {
        "rank": 0, "restart": 0, "step": 1, "kind": ["comm", "step", "comm"], "name": ["send", None, "recv"],
        "start_ns": [5, 6, 7], "grad": [None, True, False], "seq": [3, None, 4], "value": [1.5, None, 2.5],
    }  # fmt: skip
    table = pd.DataFrame(told)
    rows = RankRows(table.reindex(columns=list(COLUMNS)).astype(COLUMNS))
    assert rows.whole("seq", -1).tolist() == [3, -1, 4]
    assert rows.whole("seq").tolist() == [3, 0, 4]
    assert rows.known("seq").tolist() == [True, False, True]
    assert rows.true("grad", missing=True).tolist() == [True, True, False]
    assert rows.are("kind", "comm").tolist() == [True, False, True]
    assert rows.are("kind", "wait").tolist() == [False, False, False]
    assert rows.words("name", np.array([0, 1, 2])).tolist() == ["send", "nan", "recv"]
    assert np.isnan(rows.real("value")).tolist() == [False, True, False]
    taken = rows.take(("start_ns", "name"), np.array([2, 0]))
    assert taken.index.tolist() == [2, 0]
    assert taken["start_ns"].tolist() == [7, 5]
    assert taken.dtypes.astype(str).tolist() == ["int64", "category"]
