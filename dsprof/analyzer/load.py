"""How busy the cores are. On a CPU job, threads contend for them: work that is moved beside other work is only free
while a core is idle."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.run import RunInfo

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]


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

    def step_ms_of(self, cpu_ms: float) -> float:
        """How much longer a step takes for `cpu_ms` more CPU time on every rank, beside the training thread."""
        return cpu_ms * self.ranks_per_core * self.busy


def measure_load(
    run: RunInfo, rows: pd.DataFrame, steps: pd.DataFrame, facts: Mapping[str, list[dict[str, Any]]], step_ms: float
) -> HostLoad | None:
    """The load over the ordinary steps, from the CPU time that every rank noted at each step. None: not measured."""
    masks = core_masks(run, facts)
    cpu = spent_by_step(rows, steps, "cpu_seconds")
    ordinary = steps[steps["ordinary"]]
    if not masks or not any(rank in cpu for ranks, _ in masks for rank in ranks) or step_ms <= 0:
        return None
    wall = ordinary.pivot(index="rank", columns="step", values="dur_ns") / 1e6
    hosts, captured = {item.host for item in run.ranks}, {item.rank for item in run.ranks}
    absent = math.ceil(max((run.world_size or 0) - len(captured), 0) / max(len(hosts), 1))
    shared = []
    for ranks, cores in masks:
        known = [rank for rank in ranks if rank in wall.index]
        if not known:
            continue
        length = wall.loc[known].mean(axis=0).to_numpy(np.float64)
        used = [cpu.get(rank, wall.loc[rank].to_numpy(np.float64)) for rank in known]
        occupied = np.sum([np.maximum(of_rank, length) for of_rank in used], axis=0) * (1 + absent / len(known))
        together = np.sum(used, axis=0) / cores
        shared.append(
            SharedCores(
                ranks=tuple(known),
                cores=cores,
                idle_ms=length - together,
                spare_ms=np.clip(length - occupied / cores, 0, None),
                busy=min(float(together.mean()) / float(length.mean()), 1.0),
                absent=absent,
            )
        )
    if not shared:
        return None
    shared.sort(key=lambda item: -item.busy)
    training = spent_by_step(rows, steps, "training_thread_cpu_seconds")
    busiest = [rank for rank in shared[0].ranks if rank in training and rank in cpu]
    beside = [float((cpu[rank] - training[rank]).mean()) for rank in busiest]
    return HostLoad(
        steps=wall.columns.to_numpy(np.int64),
        shared=tuple(shared),
        beside_ms=max(float(np.mean(beside)), 0.0) if beside else None,
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


def spent_by_step(rows: pd.DataFrame, steps: pd.DataFrame, gauge: str) -> dict[int, Float]:
    """Rank -> increase in each ordinary step in ms, [S], of a gauge that counts seconds.

    Ranks without it are left out. A gauge is read where a step ends; a step before the first reading is taken to have
    spent the mean of the others.
    """
    samples = rows[["rank", "start_ns", "value"]][(rows["kind"] == "gauge") & (rows["name"] == gauge)]
    ordinary = steps[["rank", "step", "start_ns", "dur_ns"]][steps["ordinary"]].sort_values("step")
    steps_of = dict(iter(ordinary.groupby("rank")))
    found = {}
    for rank, of_rank in samples.sort_values("start_ns").groupby("rank"):
        mine = steps_of.get(rank)
        if len(of_rank) < 2 or mine is None:
            continue
        start = mine["start_ns"].to_numpy(np.int64)
        when, value = of_rank["start_ns"].to_numpy(np.int64), of_rank["value"].to_numpy(np.float64)
        edges = np.stack([start, start + mine["dur_ns"].to_numpy(np.int64)]) - when[0]
        read = np.interp(edges, when - when[0], value, left=np.nan, right=value[-1])
        spent = (read[1] - read[0]) * 1e3
        if np.isfinite(spent).any():
            found[int(rank)] = np.where(np.isfinite(spent), spent, np.nanmean(spent))
    return found


def counted_per_step(rows: pd.DataFrame, steps: pd.DataFrame, gauge: str) -> dict[int, float]:
    """Rank -> mean increase in an ordinary step in ms, of a gauge that counts seconds."""
    return {rank: float(spent.mean()) for rank, spent in spent_by_step(rows, steps, gauge).items()}
