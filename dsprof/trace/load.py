"""A run folder as a Trace, whose ranks are read one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import pandas as pd
from pandas.arrays import BooleanArray, FloatingArray, IntegerArray

from dsprof.run import RunFolder, RunInfo
from dsprof.schema import COLUMNS

from .arrow_columns import as_stated, frame_of
from .files import brief, open_parquet
from .map_ranks import Observer
from .memory import Memory, StoredMemory
from .merge import bring_up_to_date, derive_anew, parquet_files, warn

EVERY_COLUMN: Final = tuple(COLUMNS)
Columns: TypeAlias = dict[str, Any]
"""A table held as columns: name -> array of pandas. To make a DataFrame of what each rank has takes longer than to find
it."""


class Source(Protocol):
    """Where the rows of a trace come from."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """In order."""
        ...

    def read(self, rank: int, columns: Sequence[str] = EVERY_COLUMN) -> pd.DataFrame:
        """These columns of the rank's rows."""
        ...


@dataclass(frozen=True)
class Trace:
    """A run and the rows of its ranks (columns of `schema.COLUMNS`). As it is loaded, each rank is on its own host's
    monotonic clock; that of an `Analysis` is on one clock. `memory` is what the allocators of some ranks held."""

    run: RunInfo
    source: Source
    memory: Mapping[int, Memory] = field(default_factory=dict)

    @classmethod
    def of(cls, run: RunInfo, rows: pd.DataFrame, memory: Mapping[int, Memory] | None = None) -> Trace:
        """A trace whose rows are all there already."""
        return cls(run, _Held(_by_rank(_typed(rows))), memory or {})

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.source.ranks

    def read(self, rank: int, columns: Sequence[str] = EVERY_COLUMN) -> pd.DataFrame:
        """One rank's rows, by time. Of a rank that is not there or cannot be read there are none, of the latter with a
        warning in `run`."""
        return self.source.read(rank, columns)

    @property
    def rows(self) -> pd.DataFrame:
        """The rows of all ranks in one table, read anew: for a look at a run of a few ranks."""
        return concat_rows([self.read(rank) for rank in self.ranks])


def load(folder: RunFolder, executor: Executor | None = None, observer: Observer | None = None) -> Trace:
    """The run's trace, merged first if it is not. Raises RunError where there is nothing to read. `executor`,
    `observer`: as in `map_ranks`, for the merging."""
    info, unwritten = bring_up_to_date(folder, executor, observer)
    here = RunFolder(folder.path.absolute())  # another process may have another working directory
    return Trace(info, _Stored(here, info, parquet_files(here), unwritten), StoredMemory(folder))


def concat_rows(tables: Sequence[pd.DataFrame], columns: Sequence[str] = EVERY_COLUMN) -> pd.DataFrame:
    """Tables of the same columns of the trace, one behind the other; without a table these columns, empty."""
    arrays = [{name: table[name].array for name in table.columns} for table in tables]
    return concat_arrays(arrays, columns)


def concat_arrays(tables: Sequence[Columns], columns: Sequence[str] = EVERY_COLUMN) -> pd.DataFrame:
    """The same of tables that are still held as columns."""
    return pd.DataFrame(dict(concat_columns(tables, columns)), copy=False)


def concat_columns(tables: Sequence[Columns], columns: Sequence[str] = EVERY_COLUMN) -> Columns:
    """The same, without making a DataFrame."""
    if not tables:
        return {name: pd.Series(dtype=COLUMNS[name]).array for name in columns}
    return {name: _concat([table[name] for table in tables], COLUMNS[name]) for name in tables[0]}


def drain_columns(tables: Sequence[Columns], columns: Sequence[str] = EVERY_COLUMN) -> Columns:
    """Like `concat_columns`, but it empties the tables that it is given, column by column: of thousands of ranks there
    is not room for all of them twice. A column without a value takes no room, and cannot be written to."""
    if not tables:
        return concat_columns(tables, columns)
    return {name: _drained([table.pop(name) for table in tables], COLUMNS[name]) for name in list(tables[0])}


def drain_rows(tables: list[pd.DataFrame], columns: Sequence[str] = EVERY_COLUMN) -> pd.DataFrame:
    """Like `concat_rows`, but it empties the list that it is given, and frees its tables column by column."""
    arrays = [{str(name): table[name].array for name in table.columns} for table in tables]
    tables.clear()
    return pd.DataFrame(dict(drain_columns(arrays, columns)), copy=False)


def _concat(parts: Sequence[Any], dtype: str) -> Any:
    if dtype == "category":  # of different categories concat would make objects
        return join_categories(parts)
    first = parts[0].dtype
    if any(part.dtype != first for part in parts):
        return pd.concat([pd.Series(part) for part in parts], ignore_index=True).array
    return type(parts[0])._concat_same_type(parts)


def _drained(parts: Sequence[Any], dtype: str) -> Any:
    first = parts[0]
    if not isinstance(first, BooleanArray | FloatingArray | IntegerArray) or not all(
        part.dtype == first.dtype and part.isna().all() for part in parts
    ):
        return _concat(parts, dtype)
    count = sum(map(len, parts))
    return type(first)(np.broadcast_to(first.dtype.numpy_dtype.type(0), count), np.broadcast_to(np.True_, count))


def join_categories(parts: Sequence[Any]) -> pd.Categorical:
    """Values of the categories of all parts, one behind the other."""
    arrays: list[pd.Categorical] = [of if isinstance(of, pd.Categorical) else pd.Categorical(of) for of in parts]
    dtypes = {id(of.dtype): of.dtype for of in arrays}  # most ranks that were read here share one
    words = {key: tuple(dtype.categories.tolist()) for key, dtype in dtypes.items()}
    values = sorted({value for one in set(words.values()) for value in one})
    number = {value: code for code, value in enumerate(values)}
    joined = {one: np.array([*(number[value] for value in one), -1], np.int32) for one in set(words.values())}
    codes = [joined[words[id(of.dtype)]][of.codes] for of in arrays]
    return pd.Categorical.from_codes(np.concatenate(codes), categories=pd.Index(values, dtype=object))


class _Held:
    """Tables in memory."""

    def __init__(self, tables: Mapping[int, pd.DataFrame]) -> None:
        self._tables = tables

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self._tables))

    def read(self, rank: int, columns: Sequence[str] = EVERY_COLUMN) -> pd.DataFrame:
        if rank not in self._tables:
            return _nothing(columns)
        table = self._tables[rank]
        return table.copy(deep=False) if tuple(columns) == tuple(table.columns) else table[list(columns)]


class _Stored:
    """One Parquet file a rank. What could not be written is held."""

    def __init__(
        self, folder: RunFolder, info: RunInfo, files: Mapping[int, Path], unwritten: Mapping[int, pd.DataFrame]
    ) -> None:
        self._folder, self._info = folder, info
        self._files = dict(files)
        self._held = {rank: _typed(rows) for rank, rows in unwritten.items()}

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self._files.keys() | self._held.keys()))

    def read(self, rank: int, columns: Sequence[str] = EVERY_COLUMN) -> pd.DataFrame:
        if rank not in self._held and rank not in self._files:
            return _nothing(columns)
        if rank not in self._held:
            path = self._files[rank]
            try:
                with open_parquet(path) as file:
                    known = set(file.schema_arrow.names)
                    there = [name for name in columns if name in known]
                    table = file.read(columns=there, use_threads=False)  # ranks are read side by side: no file is
                    return frame_of(table, columns)
            except Exception as error:  # pyarrow and pandas raise whatever a damaged file has them meet
                warn(self._info, f"{path.name}: unreadable ({brief(error)})")
                self._held[rank] = self._derived(rank)
        return self._held[rank][list(columns)]

    def _derived(self, rank: int) -> pd.DataFrame:
        try:
            rows = derive_anew(self._folder, rank)
        except Exception as error:  # whatever is wrong with one rank, the others count
            warn(self._info, f"rank {rank}: its capture is unreadable, too ({type(error).__name__}: {brief(error)})")
            rows = None
        return _nothing(EVERY_COLUMN) if rows is None else _typed(rows)


def _typed(rows: pd.DataFrame, columns: Sequence[str] = EVERY_COLUMN) -> pd.DataFrame:
    """The columns with the types that they are to have; one that is not there is empty."""
    there = set(rows.columns)
    found = {name: as_stated(rows[name] if name in there else pd.Series(np.nan, rows.index), name) for name in columns}
    return pd.DataFrame(found, index=rows.index, copy=False)


def _nothing(columns: Sequence[str]) -> pd.DataFrame:
    return pd.DataFrame({name: pd.Series(dtype=COLUMNS[name]) for name in columns})


def _by_rank(rows: pd.DataFrame) -> dict[int, pd.DataFrame]:
    """Each rank's rows: of a table in order of rank, parts of it that take no room of their own."""
    rank = rows["rank"].to_numpy()
    if (np.diff(rank) < 0).any():
        return {int(one): of_rank.reset_index(drop=True) for one, of_rank in rows.groupby("rank")}
    ranks, begins = np.unique(rank, return_index=True)
    ends = np.append(begins, len(rank))[1:]
    return {int(one): rows.iloc[a:b].reset_index(drop=True) for one, a, b in zip(ranks, begins, ends, strict=True)}
