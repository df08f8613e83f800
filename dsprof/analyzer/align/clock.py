"""Put every rank on one clock.

The ranks of one host share CLOCK_MONOTONIC, unless containers give them clocks of their own; here each clock is a host.
Between hosts, a synchronizing collective is the common event: no rank can leave it before the last has arrived, and
all leave within a transfer's tail of one another, so the difference of its ends over many collectives gives the offset.
Clocks drift, by some 50 us a second, so the offset is a line over time where one can be told from the scatter, and else
its median. A host that shares no collective with the first is joined through others, whose errors add up.

The error that is stated is a bound: of what the offset may be wrong by. It holds the uncertainty of the line at the
ends of the run; what a drift comes to that is too small to be told; and ASYMMETRY: how much later one host leaves all
of the collectives than the other is in the offset, and nobody can see it but by how much it varies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.run import RankInfo, RunInfo
from dsprof.schema import SYNCHRONIZING

from ..arrays import Float, Int, places
from ..columns import RankRows, as_rows
from .match import numbers
from .participants import is_numbered

LEAST_JUMP_NS: Final = 100_000_000
"""Ends of one collective lie milliseconds apart on a busy host; this is a clock."""
FEWEST: Final = 8
"""Collectives on each side of a jump."""
WINDOWS: Final = 20
FEWEST_WINDOWS: Final = 8
"""A drift is told from the medians of at most, and at least, so many stretches of the run."""
IN_WINDOW: Final = 3
"""Collectives of one, if there are as many."""
MOST_DRIFT: Final = 1e-3
"""Quartz is off by 1e-4 at most, and what sets clocks slews them by 5e-4."""
USUAL_DRIFT: Final = 1e-4
SURE: Final = 8.0
"""A drift moves the clock over the run by so many times what the windows scatter about it."""
ASYMMETRY: Final = 3.0
"""So many times the median of what single collectives differ from the line by, one host may leave all of them later."""
SIGMAS: Final = 3.0
SIGMA: Final = 1.4826
"""Standard deviation of a normal distribution whose median deviation is 1."""


@dataclass(frozen=True)
class _Offset:
    """How far a clock is ahead when it shows `t`: ns + drift * (t - at_ns)."""

    ns: float = 0.0
    drift: float = 0.0
    at_ns: int = 0
    error_ns: float = 0.0

    def through(self, other: _Offset) -> _Offset:
        """Ahead of a third clock, which that of a second is ahead of by `other`."""
        here = self.at_ns - self.ns - other.at_ns  # what the second shows then, from where its line begins
        return _Offset(
            self.ns + other.ns + other.drift * here,
            self.drift + other.drift * (1 - self.drift),
            self.at_ns,
            self.error_ns + other.error_ns,
        )


@dataclass(frozen=True)
class _Ends:
    """When synchronizing collectives ended on a rank, in order of collective and rank."""

    key: Int
    rank: Int
    step: Int
    end: Int


@dataclass(frozen=True)
class Clocks:
    """How far the clock of each rank's host is ahead of that of the first rank's.

    host_of: number of the host, by rank; of an unknown rank, as beyond its end, the first. offsets: by host.
    error_us: how far they may be apart all the same.
    """

    host_of: npt.NDArray[np.int32]
    offsets: tuple[_Offset, ...]
    error_us: float = 0.0
    warnings: tuple[str, ...] = ()

    def correct(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Rows, of any ranks, on the clock of the first."""
        ahead, drift, _ = self._lines
        if not (ahead.any() or drift.any()):
            return rows
        rank = rows["rank"].to_numpy(np.int64)
        host = np.append(self.host_of, np.int32(0))[np.minimum(rank, len(self.host_of))]
        start, length = rows["start_ns"].to_numpy(np.int64), rows["dur_ns"]
        aligned = start - self._ahead(start, host)
        moved: dict[str, Any] = {"start_ns": aligned}
        for name in ("issue_ns", "arrival_ns"):
            told = rows[name].notna().to_numpy(bool)
            if not told.any():
                continue  # a column without a value takes no room
            when = rows[name].to_numpy(np.int64, na_value=0).copy()
            when[told] -= self._ahead(when[told], host[told])
            moved[name] = pd.arrays.IntegerArray(when, ~told)
        if drift.any():  # so that what ended when the next began still does
            end = start + length.fillna(0).to_numpy(np.int64)
            end -= self._ahead(end, host)
            moved["dur_ns"] = pd.arrays.IntegerArray(end - aligned, length.isna().to_numpy(bool))
        return rows.assign(**moved)

    def _ahead(self, when: Int, host: npt.NDArray[np.int32]) -> Int:
        ahead, drift, at = self._lines
        moved: Int = ahead[host]
        if drift.any():
            moved += np.rint(drift[host] * (when - at[host])).astype(np.int64)
        return moved

    @cached_property
    def _lines(self) -> tuple[Int, Float, Int]:
        """The offsets as arrays, made once: of a thousand hosts they would take longer than a rank's rows."""
        return (
            np.array([round(offset.ns) for offset in self.offsets], np.int64),
            np.array([offset.drift for offset in self.offsets], np.float64),
            np.array([offset.at_ns for offset in self.offsets], np.int64),
        )


def find_clocks(rows: pd.DataFrame | RankRows, run: RunInfo) -> Clocks:
    """The clocks of the ranks whose rows these are; only their collectives are looked at."""
    infos = {item.rank: item for item in run.ranks}
    first_on: dict[str, RankInfo] = {}
    for rank in sorted(infos):
        first_on.setdefault(infos[rank].clock_name, infos[rank])
    if len(first_on) < 2:
        return Clocks(np.zeros(0, np.int32), (_Offset(),))
    number = {clock: i for i, clock in enumerate(first_on)}
    ranks = np.array(sorted(infos), np.int64)
    host_at = np.array([number[infos[rank].clock_name] for rank in ranks.tolist()], np.int64)
    offsets = _offsets(_collectives_of_hosts(_ends(as_rows(rows)), ranks, host_at), len(first_on))
    names = _host_names(list(first_on.values()))
    warnings = tuple(
        f"host {name}: no collective shared with {names[0]}, directly or through other hosts, so its clock could not "
        "be aligned"
        for name, offset in zip(names, offsets, strict=True)
        if offset is None
    )
    known = tuple(offset or _Offset() for offset in offsets)
    host_of_rank = np.zeros(int(ranks.max()) + 1, np.int32)
    host_of_rank[ranks] = host_at
    return Clocks(host_of_rank, known, max(offset.error_ns for offset in known) / 1e3, warnings)


def _host_names(first: list[RankInfo]) -> list[str]:
    """Of each clock, given by its first rank; with that rank where hosts share a name, or containers a host."""
    hosts = [item.host for item in first]
    return [item.host if hosts.count(item.host) == 1 else f"{item.host} (of rank {item.rank})" for item in first]


def _ends(rows: RankRows) -> _Ends:
    ended = np.flatnonzero(is_numbered(rows) & rows.known("dur_ns") & rows.are("name", *SYNCHRONIZING))
    key, rank = numbers(rows, ended), rows.whole("rank")[ended]
    end = rows.whole("start_ns")[ended] + rows.whole("dur_ns")[ended]
    order = np.lexsort((rank, key))
    key, rank = key[order], rank[order]
    once = np.append(True, (np.diff(key) != 0) | (np.diff(rank) != 0))[: len(order)]
    step = rows.whole("step")[ended]
    return _Ends(key[once], rank[once], step[order][once], end[order][once])


def _medians(values: Int, *groups: Int) -> tuple[Int, Float]:
    """Index of one of each group, in order, and the group's median."""
    order = np.lexsort((values, *groups))
    change = np.zeros(max(len(order) - 1, 0), bool)
    for group in groups:
        change |= np.diff(group[order]) != 0
    begins = np.flatnonzero(np.append(True, change)[: len(order)])
    count = np.diff(np.append(begins, len(order)))
    low, high = values[order[begins + (count - 1) // 2]], values[order[begins + count // 2]]
    return order[begins], low + (high - low) / 2


def _collectives_of_hosts(ends: _Ends, ranks: Int, host_at: Int) -> list[tuple[Int, Float]]:
    """Of each host the collectives, in order, and when they ended there (the median of its ranks)."""
    known = np.isin(ends.rank, ranks)
    key, end = ends.key[known], ends.end[known]
    host = host_at[np.searchsorted(ranks, ends.rank[known])]
    of, median = _medians(end, key, host)
    edges = np.searchsorted(host[of], np.arange(int(host_at.max()) + 2))
    ended = key[of]  # once: each host holds a part of it
    return [(ended[a:b], median[a:b]) for a, b in pairwise(edges.tolist())]


def _offsets(ended: list[tuple[Int, Float]], count: int) -> list[_Offset | None]:
    """How far each host's clock is ahead of the first's; None: they are joined by nothing.

    Of the ways from host to host that along which the errors are least, as they shrink with the root of the number of
    collectives that two hosts share.
    """
    found: list[_Offset | None] = [None] * count
    found[0] = _Offset()
    for this, before in _ways([keys for keys, _ in ended]):
        nearer = found[before]
        assert nearer is not None  # those that are nearer come first
        found[this] = _apart(ended[this], ended[before]).through(nearer)
    return found


def _ways(took_part: Sequence[Int]) -> list[tuple[int, int]]:
    """The hosts that something joins to the first, nearest first, each with the one before it on its shortest way.

    took_part: of each host in which collectives. From a host on a way is looked for only where it may be shorter than
    those that are known, and few hosts are: of a thousand hosts that all share the same collectives, each pair would
    have to be looked at else.
    """
    count = len(took_part)
    _, collective = np.unique(np.concatenate(took_part), return_inverse=True)
    of_host = np.cumsum([0, *map(len, took_part)])
    order = np.argsort(collective, kind="stable")
    hosts = np.repeat(np.arange(count), np.diff(of_host))[order]  # of the first collective, of the second, ...
    of_collective = np.searchsorted(collective[order], np.arange(int(collective.max(initial=-1)) + 2))
    least = 1 / np.sqrt(np.maximum(np.diff(of_host), 1))  # of any way from each
    length, before, open_ = np.full(count, np.inf), np.full(count, -1), np.ones(count, bool)
    length[0] = 0.0
    waiting, found = [(0.0, 0)], []
    while waiting:
        so_far, this = heappop(waiting)
        if not open_[this]:
            continue
        open_[this] = False
        if before[this] >= 0:
            found.append((this, int(before[this])))
        if not open_.any() or length[open_].max() <= so_far + least[this]:
            continue
        mine = collective[of_host[this] : of_host[this + 1]]
        first, each = of_collective[mine], of_collective[mine + 1] - of_collective[mine]
        shared = np.bincount(hosts[places(first, each)], minlength=count)
        other = np.flatnonzero(shared)
        way = so_far + 1 / np.sqrt(shared[other])
        shorter = open_[other] & (way < length[other])
        other, way = other[shorter], way[shorter]
        length[other], before[other] = way, this
        for entry in zip(way.tolist(), other.tolist(), strict=True):
            heappush(waiting, entry)
    return found


def _apart(one: tuple[Int, Float], other: tuple[Int, Float]) -> _Offset:
    """How far the clock of `one` is ahead of that of `other`, by the collectives of both."""
    _, at, there = np.intersect1d(one[0], other[0], assume_unique=True, return_indices=True)
    when, apart = one[1][at], one[1][at] - other[1][there]
    middle = float(int(np.median(apart)))
    rest = np.abs(apart - np.median(apart))
    order = np.argsort(when, kind="stable")
    begin, length = when[order[0]], float(when[order[-1]] - when[order[0]])
    windows = min(WINDOWS, max(len(apart) // IN_WINDOW, FEWEST_WINDOWS))
    if len(apart) < FEWEST_WINDOWS:  # neither a drift nor what they scatter by can be told from so few
        return _Offset(middle, error_ns=float(rest.max()) + USUAL_DRIFT * length / 2)
    moments = np.array([np.median(when[part] - begin) for part in np.array_split(order, windows)])
    levels = np.array([np.median(apart[part] - middle) for part in np.array_split(order, windows)])
    # A jump lies between few of the windows that are a quarter of the run apart, and so leaves the median alone.
    lag = windows // 4
    slope = float(np.median((levels[lag:] - levels[:-lag]) / np.maximum(moments[lag:] - moments[:-lag], 1)))
    scatter_ns = _scatter(levels - slope * moments)
    of_one = SIGMAS * scatter_ns / windows**0.5
    if abs(slope) > MOST_DRIFT or abs(slope) * moments[-1] <= SURE * scatter_ns or not slope:
        unseen = min(abs(slope), MOST_DRIFT) * length / 2
        return _Offset(middle, error_ns=unseen + of_one + ASYMMETRY * float(np.median(rest)))
    slope = _refined(moments, levels, slope, scatter_ns)
    left = apart - middle - slope * (when - begin)
    level = float(np.median(left))
    error = 2 * of_one + ASYMMETRY * float(np.median(np.abs(left - level)))  # a line is twice as uncertain at its ends
    return _Offset(middle + level, slope, int(begin), error)


def _scatter(values: Float) -> float:
    return SIGMA * float(np.median(np.abs(values - np.median(values))))


def _refined(moments: Float, levels: Float, slope: float, scatter_ns: float) -> float:
    """The slope of least squares, of windows that are near the line."""
    rest = levels - slope * moments
    near = np.abs(rest - np.median(rest)) <= SIGMAS * scatter_ns
    centred = moments[near] - moments[near].mean()
    squares = float((centred**2).sum())
    return float((centred * levels[near]).sum()) / squares if squares > 0 else slope


def find_jumps(rows: pd.DataFrame | RankRows) -> tuple[float, list[str]]:
    """By how much the clock of a rank moves against the others' during the run, microseconds, and warnings.

    No rank leaves a synchronizing collective before the last has come, so its ends on the ranks stay together.
    """
    ends = _ends(as_rows(rows))
    ranks = np.unique(ends.rank)
    if len(ranks) < 2:
        return 0.0, []
    begins = np.flatnonzero(np.append(True, np.diff(ends.key) != 0))
    count = np.diff(np.append(begins, len(ends.key)))
    # Of two ranks nobody can say which clock it was; of more, the one that differs.
    if len(ranks) > 2:
        usual = _medians(ends.end, ends.key)[1]
    else:
        usual = np.where(ends.rank[begins] == ranks[0], ends.end[begins].astype(np.float64), np.nan)
    apart = ends.end - np.repeat(usual, count)
    step = np.repeat(np.maximum.reduceat(ends.step, begins), count)
    order = np.lexsort((ends.key, step, ends.rank))
    order = order[~np.isnan(apart[order])]
    edges = np.searchsorted(ends.rank[order], np.append(ranks, ranks[-1] + 1))
    worst, warnings = 0.0, []
    for rank, low, high in zip(ranks.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if high - low < 2 * FEWEST:
            continue
        mine = apart[order[low:high]]
        early, late = float(np.median(mine[:FEWEST])), float(np.median(mine[-FEWEST:]))
        if abs(late - early) < LEAST_JUMP_NS:
            continue
        worst = max(worst, abs(late - early))
        beyond = np.abs(mine - early) > abs(late - early) / 2
        moved = int(step[order[low + int(beyond.argmax())]])
        warnings.append(
            f"rank {rank}: its clock moves by {(late - early) / 1e9:+.1f} s against the others' in step {moved}; who "
            "waited for whom is not known from there on"
        )
    return worst / 1e3, warnings
