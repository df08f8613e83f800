"""What takes the devices of all ranks together: who came late to which collective, what of it was exposed, and at which
bandwidth. A rank comes to a collective where its kernel begins; the transfer begins with the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import pandas as pd

from dsprof.run import RunInfo

from ..arrays import Int
from .stream_time import UNKNOWN, DeviceTime

BUS_FACTOR: Final = {
    "all_reduce": (2.0, 0.0), "all_gather": (1.0, 0.0), "reduce_scatter": (1.0, 0.0), "all_to_all": (1.0, 0.0),
    "broadcast": (0.0, 1.0), "reduce": (0.0, 1.0),
}  # fmt: skip
"""Bus bandwidth of nccl-tests over that of the algorithm: (n - 1) / n times the first, and the second; by collective,
of those that it is defined for."""
WAIT_COLUMNS: Final = ("rank", "step", "row", "late_rank", "start_ns", "arrival_ns", "end_ns", "peer_ms", "saved_ms",
                       "transfer_ms")  # fmt: skip


def bus_factor(name: str, ranks: int) -> float:
    """Bus bandwidth over that of the algorithm in a group of so many ranks. name: of BUS_FACTOR."""
    share, flat = BUS_FACTOR[name]
    return share * (ranks - 1) / ranks + flat


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
        median = float(np.median(rate))
        found.append(
            Bandwidth(
                str(name), str(group), size, int(of["row"].nunique()) if matched.all() else len(of),
                int(of["bytes"].median()), median, median * bus_factor(str(name), size),
                at_least=not bool(whole[sound].all()),
            )
        )  # fmt: skip
    return tuple(found)
