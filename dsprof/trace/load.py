"""A run folder as a Trace."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import pyarrow as pa

from dsprof.run import RunFolder, RunInfo
from dsprof.schema import COLUMNS

from .merge import brief, bring_up_to_date, derive_anew, parquet_files, warn


@dataclass(frozen=True)
class Trace:
    """A run and its rows (columns of `schema.COLUMNS`), each rank on its own host's monotonic clock."""

    run: RunInfo
    rows: pd.DataFrame


def load(folder: RunFolder) -> Trace:
    """The run's trace, merged first if it is not. Raises RunError where there is nothing to read."""
    info, tables = bring_up_to_date(folder)
    for rank, path in parquet_files(folder).items():
        if rank not in tables:
            try:
                tables[rank] = pd.read_parquet(path)
            except (OSError, ValueError, pa.ArrowException) as error:
                warn(info, f"{path.name}: unreadable ({brief(error)})")
                rows = derive_anew(folder, rank)
                if rows is not None:
                    tables[rank] = rows
    if not tables:
        return Trace(info, pd.DataFrame({name: pd.Series(dtype=dtype) for name, dtype in COLUMNS.items()}))
    parts = [tables[rank] for rank in sorted(tables)]
    for column, dtype in COLUMNS.items():
        if dtype == "category":  # one set of categories, or concat falls back to objects
            values = sorted({value for part in parts for value in part[column].dropna().unique()})
            for part in parts:
                part[column] = pd.Categorical(part[column], categories=pd.Index(values, dtype=object))
    return Trace(info, pd.concat(parts, ignore_index=True).astype(COLUMNS))
