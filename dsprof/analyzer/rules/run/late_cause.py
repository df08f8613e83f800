"""Why a rank is late: what the host, its container or its own other threads do to it, as far as what was measured says.

Each cause is held against what the rank is late by, and only named where it is half of that or more, beyond what its
peers have of the same. Where none is, that is said, with what it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from dsprof import gauges

from ...arrays import Bool
from ...finding import Evidence, Fix
from ...study import Study
from ...text import count, ms, size
from ...work.taken_cores import every_quota_is_read
from .cause import CORE_WAIT, MOSTLY, Cause, Late
from .late import mine_and_others
from .slow_machine import core_clock, gpu_clock, network, numa

FAULTS: Final = 100
"""Pages a step that are read from a disk: fewer do not hold a rank up."""
READ: Final = 1 << 20
"""Bytes a step: the same of files."""


def quota(late: Late) -> Cause | None:
    """The kernel says that the quota of a cgroup stopped it."""
    mine, others = late.gauge(gauges.THROTTLED)
    if not late.mostly(mine - others):
        return None
    limit = _limit(late)
    words = f"the CPU quota of its container{limit} stops it for {ms(mine)} a step"
    evidence = Evidence("stopped by a CPU quota a step", round(mine, 3), "ms", round(others, 3))
    return Cause("cpu-quota", words, (evidence,), _raise_limit(late, "raise"))


def stopped(late: Late) -> Cause | None:
    """No thread of the process could run, and it wanted no core."""
    mine, others = late.gauge(gauges.STOPPED)
    if not late.mostly(mine - others):
        return None
    share = 100 * mine / max(late.step_ms, 1e-9)
    words = (
        f"its whole process is stopped for {ms(mine)} of each step ({share:.0f} % of the time), as a CPU quota of its "
        "container does"
    )
    evidence = Evidence("the whole process stood still a step", round(mine, 3), "ms", round(others, 3))
    other = Fix(
        "code", f"if {late.who} has no such limit, look for what stops it: a signal (SIGSTOP), a debugger, a VM"
    )
    return Cause("process-stopped", words, (evidence,), (*_raise_limit(late, "raise or remove"), other))


def _limit(late: Late) -> str:
    ranks = late.study.ranks_where(late.slow)
    facts = [fact for fact in late.study.facts.get("cpu_limit", []) if fact.get("rank") in ranks]
    return f" ({min(float(fact['cores']) for fact in facts):g} cores)" if facts else ""


def _raise_limit(late: Late, verb: str) -> tuple[Fix, ...]:
    title = (
        f"{verb} the CPU limit of the container of {late.who}: resources.limits.cpu in Kubernetes, --cpus or "
        "--cpu-quota in Docker, CPUQuota in systemd, cpu.max of the cgroup"
    )
    return (Fix("code", title),)


def without_core(late: Late) -> Cause | None:
    """It was ready to run, and something else had its cores, which are none of the others': for sure where all cgroups
    above it are seen and say that no quota stops it, as the kernel counts a thread that a quota stops as one that waits
    for a core."""
    if not late.mostly(late.beyond(CORE_WAIT)):
        return None
    # What has its core, and the lock that it wants, is its own process.
    own = python_thread(late, late.beyond(CORE_WAIT))
    if own is not None:
        return replace(own, evidence=(*own.evidence, _core_wait(late)))
    has_its_own = _bound(late) is not None or not _shares_cores(late)
    return _no_core(late) if has_its_own and late.mostly(_beyond_its_work(late)) else None


def crowded_cores(late: Late) -> Cause | None:
    """It waits longer for a core, but no longer for what it computes than the others do, so it may have more to do; or
    for one that they wait for as well, so it may want one more often, as a thread that hands over a lock does."""
    if not late.mostly(late.beyond(CORE_WAIT)):
        return None
    found = _no_core(late)
    more = Fix("code", f"or look for what {late.who} does more than the others")
    more_often = late.mostly(_beyond_its_work(late))
    words = "of those that the others use, too" if more_often else "as much for what it computes as the others do"
    return replace(found, words=f"{found.words}, {words}", fixes=(*found.fixes, more), sure=False)


def _no_core(late: Late) -> Cause:
    waited = late.beyond(CORE_WAIT)
    no_quota = every_quota_is_read(late.study, late.study.ranks_where(late.slow))
    few = _bound(late)
    if few is not None:
        mine, others = few
        evidence = _core_wait(late), Evidence("cores that it may use", mine, "count", others)
        words = f"it may use {count(mine, 'core')} only ({others} elsewhere), and waits {ms(waited)} a step for one"
        bind = f"bind {late.who} to as many cores as the others (taskset, numactl, --cpus-per-task, cpuset.cpus)"
        return Cause("affinity", words, evidence, (Fix("code", bind),), no_quota)
    title = (
        f"something else runs on the cores of {late.who} (workers, the job's own threads, another process): "
        "give each rank cores of its own"
    )
    fixes = [Fix("code", title)]
    if not no_quota:
        limit = (
            f"or raise the CPU limit of the container of {late.who}, or of a group above that (a pod, a slice), if "
            "there is one: not all of its cgroups can be seen from inside"
        )
        fixes.append(Fix("code", limit))
    return Cause("no-core", f"it waits {ms(waited)} a step for a core", (_core_wait(late),), tuple(fixes), no_quota)


def _shares_cores(late: Late) -> bool:
    """Whether a slow rank may run on cores that another rank may run on, too: then what else runs there is none of the
    reasons for which only the one is late."""
    host_of = {item.rank: item.host for item in late.study.run.ranks}
    cpus = {int(fact["rank"]): fact.get("cpus") for fact in late.study.facts.get("process", [])}

    def meet(one: int, other: int) -> bool:
        mine, its = cpus.get(one), cpus.get(other)
        return host_of.get(one) == host_of.get(other) and (not mine or not its or bool(set(mine) & set(its)))

    slow, others = late.study.ranks_where(late.slow), late.study.ranks_where(~late.slow)
    return any(meet(one, other) for one in slow for other in others)


def _core_wait(late: Late) -> Evidence:
    return Evidence("ready to run without a core, more than peers", round(late.beyond(CORE_WAIT), 3), "ms", 0.0)


def _beyond_its_work(late: Late) -> float:
    """How much longer the slow ranks wait for a core than what they compute would at the others' rate, ms; 0 where that
    is not known."""
    (mine, others), (computes, usual) = (late.gauge(name) for name in (CORE_WAIT, "training_thread_cpu_seconds"))
    return mine - computes * others / usual if usual > 0 else 0.0


def _bound(late: Late) -> tuple[int, int] | None:
    """How many cores the slow ranks may use, and the others, where that is fewer."""
    cores = {int(fact["rank"]): int(fact["cores"]) for fact in late.study.facts.get("process", []) if fact.get("cores")}
    known = np.array([cores.get(rank, -1) for rank in late.study.ranks])
    if (known < 0).any() or late.slow.all():
        return None
    mine, others = int(known[late.slow].max()), int(np.median(known[~late.slow]))
    return (mine, others) if mine < others else None


def python_thread(late: Late, of_ms: float | None = None) -> Cause | None:
    """Another Python thread of the process computes, which the training thread does not: they share one lock. of_ms:
    what it has to explain most of, where that is not all that the rank is late by."""
    spent = {name: late.gauge(name) for name in late.study.gauges.names(gauges.PYTHON_THREAD)}
    if not spent:
        return None
    name = max(spent, key=lambda one: spent[one][0] - spent[one][1])
    mine, others = spent[name]
    if not mine - others > MOSTLY * (late.ms if of_ms is None else of_ms) or late.ms <= 0:
        return None
    called = name.removeprefix(gauges.PYTHON_THREAD)
    words = f"its Python thread {called!r} computes {ms(mine)} a step, for which it holds the interpreter's lock"
    evidence = Evidence(f"CPU time of the thread {called} a step", round(mine, 3), "ms", round(others, 3))
    fix = f"have what the thread {called!r} of {late.who} does done by a process of its own, or less often"
    return Cause("python-thread", words, (evidence,), (Fix("code", fix),), sure=False)


def memory(late: Late) -> Cause | None:
    """Its memory does not suffice: pages are written out and read again."""
    stalled, usual = late.gauge(gauges.MEMORY_STALL)
    faults, expected = (count / 1e3 for count in late.gauge(gauges.MAJOR_FAULTS))
    if not late.mostly(stalled - usual) and faults - expected < FAULTS:
        return None
    words = f"its memory does not suffice: {faults:,.0f} pages a step are read back from a disk"
    evidence = (
        Evidence("pages read from a disk a step (major faults)", round(faults, 1), "count", round(expected, 1)),
        Evidence("stood still for want of memory a step", round(stalled, 3), "ms", round(usual, 3)),
    )
    fix = f"give {late.who} more memory (memory.max of its cgroup, resources.limits.memory), or have it keep less"
    return Cause("paging", words, evidence, (Fix("code", fix),), sure=late.mostly(stalled - usual))


def offload(late: Late) -> Cause | None:
    """What it offloads comes back more slowly."""
    mine, others = mine_and_others(late.study.work("offload").mean(axis=1), late.slow)
    if not late.mostly(mine - others):
        return None
    evidence = Evidence("waiting for offloaded data a step", round(mine, 3), "ms", round(others, 3))
    look = f"what {late.who} offloads comes and goes more slowly: look at the disk or the memory that it offloads to"
    fix = Fix("code", f"{look} (offload_optimizer, offload_param), and who else uses it")
    return Cause("offload", f"it waits {ms(mine)} a step for what it offloads", (evidence,), (fix,))


def disk(late: Late) -> Cause | None:
    """It reads from a disk what the others do not, and does not compute meanwhile."""
    mine, others = (of / 1e3 for of in late.gauge(gauges.READ))
    if mine - others < READ or late.mostly(late.beyond("training_thread_cpu_seconds")):
        return None
    words = f"it reads {size(mine)} a step from a disk ({size(max(others, 0.0))} elsewhere)"
    evidence = Evidence("read from disks a step", round(mine / 2**20, 3), "MiB", round(others / 2**20, 3))
    fix = f"look at the disk of {late.who} and at what it reads there: cache it in memory, or copy it to a faster one"
    return Cause("disk", words, (evidence,), (Fix("code", fix),), sure=False)


CAUSES: Final[tuple[Callable[[Late], Cause | None], ...]] = (
    quota, stopped, offload, without_core, memory, python_thread, gpu_clock, core_clock, numa, disk, network,
    crowded_cores,
)  # fmt: skip
"""In the order in which they are asked: what is told by the kernel first; then what is only probable, too."""


def cause_of(study: Study, slow: Bool, late_ms: float, *, of_host: bool = False) -> Cause | None:
    """The first of CAUSES that explains what the slow ranks, [R], are late by; None: it is not known. of_host: only
    their hosts are late, which no GPU's clock explains."""
    late = Late(study, slow, late_ms)
    asked = (ask for ask in CAUSES if not (of_host and ask is gpu_clock))
    return next((found for ask in asked if (found := ask(late)) is not None), None)


def unknown(study: Study, slow: Bool, late_ms: float) -> str:
    """What can be said of a delay without a known cause: whether the rank computes meanwhile."""
    late = Late(study, slow, late_ms)
    if not np.isfinite(study.gauges.spent("training_thread_cpu_seconds")).any():
        return "not known: CPU time was not measured"
    beyond = late.beyond("training_thread_cpu_seconds")
    if late.mostly(beyond):
        return f"not known: it computes {ms(beyond)} a step longer than the others, by more work or on a slower core"
    return "not known: it neither computes more nor lacks a core; it sleeps, or waits for a lock, a file or the network"
