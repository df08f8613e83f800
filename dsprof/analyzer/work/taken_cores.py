"""What has the cores for which a job's ranks wait, as far as what was measured tells: a quota that the kernel counts,
the job's own threads and workers, or other processes of the host.

The cores looked at are those of the ranks that share cores with the rank that waits most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from dsprof import gauges

from ..arrays import Float
from ..budget.host_load import SharedCores
from ..study import Study, once
from ..text import count, number
from .core_wait import CoreWait, core_wait

MOSTLY: Final = 0.5
"""Of the waiting, that a reason explains."""
ALL_CORES: Final = 0.75
"""Of the cores' time: a job that uses less of it is not what fills them."""
FULL: Final = 0.9
"""Of the cores' time: while less is used there are cores for one more; and a quota that is not seen may be why a job
uses no more."""
PART: Final = 0.2
"""Of the CPU time that a job uses, from which on threads beside its training threads, or workers, are named."""
MOST_CORES: Final = 1 << 16
"""A fact that tells more than this tells nothing."""

Name = Literal["cpu-quota", "own-threads", "other-processes", "process-stopped", "not-known"]


@dataclass(frozen=True)
class TakenCores:
    """name:   of the reason; sure: it was measured, and can be nothing else; not so of what is probable
    words:   behind "for a core, "
    cores:   that the ranks which share them may use; None: not known
    ranks:   those
    job, others: how many cores the job's processes used, and all others of the host; None: not known
    beside, workers: the share of the job's CPU time that its other threads, and DataLoader workers, use
    throttled: the share of the waiting for which the kernel counts that a quota stopped the ranks
    """

    name: Name
    words: str
    cores: int | None = None
    ranks: tuple[int, ...] = ()
    job: float | None = None
    others: float | None = None
    beside: float = 0.0
    workers: float = 0.0
    throttled: float = 0.0
    quotas_seen: bool = False
    """Whether all quotas that may stop the ranks are seen from inside."""

    @property
    def part(self) -> float:
        """The part of the waiting that the reason may well explain, 0 to 1: a quota may stop the ranks, too; and beside
        other processes, ranks that are more than their cores crowd one another."""
        if not self.sure:
            return 0.0
        if self.name == "cpu-quota":
            return self.throttled
        rest = 1 - self.throttled
        if self.name != "other-processes" or not self.others or not self.cores or not self.ranks:
            return rest
        crowding = (self.job or 0.0) * max(1 - self.cores / len(self.ranks), 0.0)
        return rest * self.others / (self.others + crowding)

    @property
    def sure(self) -> bool:
        return self.name in ("cpu-quota", "own-threads") or (self.name == "other-processes" and self.quotas_seen)

    @property
    def cause(self) -> str:
        """As findings.json has it."""
        if self.sure:
            return self.name
        return "other-processes, probably" if self.name == "other-processes" else "not known"


@once
def taken_cores(study: Study) -> TakenCores:
    """The reason that is told by the kernel first; then by what was used of the cores."""
    waited = core_wait(study)
    load = study.contended
    group = None if load is None or waited is None else load.of(study.ranks[int(waited.ms.mean(axis=1).argmax())])
    used = None if group is None or waited is None else _used(study, group, waited)
    told: dict[str, Any] = {} if used is None or group is None else {
        "cores": group.cores, "ranks": group.ranks, "job": used.job, "others": used.others, "beside": used.beside,
        "workers": used.workers,
    }  # fmt: skip
    throttled = 0.0 if waited is None else _throttled(study, waited)
    seen = every_quota_is_read(study, study.ranks)
    told |= {"throttled": throttled, "quotas_seen": seen}
    if throttled > MOSTLY:
        return TakenCores("cpu-quota", f"as the CPU quota of their container{_limit(study)} stops them", **told)
    if waited is not None and waited.stopped.mean() > MOSTLY * waited.ms.mean():
        return TakenCores("process-stopped", "as their processes are stopped, by what was not seen", **told)
    if used is not None and group is not None:
        if used.job >= (ALL_CORES if seen else FULL) * group.cores and not used.more_by_others(group.cores):
            words = f"as the job itself fills the {count(group.cores, 'core')} that it may use"
            return TakenCores("own-threads", words, **told)
        if used.others is not None and used.job + used.others >= FULL * group.cores:
            perhaps, of = "" if seen else "probably ", count(group.cores, "core")
            words = f"{perhaps}as other processes use {number(used.others)} of the {of}, and the job {number(used.job)}"
            return TakenCores("other-processes", words, **told)
    return TakenCores("not-known", "and what has theirs was not seen", **told)


def every_quota_is_read(study: Study, ranks: Iterable[int]) -> bool:
    """Whether all cgroups above these ranks are seen, and the kernel told how long their quotas stopped them. That of a
    group above a container is not seen from inside, and stops what is there, too."""
    whole = {fact.get("rank") for fact in study.facts.get("cpu_cgroups", []) if fact.get("whole") is True}
    told = np.isfinite(study.gauges.spent(gauges.THROTTLED)).all(axis=1)
    return whole.intersection(np.array(study.gauges.ranks)[told].tolist()).issuperset(ranks)


def _throttled(study: Study, waited: CoreWait) -> float:
    """The share of the waiting for which the kernel counts that quotas stopped the ranks, 0 to 1; 0: not known. It
    counts that for each core of a cgroup: a training thread has the part of it that it has of the CPU time there."""
    stopped = study.gauges.spent(gauges.THROTTLED)
    if stopped.shape != waited.ms.shape:
        return 0.0
    known = np.isfinite(stopped).all(axis=1) & waited.known
    whole = float(waited.ms[known].sum())
    of_threads = (stopped.mean(axis=1) * _parts_of_cgroups(study))[known]
    return min(float(of_threads.sum()) * stopped.shape[1] / whole, 1.0) if whole > 0 else 0.0


def _parts_of_cgroups(study: Study) -> Float:
    """Of the CPU time of the cgroup with its quota, what each rank's training thread has, [R]; where that is not known
    all ranks there are taken to have as much."""
    limits = {fact.get("rank"): fact.get("cgroup") for fact in study.facts.get("cpu_limit", [])}
    host_of = {item.rank: item.host for item in study.run.ranks}
    groups = [(host_of.get(rank), limits.get(rank, rank)) for rank in study.gauges.ranks]
    number = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    place = np.array([number[group] for group in groups])
    process, thread, workers = (
        study.gauges.spent(name).mean(axis=1)
        for name in ("cpu_seconds", "training_thread_cpu_seconds", "worker_cpu_seconds")
    )
    whole = np.bincount(place, process + np.nan_to_num(workers))[place]
    known = np.isfinite(whole) & np.isfinite(thread) & (whole > 0)
    part: Float = np.where(known, np.minimum(thread / np.where(known, whole, 1.0), 1.0), 1 / np.bincount(place)[place])
    return part


def _limit(study: Study) -> str:
    """How many cores the quotas allow, in words, or nothing."""
    limits = [cores for fact in study.facts.get("cpu_limit", []) if (cores := _number(fact.get("cores"))) is not None]
    return f" ({min(limits):g} cores)" if limits else ""


@dataclass(frozen=True)
class _Used:
    """As of `TakenCores`; and how many cores more the training threads were ready to run on."""

    job: float
    others: float | None
    beside: float
    workers: float
    waited: float

    def more_by_others(self, cores: int) -> bool:
        """Whether the job waits for what others use, or may use where that is not known, rather than since it wants
        more than there is: of four ranks on four cores, one that shares its core with another process does."""
        others = cores - self.job if self.others is None else self.others
        return others > max(self.job + self.waited - cores, MOSTLY * self.waited)


def _used(study: Study, group: SharedCores, waited: CoreWait) -> _Used | None:
    """How many cores the ranks that share these and their workers use in the ordinary steps, and all else of their
    host; None: not measured."""
    here = np.isin(study.gauges.ranks, group.ranks)
    length = float(np.nanmean(study.gauges.wall_ms[here])) if here.any() else math.nan
    process, thread, workers = (
        _sum(study.gauges.spent(name)[here])
        for name in ("cpu_seconds", "training_thread_cpu_seconds", "worker_cpu_seconds")
    )
    if not length > 0 or process is None:
        return None
    missing = 1 + group.absent / len(group.ranks)
    whole = process + (workers or 0.0)
    job = min(whole * missing / length, float(group.cores))
    beside = 0.0 if thread is None else max(process - thread, 0.0) / max(whole, 1e-9)
    others = _others(study, group, job)
    ready = float(waited.ms[here].mean(axis=1).sum()) * missing / length
    return _Used(job, others, beside, (workers or 0.0) / max(whole, 1e-9), ready)


def _sum(spent: Float) -> float | None:
    """Mean over the steps of what all ranks of which it is known spend in one, ms; None: of none."""
    each = spent[np.isfinite(spent).all(axis=1)]
    return float(each.mean(axis=1).sum()) if len(each) else None


def _others(study: Study, group: SharedCores, job: float) -> float | None:
    """How many cores other processes use, while the ordinary steps last; None where that is not known, as where the
    ranks may use a part of their host's cores only."""
    host_of = {item.rank: item.host for item in study.run.ranks}
    hosts = {host_of.get(rank) for rank in group.ranks}
    facts = [fact for fact in study.facts.get("process", []) if host_of.get(fact.get("rank", -1)) in hosts]
    whole = {int(cores) for fact in facts if (cores := _number(fact.get("host_cores"))) is not None}
    if whole != {group.cores}:
        return None
    rows = study.of_kind("gauge")
    rows = rows[(rows["name"] == gauges.CPU_BUSY) & rows["rank"].map(host_of).isin(hosts)]
    ordinary = study.ordinary
    begin, end = ordinary["start_ns"].min(), (ordinary["start_ns"] + ordinary["dur_ns"]).max()
    busy = rows["value"][rows["start_ns"].between(begin, end)].dropna().to_numpy(np.float64)
    if not len(busy):
        return None
    return max(float(busy.mean()) / 100 * group.cores - job, 0.0)


def threads_of(study: Study, ranks: Iterable[int]) -> int | None:
    """The most threads that torch computes with in one of these ranks, as far as its facts tell."""
    chosen = set(ranks)
    told = [
        int(threads) for fact in study.facts.get("process", [])
        if fact.get("rank") in chosen and (threads := _number(fact.get("threads"))) is not None
    ]  # fmt: skip
    return max(told, default=None)


def _number(value: object) -> float | None:
    """A number of cores or threads that can be one."""
    right = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < MOST_CORES
    return float(value) if right and isinstance(value, int | float) else None
