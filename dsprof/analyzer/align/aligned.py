"""A trace on one clock, with one numbering of steps and one name for each communication on all ranks.

What that takes is found in the rows that ranks are compared by, the only ones of all ranks that are held at once. All
else is read a rank at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.run import RunInfo, last_processes
from dsprof.trace import Trace, concat_rows
from dsprof.trace.load import EVERY_COLUMN
from dsprof.trace.merge import warn

from ..arrays import Int
from ..map_ranks import Observer, map_ranks
from .clock import Clocks, find_clocks, find_jumps
from .numbering import number_by_order
from .steps import late_beginnings, renumber_steps
from .topology import Topology, find_topology, name_pipeline_messages

COMPARED_KINDS: Final = ("comm", "step", "phase", "pipe", "gauge", "pause")
"""And the waits for messages, which say when a message was there."""
COMPARED: Final = (
    "rank", "restart", "step", "kind", "name", "lane", "start_ns", "dur_ns", "ended", "issue_ns", "arrival_ns",
    "host_ns", "stage", "purpose", "group", "seq", "peer", "tag", "root", "bytes", "dtype", "value", "grad", "source",
)  # fmt: skip
"""Columns of the trace."""
CORRECTED_BY: Final = (
    "rank", "restart", "step", "kind", "start_ns", "dur_ns", "issue_ns", "arrival_ns", "purpose", "group", "seq",
    "peer",
)  # fmt: skip
"""Columns that are corrected, or say how."""


@dataclass(frozen=True)
class Aligned:
    """compared: the rows of all ranks of COMPARED_KINDS, with the columns COMPARED, aligned
    trace:    all rows, aligned as they are read
    clock_error_us: how far the clocks of ranks may be apart all the same
    clocks_told: whether that is known: a trace of another tool may not say of which clocks its times are, which are
    taken for one then
    """

    compared: pd.DataFrame
    trace: Trace
    topology: Topology
    clock_error_us: float
    clocks_told: bool
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _ReadCompared:
    """Of a rank, the rows of COMPARED_KINDS, their places among all of its last attempt, how many those are, and the
    warnings that reading gave."""

    trace: Trace
    last: Mapping[int, int]

    def __call__(self, rank: int) -> tuple[pd.DataFrame, Int, int, tuple[str, ...]]:
        known = len(self.trace.run.warnings)
        rows = _last_attempt(self.trace.read(rank, COMPARED), self.last)
        place = np.flatnonzero(_is_compared(rows))
        return rows.iloc[place], place, len(rows), tuple(self.trace.run.warnings[known:])


def align(trace: Trace, executor: Executor | None = None, observer: Observer | None = None) -> Aligned:
    """Find what puts the ranks of a trace beside each other."""
    run = trace.run
    last = {item.rank: item.restart for item in last_processes(run.ranks)}
    told = Trace(run, trace.source)  # what allocators held is not asked here, and need not travel
    every = map_ranks(_ReadCompared(told, last), trace.ranks, executor, observer, "read")
    for _, _, _, warnings in every.found.values():
        for text in warnings:
            warn(run, text)
    for rank, why in every.failed.items():
        warn(run, f"rank {rank}: it could not be read and is left out ({why})")
    tables = [table for table, _, _, _ in every.found.values()]
    places = {rank: place for rank, (_, place, _, _) in every.found.items()}
    lengths = {rank: length for rank, (_, _, length, _) in every.found.items()}
    del every
    rows = concat_rows(tables) if tables else trace.rows[list(COMPARED)]
    tables.clear()
    numbered = number_by_order(rows, run)
    numbers = None if numbered is rows else _by_rank(numbered["seq"], places)
    clocks = find_clocks(numbered, run)
    rows = clocks.correct(numbered)
    late, renumbered = late_beginnings(rows)
    rows = renumber_steps(rows, late)
    jump_us, jumps = find_jumps(rows)
    topology = find_topology(rows, run)
    source = _Corrected(told, last, lengths, places, numbers, clocks, late, topology)
    return Aligned(
        compared=name_pipeline_messages(rows, topology),
        trace=Trace(run, source, trace.memory),
        topology=topology,
        clock_error_us=max(clocks.error_us, jump_us),
        clocks_told=_clocks_told(run),
        warnings=(*clocks.warnings, *renumbered, *jumps),
    )


def _clocks_told(run: RunInfo) -> bool:
    if not run.imported or len(run.ranks) < 2:
        return True
    return all(item.host for item in run.ranks) or len({item.clock_name for item in run.ranks}) > 1


def _is_compared(rows: pd.DataFrame) -> npt.NDArray[np.bool_]:
    kind = rows["kind"]
    compared: npt.NDArray[np.bool_] = (kind.isin(COMPARED_KINDS) | ((kind == "wait") & rows["peer"].notna())).to_numpy(
        bool
    )
    return compared


def _last_attempt(rows: pd.DataFrame, last: Mapping[int, int]) -> pd.DataFrame:
    """What a rank's last process did: an elastic job's earlier ones ended in a failure and have their own steps.
    `last`: rank -> number of its last restart."""
    if not last:  # rows that no capture of ours is behind
        return rows
    wanted = (rows["restart"] == rows["rank"].map(last)).to_numpy(bool)
    return rows if wanted.all() else rows[wanted].reset_index(drop=True)


def _by_rank(column: pd.Series[int], places: Mapping[int, Int]) -> dict[int, pd.Series[int]]:
    ends = np.cumsum([len(of_rank) for of_rank in places.values()]).tolist()
    return {rank: column.iloc[end - len(places[rank]) : end] for rank, end in zip(places, ends, strict=True)}


class _Corrected:
    """The rows of another source, corrected."""

    def __init__(
        self,
        trace: Trace,
        last: Mapping[int, int],
        lengths: Mapping[int, int],
        places: Mapping[int, Int],
        numbers: Mapping[int, pd.Series[int]] | None,
        clocks: Clocks,
        late: Mapping[int, int],
        topology: Topology,
    ) -> None:
        self._trace, self._clocks, self._late, self._topology = trace, clocks, late, topology
        self._last, self._lengths = last, lengths
        self._places, self._numbers = (places, numbers) if numbers is not None else ({}, {})

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank in self._trace.ranks if rank in self._lengths)

    def read(self, rank: int, columns: Sequence[str] = EVERY_COLUMN) -> pd.DataFrame:
        needed = tuple(dict.fromkeys((*columns, *CORRECTED_BY)))
        rows = _last_attempt(self._trace.read(rank, needed), self._last)
        if len(rows) != self._lengths.get(rank, 0):  # no longer what was aligned
            warn(self._trace.run, f"rank {rank}: its trace changed while it was read; it is left out")
            rows = rows.iloc[:0]
        elif rank in self._numbers:
            seq = rows["seq"].copy()
            seq.iloc[self._places[rank]] = self._numbers[rank].array
            rows = rows.assign(seq=seq)
        rows = renumber_steps(self._clocks.correct(rows), self._late)
        return name_pipeline_messages(rows, self._topology)[list(columns)]
