"""The first pass: a trace on one clock, with one numbering of steps and one name for each communication on all ranks.

Of each rank it takes what puts it beside the others: when it was at each communication, and its steps. Those arrivals
are the only table of all ranks, and a study does not keep it. All else is read a rank at a time, in the second pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd
from pandas.api.extensions import ExtensionArray

from dsprof.run import RunInfo, last_processes
from dsprof.trace import Trace
from dsprof.trace.load import EVERY_COLUMN, concat_arrays, drain_rows
from dsprof.trace.map_ranks import Observer, each, map_parts
from dsprof.trace.merge import warn

from ..arrays import Int
from ..columns import RankRows, as_rows
from ..freed_memory import give_back
from .clock import Clocks, find_clocks, find_jumps
from .numbering import number_by_order
from .steps import late_beginnings, renumber_steps
from .topology import Topology, find_topology, name_pipeline_messages

ARRIVED: Final = (
    "rank", "restart", "step", "kind", "name", "start_ns", "dur_ns", "ended", "issue_ns", "arrival_ns", "stage",
    "purpose", "group", "seq", "peer", "tag", "root", "bytes", "dtype", "source",
)  # fmt: skip
"""Columns of the trace that say when a rank was where."""
CORRECTED_BY: Final = (
    "rank", "restart", "step", "kind", "start_ns", "dur_ns", "issue_ns", "arrival_ns", "purpose", "group", "seq",
    "peer",
)  # fmt: skip
"""Columns that are corrected, or say how."""
NEVER: Final = -1
"""The restart of a rank of which no process is known."""


@dataclass(frozen=True)
class Aligned:
    """trace:    all rows, aligned as they are read
    clock_error_us: how far the clocks of ranks may be apart all the same
    clocks_told: whether that is known: a trace of another tool may not say of which clocks its times are, which are
    taken for one then
    """

    trace: Trace
    topology: Topology
    clock_error_us: float
    clocks_told: bool
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Arrivals:
    """What the first pass takes of some ranks, by rank.

    table:   the columns ARRIVED of the rows that `_arrivals` chooses
    place:   of each where it is among all rows of its rank's last attempt
    ranks, counts, lengths: how many rows of each rank are in the table, and how many its last attempt has
    warnings: that reading gave
    failed:  rank -> why it could not be read
    """

    table: pd.DataFrame
    place: Int
    ranks: tuple[int, ...]
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    warnings: tuple[str, ...]
    failed: Mapping[int, str]


@dataclass(frozen=True)
class ReadArrivals:
    """What the first pass takes of ranks. `last`: rank -> number of its last restart."""

    trace: Trace
    last: Mapping[int, int]

    def __call__(self, ranks: Sequence[int]) -> Arrivals:
        known = len(self.trace.run.warnings)
        every = each(self._of_rank, ranks)
        tables, places, lengths = zip(*every.found.values(), strict=True) if every.found else ((), (), ())
        return Arrivals(
            table=concat_arrays(tables, ARRIVED),
            place=np.concatenate([*places, np.empty(0, np.int64)]),
            ranks=tuple(every.found),
            counts=tuple(map(len, places)),
            lengths=lengths,
            warnings=tuple(self.trace.run.warnings[known:]),
            failed=every.failed,
        )

    def _of_rank(self, rank: int) -> tuple[dict[str, ExtensionArray], Int, int]:
        rows = RankRows(_last_attempt(self.trace.read(rank, ARRIVED), self.last))
        place = _arrivals(rows)
        return rows.take_arrays(ARRIVED, place), place, len(rows)


def align(trace: Trace, executor: Executor | None = None, observer: Observer | None = None) -> tuple[Aligned, RankRows]:
    """Find what puts the ranks of a trace beside each other. Also the arrivals of all ranks, by rank, aligned: columns
    ARRIVED."""
    run = trace.run
    last = {item.rank: item.restart for item in last_processes(run.ranks)}
    told = Trace(run, trace.source)  # what allocators held is not asked here, and need not travel
    parts = map_parts(ReadArrivals(told, last), trace.ranks, executor, observer, "read")
    for part in parts:
        for text in part.warnings:
            warn(run, text)
    for part in parts:
        for rank, why in part.failed.items():
            warn(run, f"rank {rank}: it could not be read and is left out ({why})")
    places = {rank: place for part in parts for rank, place in _places(part).items()}
    lengths = {rank: length for part in parts for rank, length in zip(part.ranks, part.lengths, strict=True)}
    tables = [part.table for part in parts if part.ranks]
    del parts
    arrivals = RankRows(drain_rows(tables, ARRIVED))
    give_back()
    numbered = number_by_order(arrivals, run)
    numbers = None if numbered is arrivals.table else _by_rank(numbered["seq"], places)
    arrivals = as_rows(numbered, arrivals)
    del numbered
    clocks = find_clocks(arrivals, run)
    arrivals = as_rows(clocks.correct(arrivals.table), arrivals)
    late, renumbered = late_beginnings(arrivals)
    arrivals = as_rows(renumber_steps(arrivals.table, late), arrivals)
    jump_us, jumps = find_jumps(arrivals)
    topology = find_topology(arrivals, run)
    source = _Corrected(told, last, lengths, places, numbers, clocks, late, topology)
    aligned = Aligned(
        trace=Trace(run, source, trace.memory),
        topology=topology,
        clock_error_us=max(clocks.error_us, jump_us),
        clocks_told=_clocks_told(run),
        warnings=(*clocks.warnings, *renumbered, *jumps),
    )
    return aligned, RankRows(name_pipeline_messages(arrivals.table, topology))


def _places(part: Arrivals) -> dict[int, Int]:
    ends = np.cumsum(part.counts).tolist()
    every = zip(part.ranks, ends, part.counts, strict=True)
    return {rank: part.place[end - count : end] for rank, end, count in every}


def _clocks_told(run: RunInfo) -> bool:
    if not run.imported or len(run.ranks) < 2:
        return True
    return all(item.host for item in run.ranks) or len({item.clock_name for item in run.ranks}) > 1


def _arrivals(rows: RankRows) -> Int:
    """Which of a rank's rows the first pass takes: its communications and its waits for messages, which say when one
    was there; its steps; of a pipeline's actions one for each stage; and of a rank that sends the forwards and
    backwards, which say what it sends. Of a rank that has nothing of these, its first row: that it is there."""
    peer, communicates = rows.known("peer"), rows.are("kind", "comm")
    chosen = communicates | rows.are("kind", "step") | (rows.are("kind", "wait") & peer)
    acted = np.flatnonzero(rows.are("kind", "pipe"))
    if len(acted):
        _, first = np.unique(rows.whole("stage", -1)[acted], return_index=True)
        chosen[acted[first]] = True
    if (communicates & peer).any():
        chosen |= rows.are("kind", "phase") & rows.are("name", "forward", "backward")
    place = np.flatnonzero(chosen)
    return place if len(place) else np.arange(min(len(rows), 1))


def _last_attempt(rows: pd.DataFrame, last: Mapping[int, int]) -> pd.DataFrame:
    """What a rank's last process did: an elastic job's earlier ones ended in a failure and have their own steps.
    `last`: rank -> number of its last restart."""
    if not last:  # rows that no capture of ours is behind
        return rows
    rank, restart = rows["rank"].to_numpy(np.int64), rows["restart"].to_numpy(np.int64)
    wanted = np.zeros(len(rows), bool)
    for one in set(rank[np.append(True, rank[1:] != rank[:-1])[: len(rank)]].tolist()):
        wanted |= (rank == one) & (restart == last.get(one, NEVER))
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
        rows = name_pipeline_messages(rows, self._topology)
        return rows if tuple(rows.columns) == tuple(columns) else rows[list(columns)]
