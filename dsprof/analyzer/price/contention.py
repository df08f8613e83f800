"""What cores that are used all the time do to predictions, on CPU jobs.

A backend's threads need cores, too. While a rank waits for a collective its core serves them; while it computes they
take the core from it, and get it late themselves. A replay knows neither: it moves work about as if cores were free.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ..arrays import Float
from ..budget.host_load import HostLoad
from ..budget.parts import WAITING
from ..effect import Fewer
from ..graph.step_graph import WAKE_UP_DELAY, Structure
from ..study import Study, once
from ..work.taken_cores import taken_cores

OF_ONE_MS: Final = 1.1
"""What a communication beside a rank's computation costs the core of each of its ranks where all cores are used, ms:
calibrated. It is more than the CPU time that the backend needs: threads that share a core hold one another up."""
BESIDE_MS: Final = 0.2
"""A communication counts in full if one of its ranks computes for so long between issuing it and waiting for it."""
MOST_OF_GAIN: Final = 0.6
"""What contention takes of a gain at most: it makes a fault matter less, it does not mend it."""
MOST_LATE: Final = 2.0
"""Collectives take longer on busy cores by at most so many times what the training thread waits for a core."""
CPU_MS_PER_BYTE: Final = 2e-6
"""Of reducing and copying, nominal: it stays however the bytes are divided."""
MOST_CPU: Final = 2.0
"""It is at most so many times as much: of gloo, for 0.5 to 8 MB of long and of short numbers, a quarter of it to once
as much was measured, on two cores with load 10."""


def busy(study: Study, shorter_ms: float = 0.0) -> float:
    """Share of the busiest cores' time that the job would use in steps that are shorter by so much; 0: not measured."""
    if study.contended is None or study.step_ms <= 0:
        return 0.0
    length = max(study.step_ms - shorter_ms, study.contended.busy * study.step_ms)
    return min(study.contended.busy * study.step_ms / max(length, 1e-9), 1.0)


def lost_by_waiting_less(study: Study, gain_ms: float) -> float:
    """The share of a gain, from what-ifs on own work, that communications cost more then: who no longer waits computes
    meanwhile. As much of it as the gain is of the waiting there is; none while cores are free, since both of two that
    need a core have to need it at once. At most MOST_OF_GAIN."""
    if study.contended is None or gain_ms <= 0:
        return 0.0
    ordinary = study.ordinary
    waited = float(sum(ordinary[part].to_numpy(np.float64) for part in WAITING).mean())
    share = min(gain_ms / waited, 1.0) if waited > 0 else 0.0
    here = np.isin(study.ranks, study.contended.busiest.ranks)
    a_core = float(_beside(study)[here].sum()) / study.contended.busiest.cores
    return min(OF_ONE_MS * a_core * share * busy(study, gain_ms) ** 2 / gain_ms, MOST_OF_GAIN)


def kept_of_overlap(study: Study) -> float:
    """The share that is left of what is gained by moving communication beside computation: to do both at once takes
    cores that neither needs."""
    return 1 - busy(study) ** 2


def part_of_cores(study: Study, ms_per_byte: float) -> float:
    """The part of what a byte takes between ranks of one host that may be the cores', which move and add it, as busy as
    they are: a link that is much slower is slow itself. All of it where that was not measured."""
    if study.contended is None:
        return 1.0
    cores = MOST_CPU * CPU_MS_PER_BYTE / max(1 - busy(study), 1e-9)
    return min(cores / max(ms_per_byte, 1e-12), 1.0)


def freed_ms(study: Study, modelled: Float, fewer: Fewer) -> float:
    """What a step gets back if none of these collectives had a fixed cost, beyond what a replay with modelled transfers
    of them says.

    The training thread waits for a core while a backend's threads have it; and these get theirs late, so that measured
    steps take longer than `modelled` ones ([S] ms). Neither is more than the CPU time of these threads. That is divided
    among all communications by their number, and what is spent on the bytes of these stays. 0 where the scheduler does
    not tell of such waiting.
    """
    load, graph = study.contended, study.graph
    if load is None or load.beside_ms is None or graph is None:
        return 0.0
    most = load.beside_ms * max(load.ranks_per_core, 1.0)
    beside = _spent_ms(study, "worker_cpu_seconds") + _taken_by_others_ms(study, load)
    share = _of_backend(load, load.beside_ms, study.step_ms, beside)
    waited = fewer.part_of_all * min(_spent_ms(study, "core_wait_seconds") * share, most)
    late = graph.measured.mean() - modelled.mean()
    late = float(np.clip(late, 0.0, min(MOST_LATE * waited, fewer.part_of_all * most)))
    fixed = 1 - min(fewer.moved_bytes * CPU_MS_PER_BYTE / max(load.beside_ms, 1e-9), 1.0)
    return (waited + late) * fixed


def _taken_by_others_ms(study: Study, load: HostLoad) -> float:
    """CPU time that other processes of the host use for each rank on the busiest cores in a step, ms; 0 where they and
    the job leave a core free, which is not waited for, or where it is not known of these ranks."""
    taken, ranks = taken_cores(study), load.busiest.ranks
    if taken.name != "other-processes" or taken.ranks != ranks:
        return 0.0
    return (taken.others or 0.0) * study.step_ms / (len(ranks) + load.busiest.absent)


def _spent_ms(study: Study, gauge: str) -> float:
    """By how much a gauge rises in a step, mean over steps and over the ranks that have it; 0 where none has."""
    spent = study.gauges.spent(gauge)
    told = spent[np.isfinite(spent)]
    return float(told.mean()) if len(told) else 0.0


def _of_backend(load: HostLoad, beside_ms: float, step_ms: float, others_ms: float) -> float:
    """The share of the waiting for a core that the backend's threads are the cause of. That of the rest are loaders'
    workers and other processes, which take `others_ms` of CPU time a rank in each step, and other training threads
    where they are more than the cores."""
    cpu = load.busy * step_ms / max(load.ranks_per_core, 1e-9) - beside_ms
    crowding = max(cpu, 0.0) * max(1 - 1 / load.ranks_per_core, 0.0)
    return beside_ms / max(beside_ms + crowding + others_ms, 1e-9)


@once
def _beside(study: Study) -> Float:
    """In how many communications a step each rank takes part that go on while one of their ranks computes, [R]."""
    graph = study.graph
    found = np.zeros(len(study.ranks))
    if graph is None:
        return found
    place = np.searchsorted(study.ranks, graph.ranks)
    for index, steps in enumerate(graph.templates):
        columns = int(graph.judged[graph.columns_of(index)].sum())
        if columns:
            work = (steps.work.sum(axis=-1) - steps.work[..., WAKE_UP_DELAY]).mean(axis=1, dtype=np.float64)
            found[place] += columns * _beside_of(steps.structure, work)
    return found / max(int(graph.judged.sum()), 1)


def _beside_of(structure: Structure, work: Float) -> Float:
    """The same of steps of one template, [threads]. `work`: mean of each segment, [W] ms."""
    upto = np.concatenate([[0.0], np.cumsum(work)])
    segment, task = structure.issues.T
    thread, tasks = structure.thread[segment], len(structure.tasks)
    # The first segment of the thread that waits for the task; none: the thread's end.
    waited, waits = structure.waits.T
    key = structure.thread[waits] * tasks + waited
    order = np.lexsort((waits, key))
    known, first = np.unique(key[order], return_index=True)
    until = np.searchsorted(structure.thread, thread + 1)
    at = np.minimum(np.searchsorted(known, thread * tasks + task), max(len(known) - 1, 0))
    if len(known):
        until = np.where(known[at] == thread * tasks + task, waits[order][first][at], until)
    worked = upto[np.maximum(until, segment + 1)] - upto[segment + 1]
    shared = np.array([one.owner < 0 for one in structure.tasks], bool)  # a copy the disk or the device does
    counts = shared[task] if len(shared) else np.zeros(0, bool)
    beside = np.zeros(tasks)
    np.maximum.at(beside, task[counts], np.minimum(worked[counts] / BESIDE_MS, 1.0))
    return np.bincount(thread, beside[task], structure.threads).astype(np.float64)
