"""How busy the cores are. On a CPU job, lanes contend for them: overlap is only free while a core is idle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dsprof.run import RunInfo


@dataclass(frozen=True)
class HostLoad:
    """The busiest host, a step.

    idle_ms: wall time for which its cores, taken together, had nothing to do.
    busy:    share of its cores' time that the job used, 0 to 1.
    ranks_per_core: ranks of the job on it, over its cores.
    beside_ms: CPU time of a rank outside its training thread (gloo's workers, mostly); None: not measured.
    """

    idle_ms: float
    busy: float
    ranks_per_core: float
    beside_ms: float | None

    def step_ms_of(self, cpu_ms: float) -> float:
        """How much longer a step takes for `cpu_ms` more CPU time on every rank, beside the training thread."""
        return cpu_ms * self.ranks_per_core * self.busy


def measure_load(
    run: RunInfo, rows: pd.DataFrame, steps: pd.DataFrame, facts: Mapping[str, list[dict[str, Any]]], step_ms: float
) -> HostLoad | None:
    """The load over the middle steps, from the CPU time that every rank noted at each step."""
    cores = {fact["rank"]: int(fact["cores"]) for fact in facts.get("process", []) if fact.get("cores")}
    host_of = {item.rank: item.host for item in run.ranks}
    cpu = counted_per_step(rows, steps, "cpu_seconds")
    training = counted_per_step(rows, steps, "training_thread_cpu_seconds")
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank in cpu:
        if rank in cores:
            by_host[host_of.get(rank, "")].append(rank)
    if not by_host or step_ms <= 0:
        return None

    def needed(ranks: list[int]) -> float:
        return sum(cpu[rank] for rank in ranks) / cores[ranks[0]]

    busiest = max(by_host.values(), key=needed)
    beside = [cpu[rank] - training[rank] for rank in busiest if rank in training]
    return HostLoad(
        idle_ms=max(step_ms - needed(busiest), 0.0),
        busy=min(needed(busiest) / step_ms, 1.0),
        ranks_per_core=len(busiest) / cores[busiest[0]],
        beside_ms=max(float(np.mean(beside)), 0.0) if beside else None,
    )


def counted_per_step(rows: pd.DataFrame, steps: pd.DataFrame, gauge: str) -> dict[int, float]:
    """Rank -> mean increase a middle step in ms, of a gauge that counts seconds."""
    middle = steps.loc[steps["middle"], "step"]
    samples = rows[(rows["kind"] == "gauge") & (rows["name"] == gauge) & rows["step"].isin(middle - 1)]
    found = {}
    for rank, of_rank in samples.groupby("rank"):
        values = of_rank.sort_values("start_ns")["value"]
        if len(values) > 1:
            found[int(rank)] = float(values.iloc[-1] - values.iloc[0]) * 1e3 / (len(values) - 1)
    return found
