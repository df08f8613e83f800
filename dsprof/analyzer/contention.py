"""What cores that are used all the time do to predictions, on CPU jobs.

A backend's threads need cores, too. While a rank waits for a collective its core serves them; while it computes they
take the core from it, and get it late themselves. A replay knows neither: it moves work about as if cores were free.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from .context import Context, once
from .graph import Structure
from .parts import WAITING

Float = npt.NDArray[np.float64]

OF_ONE_MS: Final = 1.1
"""What a communication beside a rank's computation costs it where all cores are used, ms: calibrated."""
LEAST_BESIDE_MS: Final = 0.2
"""A communication goes on beside a rank's computation if it works for so long between issuing it and waiting for it."""
MOST_LATE: Final = 2.0
"""Collectives take longer on busy cores by at most so many times what the training thread waits for a core."""
CPU_MS_PER_BYTE: Final = 2e-6
"""Of reducing and copying, nominal: it stays however the bytes are divided."""


def busy(context: Context, shorter_ms: float = 0.0) -> float:
    """Share of the busiest cores' time that the job would use in steps that are shorter by so much; 0: not measured."""
    if context.load is None or context.step_ms <= 0:
        return 0.0
    length = max(context.step_ms - shorter_ms, context.load.busy * context.step_ms)
    return min(context.load.busy * context.step_ms / max(length, 1e-9), 1.0)


def cost_of_waiting_less_ms(context: Context, gain_ms: float) -> float:
    """What communications cost more in steps that a what-if on own work shortens by `gain_ms`: who no longer waits
    computes meanwhile. As much of it as there is less waiting; none while cores are free, since both of two that need a
    core have to need it at once."""
    if context.load is None or gain_ms <= 0:
        return 0.0
    waited = float(context.ordinary[list(WAITING)].sum(axis=1).mean())
    share = min(gain_ms / waited, 1.0) if waited > 0 else 0.0
    every = _beside(context) / context.load.busiest.cores
    return min(OF_ONE_MS * every * share * busy(context, gain_ms) ** 2, gain_ms)


def kept_of_overlap(context: Context) -> float:
    """The share that is left of what is gained by moving communication beside computation: to do both at once takes
    cores that neither needs."""
    return 1 - busy(context) ** 2


def freed_ms(context: Context, modelled: Float, moved_bytes: float) -> float:
    """What a step gets back if no collective had a fixed cost, beyond what a replay with modelled transfers says.

    The training thread waits for a core while a backend's threads have it; and these get theirs late, so that measured
    steps take longer than `modelled` ones ([S] ms). 0 where the scheduler does not tell of such waiting.
    moved_bytes: by collectives of one rank in a step.
    """
    load, graph, waiting = context.load, context.graph, context.gauges.spent("core_wait_seconds")
    told = waiting[np.isfinite(waiting)]
    if load is None or load.beside_ms is None or graph is None or not len(told):
        return 0.0
    waited = float(told.mean())
    late = float(np.clip(graph.measured.mean() - modelled.mean(), 0.0, MOST_LATE * waited))
    fixed = 1 - min(moved_bytes * CPU_MS_PER_BYTE / max(load.beside_ms, 1e-9), 1.0)
    return (waited * _of_backend(context) + late) * fixed


def _of_backend(context: Context) -> float:
    """The share of the waiting for a core that the backend's threads are the cause of; other training threads are that
    of the rest, where there are more of them than cores."""
    load = context.load
    if load is None or load.beside_ms is None:
        return 0.0
    cpu = load.busy * context.step_ms / max(load.ranks_per_core, 1e-9) - load.beside_ms
    crowding = max(cpu, 0.0) * max(1 - 1 / load.ranks_per_core, 0.0)
    return load.beside_ms / max(load.beside_ms + crowding, 1e-9)


@once
def _beside(context: Context) -> float:
    """How many communications a step, counted at each of their ranks, go on while one of these computes."""
    graph = context.graph
    if graph is None:
        return 0.0
    judged = graph.judged
    found = 0.0
    for index, steps in enumerate(graph.shapes):
        columns = int(judged[graph.columns_of(index)].sum())
        if columns:
            found += columns * _beside_of(steps.structure, steps.work.sum(axis=-1).mean(axis=1))
    return found / max(int(judged.sum()), 1)


def _beside_of(structure: Structure, work: Float) -> int:
    """The same of like-shaped steps. `work`: mean of each segment, [W] ms."""
    waited: dict[tuple[int, int], int] = {}
    for task, segment in structure.waits.tolist():
        key = int(structure.thread[segment]), task
        waited[key] = min(waited.get(key, segment), segment)
    upto = np.concatenate([[0.0], np.cumsum(work)])
    issuers = np.zeros(len(structure.tasks), np.int64)
    beside = np.zeros(len(structure.tasks), bool)
    for segment, task in structure.issues.tolist():
        thread = int(structure.thread[segment])
        until = waited.get((thread, task), structure.of_thread(thread).stop)
        issuers[task] += 1
        beside[task] |= upto[max(until, segment + 1)] - upto[segment + 1] > LEAST_BESIDE_MS
    return int(issuers[beside].sum())
