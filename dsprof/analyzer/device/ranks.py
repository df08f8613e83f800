"""What the devices' streams did, where their kernels were traced: HTA's numbers in HTA's terms for each rank, and what
takes all ranks together: who came late to which collective, what of it was exposed, and at which bandwidth.

Compute is what kernels that neither communicate nor copy do; overlap the share of the communication during which one of
them runs. A stream's gap is host wait if what ends it was launched after the gap had begun, else kernel wait below
KERNEL_WAIT_NS, else other. A rank comes to a collective where its kernel begins; the transfer begins with the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.run import RunInfo

from .intervals import Int, Intervals
from .lanes import MAIN, STREAM
from .match import PAIRED, Matches, codes_of
from .painting import innermost

Float = npt.NDArray[np.float64]

KERNEL_WAIT_NS: Final = 30_000
"""HTA's `consecutive_kernel_delay`."""
MEMORY: Final = ("Memcpy", "Memset", "Copy")
"""How the names of copies and fills begin."""
COMPUTATION, COMMUNICATION, MEMORY_KERNEL = "COMPUTATION", "COMMUNICATION", "MEMORY"
KERNEL_TYPES: Final = (COMPUTATION, COMMUNICATION, MEMORY_KERNEL)
UNKNOWN: Final = -1
BUS_FACTOR: Final = {
    "all_reduce": (2.0, 0.0), "all_gather": (1.0, 0.0), "reduce_scatter": (1.0, 0.0), "all_to_all": (1.0, 0.0),
    "broadcast": (0.0, 1.0), "reduce": (0.0, 1.0),
}  # fmt: skip
"""Bus bandwidth of nccl-tests over that of the algorithm: (n - 1) / n times the first, and the second."""

STEP_COLUMNS: Final = ("step", "start_ns", "end_ns", "idle_ms", "host_ms", "data_ms")
WAIT_COLUMNS: Final = ("rank", "step", "row", "late_rank", "start_ns", "arrival_ns", "end_ns", "peer_ms", "saved_ms",
                       "transfer_ms")  # fmt: skip


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
    steps:    STEP_COLUMNS: of each step, how long the device did nothing; of that, while what came next had not been
              launched, and the training thread was in a phase of the step (host) or loading (data)
    computing: when a computation ran
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


@dataclass(frozen=True)
class Bandwidth:
    """Of the collectives of one name in a group: how many, bytes of the median one, and GB/s by nccl-tests' formulas,
    medians. `at_least`: a rank of the group is missing, so that waiting for it may be in the time."""

    name: str
    group: str
    ranks: int
    count: int
    bytes: int
    algbw_gbps: float
    busbw_gbps: float
    at_least: bool


@dataclass(frozen=True)
class Devices:
    """All ranks' devices.

    waits: WAIT_COLUMNS: of each rank in each collective that was matched on several, how long it waited for the last
           (peer), how much less had that one been as early as the one before it (saved), and how long the transfer took
           (transfer): each as far as nothing was computed meanwhile
    """

    ranks: Mapping[int, DeviceTime]
    waits: pd.DataFrame
    bandwidths: tuple[Bandwidth, ...]

    @cached_property
    def steps(self) -> Int:
        """Numbers of the steps in which every rank's device was traced, in order."""
        tables = [one.steps["step"].to_numpy(np.int64) for one in self.ranks.values()]
        return np.unique(tables[0][np.all([np.isin(tables[0], other) for other in tables], axis=0)])

    @property
    def matched(self) -> int:
        """How many collectives were matched on several ranks."""
        return int(self.waits["row"].nunique())

    def late(self) -> pd.DataFrame:
        """rank, times (it was the last), peer_ms (exposed waiting for it, mean over all ranks), most first."""
        each = self.waits.drop_duplicates("row").groupby("late_rank").size().rename("times")
        cost = self.waits.groupby("late_rank")["peer_ms"].sum() / max(len(self.ranks), 1)
        table = pd.concat([each, cost], axis=1).rename_axis("rank").reset_index()
        return table.sort_values("peer_ms", ascending=False, ignore_index=True)

    @cached_property
    def delays(self) -> pd.DataFrame:
        """late_rank, rank, step, ms: how long the device of `rank` stood still in a step since `late_rank` alone came
        late to collectives. In the first step that was traced, without what a late begin of that step explains: what
        was before it is not in the trace, and profilers do not start at one moment."""
        others = self.waits[self.waits["rank"] != self.waits["late_rank"]]
        table = others.groupby(["late_rank", "rank", "step"], as_index=False)["saved_ms"].sum()
        begun = self.began_late.set_index(["rank", "step"])["ms"].to_dict()
        explained = [begun.get(place, 0.0) for place in zip(table["late_rank"], table["step"], strict=True)]
        ms = (table.pop("saved_ms") - np.array(explained, np.float64)).clip(lower=0.0)
        return table.assign(ms=ms)

    @cached_property
    def began_late(self) -> pd.DataFrame:
        """rank, step, ms: in which step, the first of those traced one after the other, a rank began last, and by how
        much."""
        first = self.steps[np.append(True, np.diff(self.steps) > 1)[: len(self.steps)]]
        found = []
        for step in first.tolist() if len(self.ranks) > 1 else ():
            starts = {rank: int(one.steps.loc[one.steps["step"] == step, "start_ns"].iloc[0])
                      for rank, one in self.ranks.items()}  # fmt: skip
            *_, second, last = sorted(starts, key=lambda rank: starts[rank])
            found.append((last, step, (starts[last] - starts[second]) / 1e6))
        return pd.DataFrame(found, columns=["rank", "step", "ms"])

    def delays_by_step(self, steps: Int) -> pd.DataFrame:
        """[rank, step] how long the others' devices stood still for a rank alone, mean over the others, ms."""
        total = self.delays.pivot_table(index="late_rank", columns="step", values="ms", aggfunc="sum")
        mean = total.reindex(index=pd.Index(list(self.ranks), name="rank"), columns=pd.Index(steps, name="step"))
        return mean.fillna(0.0) / max(len(self.ranks) - 1, 1)

    def to_dict(self) -> dict[str, Any]:
        late = self.late()
        return {
            "ranks": [one.to_dict() for one in self.ranks.values()],
            "collectives_matched": self.matched,
            "late": [
                {"rank": int(rank), "times_last": int(times), "exposed_wait_ms": float(cost)}
                for rank, times, cost in zip(late["rank"], late["times"], late["peer_ms"], strict=True)
            ],
            "exposed_transfer_ms": float(self.waits["transfer_ms"].sum()) / max(len(self.ranks), 1),
            "bandwidths": [vars(one) for one in self.bandwidths],
        }


# --- a rank by itself ---------------------------------------------------------------------------

COLUMNS: Final = (*dict.fromkeys((*PAIRED, "kind", "lane", "start_ns", "dur_ns", "issue_ns", "corr", "bytes")),)


def device_time(rows: pd.DataFrame, rank: int, matches: Matches, run: RunInfo) -> DeviceTime | None:
    """Of one rank's rows; None where nothing of a device was traced."""
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
    return DeviceTime(
        rank=rank,
        kernel_time_ns=int(end.max() - start.min()),
        types_ns=_overlaps(spans),
        streams=_streams(names, lane[chosen], start, end, launch),
        delay_us=float(np.median(start[known] - launch[known])) / 1e3 if known.any() else None,
        steps=_steps(rows, start, end, launch),
        computing=spans[0],
        comm=_communications(work[kind == 1], matches, run),
    )


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
    phases = innermost(main[main["kind"] == "phase"])
    issuing = phases["compute"] | phases["optimizer"]

    def within(spans: Intervals) -> Float:
        return (spans.before(finish) - spans.before(begin)) / 1e6

    when = np.sort(start)
    seen = np.searchsorted(when, finish) > np.searchsorted(when, begin)  # only some may have been traced
    found = pd.DataFrame(
        {
            "step": told["step"].to_numpy(np.int64), "start_ns": begin, "end_ns": finish, "idle_ms": within(idle),
            "host_ms": within(for_host & issuing), "data_ms": within(for_host & phases["data"]),
        }
    )  # fmt: skip
    return found[seen].reset_index(drop=True)


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


# --- all ranks ----------------------------------------------------------------------------------


def compare_devices(ranks: Mapping[int, DeviceTime], collectives: pd.DataFrame, run: RunInfo) -> Devices | None:
    """None where no rank's device was traced."""
    if not ranks:
        return None
    tables = [one.comm.assign(rank=rank) for rank, one in ranks.items()]
    comm = pd.concat(tables, ignore_index=True)
    return Devices(ranks, _waits(ranks, comm, collectives), _bandwidths(comm, collectives, run))


def _waits(ranks: Mapping[int, DeviceTime], comm: pd.DataFrame, collectives: pd.DataFrame) -> pd.DataFrame:
    matched = comm[comm["row"] != UNKNOWN]
    target = collectives.iloc[matched["row"]]
    together = ((target["ranks"] > 1) & (target["needs"] == "all")).to_numpy(bool)
    matched, target = matched[together], target[together]
    if matched.empty:
        return pd.DataFrame({name: pd.Series(dtype="int64") for name in WAIT_COLUMNS})
    start, end = matched["start_ns"].to_numpy(np.int64), matched["end_ns"].to_numpy(np.int64)
    second = _last_but_one(matched["row"].to_numpy(np.int64), start)
    arrival = np.clip(target["last_ns"].to_numpy(np.int64), start, end)
    table = pd.DataFrame(
        {
            "rank": matched["rank"].to_numpy(np.int64), "step": target["step"].to_numpy(np.int64),
            "row": matched["row"].to_numpy(np.int64), "late_rank": target["late_rank"].to_numpy(np.int64),
            "start_ns": start, "arrival_ns": arrival, "end_ns": end,
        }
    )  # fmt: skip
    spans = {"peer_ms": (start, arrival), "saved_ms": (np.clip(second, start, arrival), arrival)}
    spans["transfer_ms"] = (arrival, end)
    for name, (low, high) in spans.items():
        spent = (high - low).astype(np.float64)
        for rank, one in ranks.items():
            mine = (table["rank"] == rank).to_numpy(bool)
            spent[mine] -= one.computing.before(high[mine]) - one.computing.before(low[mine])
        table[name] = spent / 1e6
    return table


def _last_but_one(row: Int, start: Int) -> Int:
    """Of each, when the last but one of its collective began; the last, where there is but one."""
    order = np.lexsort((start, row))
    last = np.append(np.flatnonzero(np.diff(row[order])), len(order) - 1)
    several = np.append(False, row[order][1:] == row[order][:-1])[last]
    found: Int = start[order][last - several][np.searchsorted(row[order][last], row)]
    return found


def _bandwidths(comm: pd.DataFrame, collectives: pd.DataFrame, run: RunInfo) -> tuple[Bandwidth, ...]:
    """Of collectives whose bytes and number of ranks are known."""
    found = []
    known = comm[(comm["bytes"] > 0) & comm["name"].isin(list(BUS_FACTOR))]
    for (name, group), of in known.groupby(["name", "group"], sort=True):
        size = int(run.group(group).get("size") or len(run.group(group).get("ranks") or ()))
        if size < 2:
            continue
        seen = np.zeros(len(of), np.int64)
        begin = of["start_ns"].to_numpy(np.int64, copy=True)
        row = of["row"].to_numpy(np.int64)
        matched = row != UNKNOWN
        seen[matched] = collectives["ranks"].to_numpy(np.int64)[row[matched]]
        whole = seen >= size
        begin[whole] = np.maximum(begin[whole], collectives["last_ns"].to_numpy(np.int64)[row[whole]])
        spent = of["end_ns"].to_numpy(np.int64) - begin
        sound = spent > 0
        if not sound.any():
            continue
        rate = of["bytes"].to_numpy(np.float64)[sound] / spent[sound]
        share, flat = BUS_FACTOR[str(name)]
        median = float(np.median(rate))
        found.append(
            Bandwidth(
                str(name), str(group), size, int(of["row"].nunique()) if matched.all() else len(of),
                int(of["bytes"].median()), median, median * (share * (size - 1) / size + flat),
                at_least=not bool(whole[sound].all()),
            )
        )  # fmt: skip
    return tuple(found)
