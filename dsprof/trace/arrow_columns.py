"""Columns of a rank's Parquet file as pandas holds them.

pyarrow's own way to pandas looks at the whole table for what each column is to become. Here that is known
(`schema.COLUMNS`), and a column that is stored as it is to be held is taken as it lies there; any other goes pyarrow's
way, and is cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa

from dsprof.schema import COLUMNS

CATEGORIES: Final = frozenset(name for name, dtype in COLUMNS.items() if dtype == "category")
DTYPES: Final = {name: pd.api.types.pandas_dtype(dtype) for name, dtype in COLUMNS.items()}
STORED: Final = {
    name: pa.bool_() if dtype == "boolean" else pa.from_numpy_dtype(np.dtype(dtype.lower()))
    for name, dtype in COLUMNS.items()
    if dtype != "category"
}
"""The type that a column which is no category is stored with."""


def held(table: pa.Table, columns: Sequence[str]) -> pd.DataFrame:
    """These columns of a trace, with the types that they are to have; one that is not there is empty."""
    there, count = set(table.column_names), table.num_rows
    found = {name: _held(table, name) if name in there else _empty(name, count) for name in columns}
    return pd.DataFrame(found, index=pd.RangeIndex(count), copy=False)


def typed(rows: pd.DataFrame, columns: Sequence[str] = tuple(COLUMNS)) -> pd.DataFrame:
    """The same of a table of pandas."""
    there = set(rows.columns)
    found = {name: _cast(rows[name] if name in there else pd.Series(np.nan, rows.index), name) for name in columns}
    return pd.DataFrame(found, index=rows.index, copy=False)


def _held(table: pa.Table, name: str) -> Any:
    column = table.column(name)
    if column.null_count == len(column):
        return _empty(name, len(column))
    if column.num_chunks == 1:
        values = column.chunk(0)
        if name in CATEGORIES:
            if pa.types.is_dictionary(values.type) and pa.types.is_signed_integer(values.type.index_type):
                codes = values.indices.fill_null(-1).to_numpy()
                return pd.Categorical.from_codes(codes, pd.Index(values.dictionary.to_pylist()))
        elif values.type == STORED[name]:
            held = _numbers(values, DTYPES[name])
            if held is not None:
                return held
    return _cast(table.select([name]).to_pandas(use_threads=False)[name], name)


def _numbers(values: pa.Array, dtype: Any) -> Any:
    """None where a value is missing in a column that must have all."""
    if isinstance(dtype, np.dtype):
        if values.null_count and dtype.kind != "f":
            return None
        return values.to_numpy(zero_copy_only=False).copy()
    missing = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else np.zeros(len(values), bool)
    if pa.types.is_boolean(values.type):
        return pd.arrays.BooleanArray(values.fill_null(False).to_numpy(zero_copy_only=False), missing)
    return pd.arrays.IntegerArray(values.fill_null(0).to_numpy(zero_copy_only=False).copy(), missing)


def _empty(name: str, count: int) -> Any:
    if name in CATEGORIES:
        return pd.Categorical.from_codes(np.full(count, -1, np.int8), pd.Index([], dtype=object))
    return _cast(pd.Series(np.full(count, np.nan)), name).array


def _cast(values: pd.Series[Any], name: str) -> pd.Series[Any]:
    """`astype` takes as long as reading does, also where there is nothing to do."""
    is_there = isinstance(values.dtype, pd.CategoricalDtype) if name in CATEGORIES else values.dtype == DTYPES[name]
    return values if is_there else values.astype(COLUMNS[name])
