"""Memory over the steps of a live run: what the ranks' `mem` rows tell of devices and of the process (`host`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.run import RunInfo, last_processes
from dsprof.schema import (
    BETWEEN_STEPS,
    HOST,
    MEMORY_COUNTS,
    MEMORY_EVERY,
    MEMORY_LANE,
    MEMORY_LIMITS,
    MEMORY_NOW,
    MEMORY_PARTS,
    MEMORY_PEAKS,
)

from ..columns import may_hold

MOST_POINTS: Final = 200
"""Steps of a rank that are kept: of more, neighbours are joined by their maximum."""
NUMBERS: Final = (*MEMORY_NOW, *MEMORY_PEAKS, *MEMORY_LIMITS, *MEMORY_COUNTS, *MEMORY_PARTS, BETWEEN_STEPS)
COLUMNS: Final = ("rank", "place", "step", *NUMBERS)
"""Of the table: rank, place (`host`, `cuda.0`), the step that had ended, and a column a number, NaN where it was not
written: bytes, but for schema.MEMORY_COUNTS. `step` is that of the last of those that were joined."""
HELD: Final = {False: ("allocated", "allocated_peak"), True: ("resident", "resident_peak")}
"""Whether it is the host -> what is in use, and the most of it."""
LASTING: Final = (*MEMORY_NOW, *MEMORY_PEAKS, *MEMORY_LIMITS, *MEMORY_COUNTS)
"""What stays as it is until it is written again."""


NOTHING: Final = pd.DataFrame({name: pd.Series(dtype="object" if name == "place" else "float64") for name in COLUMNS})


def nothing() -> pd.DataFrame:
    return NOTHING.copy()


def sum_memory(rows: pd.DataFrame, rank: int) -> pd.DataFrame:
    """The table (COLUMNS) of one rank, by place and step."""
    if not may_hold(rows["kind"], lambda kind: kind == "mem"):
        return nothing()
    mem = rows[["name", "lane", "purpose", "step", "start_ns", "bytes", "value"]][rows["kind"] == "mem"]
    if mem.empty:
        return nothing()
    lane = mem["lane"].astype(str)
    mem = mem[lane.str.startswith(MEMORY_LANE) & mem["purpose"].isna() & mem["name"].isin(NUMBERS)]
    if mem.empty:
        return nothing()
    long = pd.DataFrame(
        {
            "place": mem["lane"].astype(str).str.removeprefix(MEMORY_LANE),
            # Written when a step has ended, so in the next.
            "step": np.maximum(mem["step"].to_numpy(np.int64) - 1, -1),
            "name": mem["name"].astype(str),
            "number": mem["bytes"].astype("float64").fillna(mem["value"]),
        }
    )
    first = mem["start_ns"].argsort(kind="stable")
    wide = long.iloc[first].pivot_table(index=["place", "step"], columns="name", values="number", aggfunc="first")
    wide = wide.reindex(columns=list(NUMBERS)).reset_index()
    ended = rows.loc[(rows["kind"] == "step") & rows["dur_ns"].notna(), "step"].to_numpy(np.int64)
    table = pd.concat([_thinned(_at_each_step(part, ended)) for _, part in wide.groupby("place")])
    return table.assign(rank=rank).reindex(columns=list(COLUMNS)).reset_index(drop=True)


def _at_each_step(part: pd.DataFrame, ended: npt.NDArray[np.int64]) -> pd.DataFrame:
    """With a row for each step that ended while it was sampled: a number that was not written is as it was."""
    steps = part["step"].to_numpy(np.int64)
    between = ended[(ended > steps[0]) & (ended <= steps[-1] + MEMORY_EVERY)]
    every = part.set_index("step").reindex(np.union1d(steps, between)).rename_axis("step")
    every[["place", *LASTING]] = every[["place", *LASTING]].ffill()
    return every.reset_index()


def _thinned(part: pd.DataFrame) -> pd.DataFrame:
    width = -(-len(part) // MOST_POINTS)
    if width == 1:
        return part
    window = np.arange(len(part)) // width
    return part.groupby(window).max()


@dataclass(frozen=True)
class MemoryUse:
    """What a rank had at a place; bytes, None: not known.

    peak:     the most that was in use, and reserved: the most that the allocator held (of the host as much)
    capacity: what there is for it
    share:    of the capacity, what this rank and all others that have it in common used, each at its own peak; 0 to 1
    parts:    schema.MEMORY_PARTS -> the most of it that was seen
    between:  what lasts from step to step: schema.BETWEEN_STEPS, the most of it that was seen
    """

    rank: int
    place: str
    peak: int
    reserved: int
    capacity: int | None
    share: float | None
    retries: int
    ooms: int
    parts: Mapping[str, int] = field(default_factory=dict)
    between: int | None = None

    @property
    def on_host(self) -> bool:
        return self.place == HOST

    def to_dict(self) -> dict[str, Any]:
        return {
            "rank": self.rank, "place": self.place, "peak": self.peak, "reserved": self.reserved,
            "capacity": self.capacity, "share": self.share, "retries": self.retries, "ooms": self.ooms,
            "parts": dict(self.parts), "between": self.between,
        }  # fmt: skip


def memory_uses(table: pd.DataFrame, run: RunInfo) -> tuple[MemoryUse, ...]:
    """By rank, devices first. table: of all ranks."""
    rank_places = [
        _use(int(rank), str(place), part) for (rank, place), part in table.groupby(["rank", "place"], sort=True)
    ]
    shared = _shares(rank_places, run)
    return tuple(shared)


def _use(rank: int, place: str, part: pd.DataFrame) -> MemoryUse:
    now, most = HELD[place == HOST]
    peak = int(np.nanmax([0.0, part[now].max(), part[most].max()]))
    reserved = int(np.nanmax([peak, part["reserved"].max(), part["reserved_peak"].max()]))
    capacity = part["capacity"].dropna()
    counts = part[list(MEMORY_COUNTS)].max().fillna(0)
    parts = {name: int(part[name].max()) for name in MEMORY_PARTS if part[name].notna().any()}
    return MemoryUse(
        rank, place, peak, reserved, int(capacity.iloc[-1]) if len(capacity) else None, None, int(counts["retries"]),
        int(counts["ooms"]), parts, int(part[BETWEEN_STEPS].max()) if part[BETWEEN_STEPS].notna().any() else None,
    )  # fmt: skip


def _shares(uses: Sequence[MemoryUse], run: RunInfo) -> list[MemoryUse]:
    """With `share`. Ranks of one host have its memory, or their cgroup's, in common."""
    host_of = {item.rank: item.host for item in last_processes(run.ranks)}
    path_of = {fact.get("rank"): fact.get("path") for fact in run.facts if fact.get("fact") == "memory_limits"}
    together: dict[Any, int] = {}

    def pool(use: MemoryUse) -> tuple[Any, ...]:
        place = (path_of.get(use.rank),) if use.on_host else (use.place, use.rank)
        return (host_of.get(use.rank), *place, use.capacity)

    for use in uses:
        together[pool(use)] = together.get(pool(use), 0) + use.peak
    return [
        use if not use.capacity else MemoryUse(**{**vars(use), "share": together[pool(use)] / use.capacity})
        for use in uses
    ]


def main_place(uses: Sequence[MemoryUse], rank: int) -> MemoryUse | None:
    """Where a rank's tensors are: the device with most of them, else the host."""
    mine = [use for use in uses if use.rank == rank]
    return max(mine, key=lambda use: (not use.on_host, use.peak), default=None)
