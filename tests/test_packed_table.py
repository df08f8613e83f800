"""Large tables that are kept in few bytes: by blocks of whole ranks."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

from dsprof.trace import packed_table
from dsprof.trace.packed_table import PackedTable


def table_of(ranks: list[int]) -> pd.DataFrame:
    """Types of `wait_table`, with what is not known in some."""
    number = np.arange(len(ranks))
    return pd.DataFrame(
        {
            "rank": np.array(ranks, np.int32),
            "start_ns": 10_000_000_000 + 1000 * number,
            "arrival_ns": pd.array([None if one % 3 == 0 else one for one in number.tolist()], "Int64"),
            "group": pd.Categorical.from_codes(number % 3 - 1, ["dp", "tp"]),
        }
    )


RANKS = [0] * 5 + [2] * 3 + [3] * 9 + [7]


BLOCKS = {1: 4, 4: 2, 1 << 16: 1}
"""Rows that a block has about -> how many there are."""


@pytest.fixture(params=BLOCKS)
def packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PackedTable:
    monkeypatch.setattr(packed_table, "ROWS", request.param)
    return PackedTable(table_of(RANKS))


def test_the_table_is_the_same(packed: PackedTable) -> None:
    assert_frame_equal(packed.table(), table_of(RANKS))


@pytest.mark.parametrize("rows", BLOCKS)
def test_no_rank_lies_in_two_blocks(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_table, "ROWS", rows)
    blocks = [block["rank"].unique().tolist() for block in PackedTable(table_of(RANKS)).blocks()]
    assert [rank for block in blocks for rank in block] == [0, 2, 3, 7]
    assert len(blocks) == BLOCKS[rows]


@pytest.mark.parametrize("ranks", [(0,), (1, 3), (7, 2), (8, 9)])
def test_some_ranks_are_told_alone(packed: PackedTable, ranks: tuple[int, ...]) -> None:
    every = table_of(RANKS)
    assert_frame_equal(packed.of_ranks(*ranks), every[every["rank"].isin(ranks)].reset_index(drop=True))


def test_all_ranks_are_gone_through_with_their_rows(packed: PackedTable) -> None:
    """Also those that have none, before, between and after the others."""
    every = table_of(RANKS)
    given, rows = [], []
    for ranks, block in packed.with_ranks([0, 1, 2, 3, 5, 7, 8]):
        given += ranks
        rows += [block[block["rank"] == rank] for rank in ranks]
    assert given == [0, 1, 2, 3, 5, 7, 8]
    assert_frame_equal(pd.concat(rows, ignore_index=True), every)


def test_without_a_row_there_are_its_columns() -> None:
    packed = PackedTable(table_of([]))
    assert_frame_equal(packed.table(), table_of([]))
    assert_frame_equal(packed.of_ranks(0, 5), table_of([]))
    assert [ranks for ranks, _ in packed.with_ranks([0, 5])] == [[0, 5]]


def test_tables_are_joined_rank_after_rank(packed: PackedTable) -> None:
    """Those without a row add none, wherever they are."""
    later = [8] * 4 + [9]
    joined = PackedTable.joined([PackedTable(table_of(of)) for of in ([], RANKS, [], later, [])])
    every = pd.concat([table_of(RANKS), table_of(later)], ignore_index=True)
    assert_frame_equal(joined.table(), every)
    assert_frame_equal(joined.of_ranks(3, 9), every[every["rank"].isin([3, 9])].reset_index(drop=True))
    assert [rank for ranks, _ in joined.with_ranks([0, 5, 9, 12]) for rank in ranks] == [0, 5, 9, 12]
    nothing = PackedTable.joined([PackedTable(table_of([])), PackedTable(table_of([]))])
    assert_frame_equal(nothing.table(), table_of([]))


def test_it_is_sorted_by_rank_and_else_stays_in_order() -> None:
    packed = PackedTable(table_of([3, 1, 3, 1]))
    assert (packed.table()["start_ns"] - 10_000_000_000).tolist() == [1000, 3000, 0, 2000]
    assert packed.of_ranks(3)["rank"].tolist() == [3, 3]
