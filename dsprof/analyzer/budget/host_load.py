"""How busy the cores are. On a CPU job, threads contend for them: work that is moved beside other work is only free
while a core is idle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dsprof.run import RunInfo

from ..arrays import Bool, Float, Int
from ..columns import RankRows, as_rows, is_one_of
from .uncaptured_ranks import uncaptured_on


class Gauges:
    """What the gauges say that count seconds: each is read where a step ends, on every rank.

    ranks, steps: [R] and [S], those with ordinary steps, and these
    wall_ms:      [R, S], how long each took; NaN where a rank lacks one
    """

    def __init__(self, rows: pd.DataFrame | RankRows, steps: pd.DataFrame) -> None:
        ordinary = steps[["rank", "step", "start_ns", "dur_ns"]][steps["ordinary"]]
        self._rows = as_rows(rows).table[["kind", "rank", "name", "start_ns", "value"]]
        self._spent: dict[str, Float] = {}
        ranks, self._rank = np.unique(ordinary["rank"].to_numpy(np.int64), return_inverse=True)
        self.steps, self._step = np.unique(ordinary["step"].to_numpy(np.int64), return_inverse=True)
        self.ranks: tuple[int, ...] = tuple(ranks.tolist())
        self._begin = ordinary["start_ns"].to_numpy(np.int64)
        self._end = self._begin + ordinary["dur_ns"].to_numpy(np.int64)
        self.wall_ms = self._wide((self._end - self._begin) / 1e6)

    def names(self, beginning: str) -> tuple[str, ...]:
        """The gauges whose names begin so."""
        names = pd.unique(self._rows["name"][is_one_of(self._rows["kind"], "gauge")].dropna()).astype(str).tolist()
        return tuple(sorted(name for name in names if name.startswith(beginning)))

    def spent(self, gauge: str) -> Float:
        """By how much `gauge` rose in each ordinary step, ms, [R, S]; NaN on ranks without it, and only there.

        A step before the first reading is taken to have spent the mean of the others.
        """
        if gauge not in self._spent:
            self._spent[gauge] = self._rise(gauge)
        return self._spent[gauge]

    def _rise(self, gauge: str) -> Float:
        rows = self._rows
        rows = rows[is_one_of(rows["kind"], "gauge") & is_one_of(rows["name"], gauge) & rows["rank"].isin(self.ranks)]
        rank, when = np.searchsorted(self.ranks, rows["rank"].to_numpy(np.int64)), rows["start_ns"].to_numpy(np.int64)
        order = np.lexsort((when, rank))
        rank, when, value = rank[order], when[order], rows["value"].to_numpy(np.float64, na_value=np.nan)[order]
        begin, end = (_read(rank, when, value, self._rank, at) for at in (self._begin, self._end))
        spent = self._wide((end - begin) * 1e3)
        spent[np.bincount(rank, minlength=len(self.ranks)) < 2] = np.nan
        known = np.isfinite(spent)
        mean = np.where(known, spent, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
        mean[~known.any(axis=1)] = np.nan
        return np.where(known, spent, mean[:, None])

    def _wide(self, values: Float) -> Float:
        """[R, S] of what is given for each ordinary step of each rank."""
        table = np.full((len(self.ranks), len(self.steps)), np.nan)
        table[self._rank, self._step] = values
        return table


def _read(rank: Int, when: Int, value: Float, at_rank: Int, at: Int) -> Float:
    """What each rank's samples, by rank and time, say for other moments: on the line between the two around it, the
    last one's value after it, NaN before the first."""
    count = len(when)
    turn = np.lexsort((np.arange(count + len(at)) >= count, np.append(when, at), np.append(rank, at_rank)))
    before = np.empty(len(turn), np.int64)
    before[turn] = np.cumsum(turn < count)
    last = before[count:] - 1
    found = np.full(len(at), np.nan)
    here = np.flatnonzero((last >= 0) & (np.append(rank, -1)[last] == at_rank))
    last, left = last[here], at[here]
    found[here] = value[last]
    between = np.flatnonzero(np.append(rank, -1)[last + 1] == rank[last])
    last, left = last[between], left[between]
    slope = (value[last + 1] - value[last]) / (when[last + 1] - when[last])
    found[here[between]] = slope * (left - when[last]) + value[last]
    return found


@dataclass(frozen=True)
class SharedCores:
    """Ranks of one host whose affinity masks overlap, directly or through others, and all cores in those masks.

    idle_ms:  [S] over the ordinary steps: wall time for which these cores, taken together, had nothing to do. A change
              that only moves work about gains no more.
    spare_ms: the same if each rank keeps a core of its own at all times, even while it waits.
    absent:   ranks of the job that were not captured and may run here too.
    """

    ranks: tuple[int, ...]
    cores: int
    idle_ms: Float
    spare_ms: Float
    busy: float
    absent: int = 0

    @property
    def ranks_per_core(self) -> float:
        return len(self.ranks) / self.cores

    @property
    def cores_a_rank(self) -> float:
        return self.cores / (len(self.ranks) + self.absent)


@dataclass(frozen=True)
class HostLoad:
    """The load of the cores in the ordinary steps.

    steps:     [S] their numbers, in order.
    shared:    the job's cores by the ranks that share them; the busiest come first.
    beside_ms: CPU time a step of a rank outside its training thread (gloo's workers, mostly), on the busiest cores;
               None: not measured.
    """

    steps: Int
    shared: tuple[SharedCores, ...]
    beside_ms: float | None

    @property
    def busiest(self) -> SharedCores:
        return self.shared[0]

    @property
    def idle_ms(self) -> float:
        """Idle time of the busiest cores, mean over the steps."""
        return max(float(self.busiest.idle_ms.mean()), 0.0)

    @property
    def busy(self) -> float:
        """Share of the busiest cores' time that the job used, 0 to 1."""
        return self.busiest.busy

    @property
    def ranks_per_core(self) -> float:
        return self.busiest.ranks_per_core

    def of(self, rank: int) -> SharedCores | None:
        """The cores that `rank` may use; None where that is not known."""
        return next((cores for cores in self.shared if rank in cores.ranks), None)

    def idle_in(self, steps: Int) -> Float:
        """Idle time of the busiest cores in each of `steps`, which are among the ordinary ones, ms."""
        found: Float = self.busiest.idle_ms[np.searchsorted(self.steps, steps)]
        return found


def measure_load(
    run: RunInfo, gauges: Gauges, facts: Mapping[str, list[dict[str, Any]]], step_ms: float
) -> HostLoad | None:
    """The load over the ordinary steps, from the CPU time that every rank noted at each step. None: not measured."""
    masks, of_rank = core_masks(run, facts), {rank: r for r, rank in enumerate(gauges.ranks)}
    cpu, wall = gauges.spent("cpu_seconds"), gauges.wall_ms
    measured: Bool = np.isfinite(cpu.sum(axis=1))
    captured = [(mine, cores) for ranks, cores in masks if (mine := [rank for rank in ranks if rank in of_rank])]
    if step_ms <= 0 or not any(measured[of_rank[rank]] for ranks, _ in captured for rank in ranks):
        return None
    busy = np.where(measured[:, None], cpu, wall)
    shared = []
    uncaptured = uncaptured_on(run, [tuple(ranks) for ranks, _ in captured])
    for (ranks, cores), absent in zip(captured, uncaptured, strict=True):
        here = [of_rank[rank] for rank in ranks]
        length, used = wall[here].mean(axis=0), busy[here]
        occupied = np.maximum(used, length).sum(axis=0) * (1 + absent / len(ranks))
        together = used.sum(axis=0) / cores
        shared.append(
            SharedCores(
                ranks=tuple(ranks),
                cores=cores,
                idle_ms=length - together,
                spare_ms=np.clip(length - occupied / cores, 0, None),
                busy=min(float(together.mean()) / float(length.mean()), 1.0),
                absent=absent,
            )
        )
    shared.sort(key=lambda item: -item.busy)
    beside = (cpu - gauges.spent("training_thread_cpu_seconds"))[[of_rank[rank] for rank in shared[0].ranks]]
    beside = beside[~np.isnan(beside).any(axis=1)].mean(axis=1)
    return HostLoad(
        steps=gauges.steps,
        shared=tuple(shared),
        beside_ms=max(float(beside.mean()), 0.0) if len(beside) else None,
    )


def core_masks(run: RunInfo, facts: Mapping[str, list[dict[str, Any]]]) -> list[tuple[tuple[int, ...], int]]:
    """(ranks, number of cores) of each set of ranks that share cores, on every host.

    Ranks bound to the same four cores share four; ranks bound to a core each, none of them the same, share nothing.
    Captures that tell only how many cores a rank may use are taken to mean the same ones on all ranks of a host.
    """
    host_of = {item.rank: item.host for item in run.ranks}
    masks: dict[str, dict[int, frozenset[int]]] = defaultdict(dict)
    counts: dict[str, dict[int, int]] = defaultdict(dict)
    for fact in facts.get("process", []):
        rank = int(fact["rank"])
        host = host_of.get(rank, "")
        if fact.get("cpus"):
            masks[host][rank] = frozenset(int(cpu) for cpu in fact["cpus"])
        elif fact.get("cores"):
            counts[host][rank] = int(fact["cores"])
    found = []
    for of_host in masks.values():
        apart: list[tuple[set[int], frozenset[int]]] = []
        for rank, cpus in of_host.items():
            touching = [item for item in apart if item[1] & cpus]
            apart = [item for item in apart if not item[1] & cpus]
            ranks = {rank}.union(*(item[0] for item in touching))
            apart.append((ranks, cpus.union(*(item[1] for item in touching))))
        found += [(tuple(sorted(ranks)), len(cpus)) for ranks, cpus in apart]
    found += [(tuple(sorted(of_host)), max(of_host.values())) for of_host in counts.values()]
    return sorted(found)
