"""What the streams of one rank's device did, where their kernels were traced: HTA's numbers in HTA's terms.

Compute is what kernels that neither communicate nor copy do; overlap the share of the communication during which one of
them runs. A stream's gap is host wait if what ends it was launched after the gap had begun, else kernel wait below
KERNEL_WAIT_NS, else other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.run import RunInfo
from dsprof.trace.kineto import is_computation, launch_pauses

from ..align.match import PAIRED, Matches
from ..arrays import Float, Int
from ..budget.intervals import Intervals
from ..budget.label import PHASE_PART, innermost
from ..budget.lanes import MAIN, OWN_LANES, STREAM
from ..columns import codes_of, may_hold

KERNEL_WAIT_NS: Final = 30_000
"""HTA's `consecutive_kernel_delay`."""
MEMORY: Final = ("Memcpy", "Memset", "Copy")
"""How the names of copies and fills begin."""
COMPUTATION, COMMUNICATION, MEMORY_KERNEL = "COMPUTATION", "COMMUNICATION", "MEMORY"
KERNEL_TYPES: Final = (COMPUTATION, COMMUNICATION, MEMORY_KERNEL)
UNKNOWN: Final = -1

STEP_COLUMNS: Final = (
    "step", "start_ns", "end_ns", "busy_ms", "idle_ms", "launching_ms", "in_optimizer_ms", "data_ms", "checkpoint_ms",
    "cpu_ms", "away_ms",
)  # fmt: skip
HOST_PART: Final = {**PHASE_PART, "checkpoint": "checkpoint"}
"""What a phase of the training thread says of it."""
COLUMNS: Final = (*dict.fromkeys((*PAIRED, "kind", "lane", "start_ns", "dur_ns", "issue_ns", "corr", "bytes")),)


@dataclass(frozen=True)
class StreamIdle:
    """What one stream's gaps were for, ns. Kernels of one stream that overlap make them shorter.

    unknown_ns: the part of host_wait_ns before kernels whose launch was not traced, which HTA counts there
    """

    stream: str
    host_wait_ns: int
    kernel_wait_ns: int
    other_ns: int
    unknown_ns: int = 0


@dataclass(frozen=True)
class DeviceTime:
    """One rank's device, from the beginning of its first kernel or copy to the end of its last.

    types_ns: kernel type, or types that overlap -> time; they are disjoint and sum to all that is not idle
    delay_us: median time from a launch's begin to the kernel's
    steps:    STEP_COLUMNS: of each step, how long the device did something (busy), and nothing (idle); of the latter,
              while what came next had not been launched and the training thread waited for nothing: how long it was
              loading (data), saving (checkpoint), computing on the CPU (cpu), busy with one launch after the other,
              this one under way included (launching; of that, in the optimizer: in_optimizer), or with something that
              the trace does not name (away)
    computing: when a computation ran
    exposed_ns: how long the device did what communicates, or what may: kernels whose names do not tell their kind; and
              nothing that surely computes
    unknown:  of that, the kernels whose kind is unknown: name -> ns, most first
    comm:     its communications: row in the matched table (UNKNOWN: none), name, group, bytes, start_ns, end_ns
    """

    rank: int
    kernel_time_ns: int
    types_ns: Mapping[str, int]
    streams: tuple[StreamIdle, ...]
    delay_us: float | None
    steps: pd.DataFrame
    computing: Intervals
    comm: pd.DataFrame
    exposed_ns: int = 0
    unknown: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def idle_ns(self) -> int:
        return self.kernel_time_ns - sum(self.types_ns.values())

    def _with(self, kind: str) -> int:
        return sum(ns for name, ns in self.types_ns.items() if kind in name.split(" overlapping "))

    @cached_property
    def compute_ns(self) -> int:
        return self._with(COMPUTATION)

    @property
    def non_compute_ns(self) -> int:
        return self.kernel_time_ns - self.idle_ns - self.compute_ns

    @cached_property
    def communication_ns(self) -> int:
        return self._with(COMMUNICATION)

    @cached_property
    def overlap_ns(self) -> int:
        """Communication while something is computed."""
        both = (name.split(" overlapping ") for name in self.types_ns)
        names = [" overlapping ".join(parts) for parts in both if COMPUTATION in parts and COMMUNICATION in parts]
        return sum(self.types_ns[name] for name in names)

    def to_dict(self) -> dict[str, Any]:
        """In HTA's terms, microseconds."""
        whole = max(self.kernel_time_ns, 1)
        overlap = 100 * self.overlap_ns / self.communication_ns if self.communication_ns else None
        return {
            "rank": self.rank,
            "kernel_time_us": self.kernel_time_ns / 1e3,
            "idle_time_us": self.idle_ns / 1e3,
            "compute_time_us": self.compute_ns / 1e3,
            "non_compute_time_us": self.non_compute_ns / 1e3,
            "idle_time_pctg": round(100 * self.idle_ns / whole, 2),
            "compute_time_pctg": round(100 * self.compute_ns / whole, 2),
            "non_compute_time_pctg": round(100 * self.non_compute_ns / whole, 2),
            "comp_comm_overlap_pctg": None if overlap is None else round(overlap, 2),
            "exposed_communication_us": (self.communication_ns - self.overlap_ns) / 1e3,
            "kernel_types_us": {name: ns / 1e3 for name, ns in self.types_ns.items()},
            "idle_time_breakdown": [
                {"stream": one.stream, "host_wait_us": one.host_wait_ns / 1e3,
                 "kernel_wait_us": one.kernel_wait_ns / 1e3, "other_us": one.other_ns / 1e3,
                 "of_host_wait_unknown_us": one.unknown_ns / 1e3}
                for one in self.streams
            ],
            "launch_delay_us": self.delay_us,
        }  # fmt: skip


def device_time(rows: pd.DataFrame, rank: int, matches: Matches, run: RunInfo) -> DeviceTime | None:
    """Of one rank's rows; None where nothing of a device was traced."""
    if not may_hold(rows["kind"], lambda kind: kind == "kernel"):
        return None
    lane, names = codes_of(rows["lane"])
    of_stream = np.append([name.startswith(STREAM) for name in names.tolist()], False).astype(bool)[lane]
    done = rows["dur_ns"].notna().to_numpy(bool) & rows["kind"].isin(["kernel", "copy", "comm"]).to_numpy(bool)
    # What was measured by events is a phase as a whole, no kernel.
    phase = ((rows["kind"] == "kernel") & (rows["source"] == "measured")).to_numpy(bool)
    chosen = np.flatnonzero(of_stream & done & ~phase)
    if not len(chosen) or not (rows["kind"].to_numpy(object)[chosen] == "kernel").any():
        return None
    work = rows[list(COLUMNS)].iloc[chosen]
    start = work["start_ns"].to_numpy(np.int64)
    end = start + work["dur_ns"].to_numpy(np.int64)
    launch = _launches(rows, work)
    kind = _types(work)
    spans = [Intervals.union(start[kind == one], end[kind == one]) for one in range(len(KERNEL_TYPES))]
    known = launch != UNKNOWN
    exposed_ns, unknown = _unknown(work["name"], kind, start, end)
    return DeviceTime(
        rank=rank,
        kernel_time_ns=int(end.max() - start.min()),
        types_ns=_overlaps(spans),
        streams=_streams(names, lane[chosen], start, end, launch),
        delay_us=float(np.median(start[known] - launch[known])) / 1e3 if known.any() else None,
        steps=_steps(rows, start, end, launch),
        computing=spans[0],
        comm=_communications(work[kind == 1], matches, run),
        exposed_ns=exposed_ns,
        unknown=unknown,
    )


def _unknown(names: pd.Series[str], kind: Int, start: Int, end: Int) -> tuple[int, dict[str, int]]:
    """`exposed_ns` and `unknown` of DeviceTime."""
    codes, words = codes_of(names)
    strange = (kind == 0) & ~np.array([is_computation(word) for word in words.tolist()], bool)[codes]
    computes, communicates = (kind == 0) & ~strange, kind == 1
    computing = Intervals.union(start[computes], end[computes])
    exposed = Intervals.union(start[strange | communicates], end[strange | communicates]) - computing
    alone = exposed - Intervals.union(start[communicates], end[communicates])
    spent = alone.before(end) - alone.before(start)
    total = np.zeros(len(words), np.int64)
    np.add.at(total, codes[strange], spent[strange])
    order = np.argsort(-total, kind="stable")
    length = int((exposed.end - exposed.start).sum())
    return length, {str(words[one]): int(total[one]) for one in order.tolist() if total[one] > 0}


def _launches(rows: pd.DataFrame, work: pd.DataFrame) -> Int:
    """When each was launched, UNKNOWN: not told."""
    calls = rows[["corr", "start_ns"]][(rows["kind"] == "launch") & rows["corr"].notna()].drop_duplicates("corr")
    index = pd.Index(calls["corr"].astype("int64"))
    at = index.get_indexer(work["corr"].fillna(UNKNOWN).astype("int64"))
    found: Int = np.where(at >= 0, np.append(calls["start_ns"].to_numpy(np.int64), 0)[at], UNKNOWN)
    return found


def _types(work: pd.DataFrame) -> Int:
    """Of each, its place in KERNEL_TYPES."""
    codes, names = codes_of(work["name"])
    memory = np.append([name.startswith(MEMORY) for name in names.tolist()], False).astype(bool)[codes]
    comm = (work["kind"] == "comm").to_numpy(bool)
    copy = (work["kind"] == "copy").to_numpy(bool)
    return np.where(comm, 1, np.where(copy | memory, 2, 0))


def _overlaps(spans: list[Intervals]) -> dict[str, int]:
    edges = np.unique(np.concatenate([part for one in spans for part in (one.start, one.end)]))
    runs = np.zeros(max(len(edges) - 1, 0), np.int64)
    for place, one in enumerate(spans):
        runs |= np.where(one.holds(edges[:-1]), 1 << place, 0)
    length = np.diff(edges)
    found = {}
    for mask in range(1, 1 << len(spans)):
        ns = int(length[runs == mask].sum())
        if ns:
            words = [name for place, name in enumerate(KERNEL_TYPES) if mask >> place & 1]
            found[" overlapping ".join(words)] = ns
    return found


def _streams(names: npt.NDArray[np.object_], lane: Int, start: Int, end: Int, launch: Int) -> tuple[StreamIdle, ...]:
    found = []
    for one in np.unique(lane).tolist():
        mine = np.flatnonzero(lane == one)
        mine = mine[np.argsort(start[mine], kind="stable")]
        before, gap = end[mine][:-1], start[mine][1:] - end[mine][:-1]
        unknown = launch[mine][1:] == UNKNOWN
        host = unknown | (launch[mine][1:] > before)
        near = ~host & (gap < KERNEL_WAIT_NS)
        parts = (int(gap[chosen].sum()) for chosen in (host, near, ~host & ~near, unknown))
        found.append(StreamIdle(str(names[one]).removeprefix(STREAM), *parts))
    return tuple(found)


def _steps(rows: pd.DataFrame, start: Int, end: Int, launch: Int) -> pd.DataFrame:
    told = rows[["step", "start_ns", "dur_ns"]][(rows["kind"] == "step") & rows["dur_ns"].notna()]
    begin = told["start_ns"].to_numpy(np.int64)
    finish = begin + told["dur_ns"].to_numpy(np.int64)
    order = np.argsort(start, kind="stable")
    reach = np.maximum.accumulate(end[order])
    low, high = reach[:-1], start[order][1:]
    began = launch[order][1:]
    gap = high > low
    late = gap & (began > low)
    idle = Intervals.union(low[gap], high[gap])
    for_host = Intervals.union(low[late], np.minimum(began, high)[late])
    main = rows[["name", "kind", "start_ns", "dur_ns"]][(rows["lane"] == MAIN) & rows["dur_ns"].notna()]
    phases = innermost(main[main["kind"] == "phase"], HOST_PART)
    waits = main[main["kind"] == "wait"]  # for peers: then it is not the launches that are slow
    begun = waits["start_ns"].to_numpy(np.int64)
    waiting = Intervals.union(begun, begun + waits["dur_ns"].to_numpy(np.int64))
    for_host = for_host - waiting
    loading, saving = for_host & phases["data"], for_host & phases["checkpoint"]
    for_host = for_host - phases["data"] - phases["checkpoint"]
    on_cpu = for_host & _on_cpu(rows)
    for_host = for_host - on_cpu
    away = for_host & _pauses(rows)
    # On its way to the device, which takes microseconds; were the host ahead, it would be there in time.
    sent = np.minimum(began, high)[late]
    launching = (for_host - away) | (Intervals.union(sent, np.minimum(high[late], sent + KERNEL_WAIT_NS)) - waiting)

    def within(spans: Intervals) -> Float:
        return (spans.before(finish) - spans.before(begin)) / 1e6

    when = np.sort(start)
    seen = np.searchsorted(when, finish) > np.searchsorted(when, begin)  # only some may have been traced
    found = pd.DataFrame(
        {
            "step": told["step"].to_numpy(np.int64), "start_ns": begin, "end_ns": finish,
            "busy_ms": within(Intervals.union(start, end)), "idle_ms": within(idle),
            "launching_ms": within(launching), "in_optimizer_ms": within(launching & phases["optimizer"]),
            "data_ms": within(loading), "checkpoint_ms": within(saving),
            "cpu_ms": within(on_cpu), "away_ms": within(away),
        }
    )  # fmt: skip
    return found[seen].reset_index(drop=True)


def _on_cpu(rows: pd.DataFrame) -> Intervals:
    """When the training thread, or that of its backward, was in an operator that puts nothing on the device."""
    mine = rows[["start_ns", "dur_ns"]][
        (rows["kind"] == "kernel") & rows["lane"].isin(OWN_LANES) & rows["dur_ns"].notna()
    ]
    begin = mine["start_ns"].to_numpy(np.int64)
    return Intervals.union(begin, begin + mine["dur_ns"].to_numpy(np.int64))


def _pauses(rows: pd.DataFrame) -> Intervals:
    calls = rows[["start_ns", "dur_ns"]][(rows["kind"] == "launch") & rows["dur_ns"].notna()]
    begin = calls["start_ns"].to_numpy(np.int64)
    return Intervals.union(*launch_pauses(begin, begin + calls["dur_ns"].to_numpy(np.int64)))


def _communications(comm: pd.DataFrame, matches: Matches, run: RunInfo) -> pd.DataFrame:
    target = np.full(len(comm), UNKNOWN)
    numbered = (comm["seq"].notna() & comm["group"].notna()).to_numpy(bool)
    if numbered.any() and matches.unique:
        target[numbered] = matches.find(comm[numbered], run)
    start = comm["start_ns"].to_numpy(np.int64)
    return pd.DataFrame(
        {
            "row": target, "name": comm["name"].astype(str).to_numpy(object),
            "group": comm["group"].astype(object).fillna("").to_numpy(object),
            "bytes": comm["bytes"].fillna(UNKNOWN).to_numpy(np.int64), "start_ns": start,
            "end_ns": start + comm["dur_ns"].to_numpy(np.int64),
        }
    )  # fmt: skip
