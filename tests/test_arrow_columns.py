"""Columns from Arrow are exactly those that pandas' own way makes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic import Job

from dsprof.schema import COLUMNS
from dsprof.trace.arrow_columns import frame_of
from dsprof.trace.strings import plain_strings


def rows() -> pd.DataFrame:
    return Job(ranks=1, steps=6).trace().read(0)


def with_missing() -> pd.DataFrame:
    table = rows()
    for name, dtype in COLUMNS.items():
        if dtype[0] in "Ibcf":  # nullable ones: whole numbers, booleans, categories, floats
            table[name] = table[name].mask(np.arange(len(table)) % 3 == 1)
    return table


TABLES = {
    "whole": rows,
    "missing": with_missing,
    "empty": lambda: rows().iloc[:0],
    "columns that are not there": lambda: rows().drop(columns=["site", "peer", "value", "grad"]),
    "nothing in a column": lambda: rows().assign(site=np.nan, seq=pd.NA, ended=pd.NA),
    "other types": lambda: rows().astype({"kind": object, "seq": "float64", "step": "int64", "value": "float32"}),
}


@pytest.mark.parametrize("storage", ["python", "as it is"])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("kind", TABLES)
def test_as_pandas_makes_them(kind: str, chunks: int, storage: str, tmp_path: Path) -> None:
    with plain_strings() if storage == "python" else nullcontext():
        table = pa.Table.from_pandas(TABLES[kind](), preserve_index=False)
        pq.write_table(table, tmp_path / "rows.parquet", row_group_size=max(-(-len(table) // chunks), 1))
        stored = pq.read_table(tmp_path / "rows.parquet")
        plain = stored.to_pandas()
        wanted = pd.DataFrame(
            {
                name: (plain[name] if name in plain else pd.Series(np.nan, plain.index)).astype(dtype)
                for name, dtype in COLUMNS.items()
            }
        )
        found = frame_of(stored, tuple(COLUMNS))
        pd.testing.assert_frame_equal(found, wanted, check_exact=True)
        for name in wanted.columns[wanted.dtypes == "category"]:
            assert found[name].cat.categories.dtype == wanted[name].cat.categories.dtype, name
        assert list(frame_of(stored, ("seq", "rank")).columns) == ["seq", "rank"]


@pytest.mark.parametrize("make", [rows, with_missing])
def test_whoever_reads_them_may_write_to_them(make: Callable[[], pd.DataFrame]) -> None:
    found = frame_of(pa.Table.from_pandas(make(), preserve_index=False), tuple(COLUMNS))
    for name in COLUMNS:
        found.loc[found.index[:1], name] = found[name].iloc[2]


@pytest.mark.parametrize(
    "damaged",
    [
        {"rank": pa.array([0, None], pa.int32())},
        {"kind": pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array(["step", "step"]))},
        {"kind": pa.DictionaryArray.from_arrays(pa.array([0, 7], pa.int8()), pa.array(["step"]), safe=False)},
        {"start_ns": pa.array(["a", "b"])},
    ],
)
def test_what_no_column_can_be_is_an_error(damaged: dict[str, pa.Array]) -> None:
    with pytest.raises((ValueError, TypeError)):
        frame_of(pa.table(damaged), tuple(damaged))


@pytest.mark.parametrize("values", [[1, 2], [True, False], [0.5, 1.5]])
def test_numbers_in_the_place_of_words_are_refused(values: list[Any]) -> None:
    """Else every rank would be lost with this one, since its names cannot be put in order with the others'."""
    for column in (pa.array(values), pa.array(values).dictionary_encode()):
        with pytest.raises(TypeError, match=r"its column name has values of type .* in the place of words"):
            frame_of(pa.table({"name": column}), ("name",))
