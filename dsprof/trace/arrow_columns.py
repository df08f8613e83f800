"""Columns of a Parquet file as those of the trace, without pandas' own way from Arrow: that takes as long as reading.

The columns are exactly those that `table.to_pandas()` and `astype` would make.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa

from dsprof.schema import COLUMNS

CATEGORIES: Final = frozenset(name for name, dtype in COLUMNS.items() if dtype == "category")
DTYPES: Final = {name: pd.api.types.pandas_dtype(dtype) for name, dtype in COLUMNS.items()}
STORED_AS: Final = {
    name: pa.bool_() if dtype == "boolean" else pa.from_numpy_dtype(dtype.lower())
    for name, dtype in COLUMNS.items()
    if dtype != "category"
}
"""Name -> the type in which `write_parquet` stores a column that is no category."""
NO_WORDS: Final = pd.CategoricalDtype(pd.Index([], dtype="float64"))
"""Of a column without a value, which says nothing of what its values would be."""


def frame_of(table: pa.Table, columns: Sequence[str]) -> pd.DataFrame:
    """These columns of the trace, which may be written to; one that the table does not have is empty. Raises ValueError
    or TypeError where a column cannot be what it should be."""
    there = set(table.column_names)
    index = pd.RangeIndex(len(table))
    found = {
        name: _column(table.column(name), name) if name in there else as_stated(pd.Series(np.nan, index), name)
        for name in columns
    }
    return pd.DataFrame(found, index=index, copy=False)


def as_stated(values: pd.Series[Any], name: str) -> pd.Series[Any]:
    """A column with the type that it is to have: `astype` takes as long as reading does, also where there is nothing to
    do."""
    is_there = isinstance(values.dtype, pd.CategoricalDtype) if name in CATEGORIES else values.dtype == DTYPES[name]
    return values if is_there else values.astype(COLUMNS[name])


def _column(stored: pa.ChunkedArray, name: str) -> Any:
    values = stored.combine_chunks() if stored.num_chunks != 1 else stored.chunk(0)
    if name in CATEGORIES:
        if (
            isinstance(values, pa.DictionaryArray)
            and pa.types.is_string(values.type.value_type)
            and len(values.dictionary)
        ):
            codes = values.indices.fill_null(-1) if values.null_count else values.indices
            words = _categories(tuple(values.dictionary.to_pylist()), pd.get_option("mode.string_storage"))
            return pd.Categorical.from_codes(_own(codes), dtype=words)
        if values.null_count == len(values) and pa.types.is_float64(values.type):
            return pd.Categorical.from_codes(np.full(len(values), -1, np.int8), dtype=NO_WORDS)
        words_are = values.type.value_type if isinstance(values, pa.DictionaryArray) else values.type
        is_text = pa.types.is_string(words_are) or pa.types.is_large_string(words_are)
        if values.null_count < len(values) and not is_text:  # other ranks' words could not be put beside these
            raise TypeError(f"its column {name} has values of type {words_are} in the place of words")
    elif values.type == STORED_AS[name]:
        dtype = DTYPES[name]
        if not isinstance(dtype, np.dtype):
            return dtype.__from_arrow__(values)  # as all of pandas' own nullable types have it
        if not values.null_count or dtype == np.float64:
            return _own(values)
    return as_stated(values.to_pandas(), name)


def _own(values: pa.Array) -> Any:
    """As an array of its own: memory that is Arrow's cannot be written to."""
    return values.to_numpy(zero_copy_only=False).copy()


@lru_cache(maxsize=1024)
def _categories(words: tuple[str, ...], storage: str) -> pd.CategoricalDtype:
    """Ranks alike have the same words. `storage`: as strings are held at the time (`strings.plain_strings`)."""
    return pd.CategoricalDtype(pd.Series(pa.array(words, pa.string()).to_pandas()).array)
