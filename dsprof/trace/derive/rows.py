"""Rows: what derivation takes, whoever recorded them, and those that it makes."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

Int = npt.NDArray[np.int64]

GIVEN: Final = {
    "kind": "object", "name": "object", "lane": "object", "thread": "int64", "start_ns": "int64", "dur_ns": "Int64",
    "issue_ns": "Int64", "host_ns": "Int64", "group": "object", "engine": "bool", "device": "bool", "taken": "bool",
    "stage": "Int64", "microbatch": "Int64", "module": "object", "purpose": "object", "seq": "Int64", "peer": "Int64",
    "tag": "Int64", "root": "Int64", "bytes": "Int64", "dtype": "object", "value": "float64", "corr": "Int64",
    "site": "object", "grad": "boolean", "source": "object", "ended": "bool",
}  # fmt: skip
"""Columns of the rows of one process that derivation starts from, before the order, steps and nesting of the table.

They mean what they do in `schema.COLUMNS`. `lane` is null where it follows from thread and group. Beside those there is
`engine`: whether dsprof's engine recorded the row, which names and brackets its waits itself; `device`: whether its
times are a device's, of events on its streams; and `taken`: whether a communication's start is when what runs it on the
host (a worker of gloo's, a lane of the engine's) took it, and not merely when it was issued.
"""
_TYPES: Final = {name: pd.api.types.pandas_dtype(dtype) for name, dtype in GIVEN.items()}
REQUIRED: Final = ("kind", "name", "thread", "start_ns", "dur_ns", "source")
"""Of them, those that every source of rows has. One that is left out is null in every row; a row without `ended` has
ended if it has a duration."""


def completed(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with every column of GIVEN, as those types. Raises KeyError where a required one is missing."""
    missing = [name for name in REQUIRED if name not in rows]
    if missing:
        raise KeyError(f"rows without {', '.join(missing)}")
    absent = {
        name: pd.Series(False if dtype == "bool" else None, index=rows.index, dtype=dtype)
        for name, dtype in GIVEN.items()
        if name not in rows
    }
    if "ended" in absent:
        absent["ended"] = rows["dur_ns"].notna()
    # Texts may be of any type but categories, which a derived row could not join.
    types = dict(zip(rows.columns, rows.dtypes, strict=True))
    other = {
        name: dtype
        for name, dtype in _TYPES.items()
        if name in types
        and (isinstance(types[name], pd.CategoricalDtype) if dtype == np.dtype(object) else types[name] != dtype)
    }
    if other:
        rows = rows.astype(other)
    return (rows.assign(**absent) if absent else rows).reset_index(drop=True)


def ends(rows: pd.DataFrame) -> Int:
    """End of each row; of one that never ended, its start."""
    end: Int = rows["start_ns"].to_numpy(np.int64) + integers(rows, "dur_ns")
    return end


def texts(rows: pd.DataFrame, column: str) -> npt.NDArray[np.object_]:
    """A column of texts, as an array: of as few rows as a rank has, comparing a column takes pandas ten times as long
    as it takes numpy."""
    values = rows[column]
    missing = {"na_value": None} if isinstance(values.dtype, pd.StringDtype) else {}  # pd.NA cannot be compared
    found: npt.NDArray[np.object_] = values.to_numpy(object, **missing)
    return found


def present(rows: pd.DataFrame, column: str) -> npt.NDArray[np.bool_]:
    """Which rows have a value in this column."""
    found: npt.NDArray[np.bool_] = ~rows[column].array.isna()
    return found


def integers(rows: pd.DataFrame, column: str, missing: int = 0) -> Int:
    """A column of numbers, with `missing` where there is none."""
    found: Int = rows[column].to_numpy(np.int64, na_value=missing)
    return found


def issued(rows: pd.DataFrame) -> Int:
    """When each row was issued; of what nobody issued, when it began."""
    found: Int = np.where(present(rows, "issue_ns"), integers(rows, "issue_ns"), rows["start_ns"].to_numpy(np.int64))
    return found


def derived_rows(kind: str, name: object, start: Int, end: Int, thread: object, **columns: object) -> pd.DataFrame:
    """Rows of the training thread that nobody recorded; every argument is one value, or one a row."""
    return pd.DataFrame(
        {
            "kind": kind,
            "name": name,
            "lane": "main",
            "thread": thread,
            "start_ns": start,
            "dur_ns": pd.array(end - start, "Int64"),
            "source": "derived",
            "ended": True,
            **columns,
        }
    )
