"""Ranks that are ready to run and have no core: a busy host, more threads than cores, a quota that stops all alike.

It is about what most ranks lack. That one rank has less than the others makes it a straggler, whose cause that is.
"""

from __future__ import annotations

from typing import Final

from ... import signals
from ...candidate import Between
from ...finding import Evidence, Finding, Fix, Gain, Where
from ...price.calibration import BETWEEN_RUNS
from ...study import Study
from ...text import count, ms, percent
from ...text import ranks as ranks_in_words
from ...whatif.work import Change
from ...work.core_wait import LEAST, lacks_cores
from ...work.taken_cores import PART, TakenCores, taken_cores, threads_of
from ..base import NotConcerned
from ..rule import Rule, fault

SURELY: Final = 0.5
"""Of what a replay says that cores gain: where in a step a thread waits for one is not seen, and a wait that another
rank's hides gains nothing."""
MOST_PART: Final = 0.95
"""Of a step, that cores can gain."""
ALSO: Final = 0.1
"""Of the waiting, from which on a quota is named that is not the main reason."""
RAISE_LIMIT: Final = (
    "raise the CPU limit of the container: resources.limits.cpu in Kubernetes, --cpus or --cpu-quota in Docker, "
    "CPUQuota in systemd, cpu.max of the cgroup"
)
UNSEEN: Final = "in which part of a step a thread waits for a core is not seen"


def with_cores(study: Study) -> Change | None:
    """A core for every training thread whenever it wants one."""
    if study.on_gpu:
        raise NotConcerned
    signals.core_wait(study)
    waited = lacks_cores(study)
    return None if waited is None else Change({part: waited.within(part) for part in waited.split})


def known_up_to(study: Study) -> Between | None:
    """Where steps wait for the ranks in turn, all that these wait may be gained; where the reason is not known, nothing
    that was tried may."""
    waited = lacks_cores(study)
    if waited is None:
        return None
    in_turn = float(waited.ms.mean(axis=1).sum())
    most_ms = min(in_turn, MOST_PART * study.step_ms)
    return Between(SURELY * taken_cores(study).part, max(len(study.ranks), 2.0), most_ms)


def starved(study: Study, change: Change, gain: Gain, share: Gain) -> Finding:
    """How long which ranks wait, what has the cores, and what gives them some."""
    waited, taken = lacks_cores(study), taken_cores(study)
    assert waited is not None
    slow = waited.of_step(study) >= LEAST
    ranks = study.ranks_where(slow)
    mine = float(waited.ms[slow].mean())
    evidence = [
        Evidence("ready to run without a core a step", round(mine, 3), "ms", 0.0),
        Evidence("share of the step", round(100 * mine / study.step_ms, 1), "%"),
        Evidence("cause", taken.cause, ""),
    ]
    if taken.cores is not None and taken.job is not None:
        evidence.append(Evidence("cores that the job uses", round(taken.job, 2), "count", taken.cores))
    if taken.others is not None:
        evidence.append(Evidence("cores that other processes use", round(taken.others, 2), "count", 0))
    if taken.throttled >= ALSO:
        evidence.append(Evidence("of that, stopped by a CPU quota", round(100 * taken.throttled, 1), "%", 0.0))
    if waited.stopped[slow].any():
        evidence.append(Evidence("of that, stopped", round(float(waited.stopped[slow].mean()), 3), "ms"))
    title = (
        f"{ranks_in_words(ranks)} {'waits' if len(ranks) == 1 else 'wait'} {ms(mine)} of each {ms(study.step_ms)} step "
        f"for a core, {taken.words}"
    )
    where = Where(ranks=ranks, steps=study.step_range)
    return Finding(
        "compute.no-core", title, "info", where, tuple(evidence), gain, fixes_of(study, taken), share=share,
        unknown=UNSEEN,
    )  # fmt: skip


def fixes_of(study: Study, taken: TakenCores) -> tuple[Fix, ...]:
    """What gives the ranks cores, or has them want fewer."""
    limit = Fix("code", RAISE_LIMIT)
    if taken.name == "cpu-quota":
        return (limit, *_fewer_threads(study, taken))
    also = (limit,) if taken.throttled >= ALSO else ()
    if taken.name == "own-threads":
        wanted = "" if taken.cores is None else f": {count(len(taken.ranks), 'rank')} on {count(taken.cores, 'core')}"
        more = (
            f"more cores for the job, or fewer ranks on this host{wanted} (--cpus-per-task of Slurm, --cpus and "
            "--cpuset-cpus of Docker, resources.limits.cpu of Kubernetes, --nproc-per-node)"
        )
        return (*_fewer_threads(study, taken), Fix("code", more), *also)
    own = (
        "see what else runs on the host (`top`), and stop it or move it; or give the job cores of its own: "
        "taskset, cpuset.cpus of a cgroup, --cpuset-cpus of Docker, --exclusive of Slurm"
    )
    if taken.sure:
        return (Fix("code", own), *also)
    quota = (
        "a CPU limit of a group above the job's container cannot be seen from inside: read nr_throttled in the "
        "cpu.stat of those cgroups on the host, and raise what stops it"
    )
    return (Fix("code", own), *(also or (Fix("code", quota),)), *_fewer_threads(study, taken))


def _fewer_threads(study: Study, taken: TakenCores) -> tuple[Fix, ...]:
    """Where threads beside the training threads, or workers, use much of what the job has."""
    found = []
    threads = threads_of(study, taken.ranks)
    if taken.beside >= PART and threads is not None and taken.cores and threads * len(taken.ranks) > taken.cores:
        fitting = str(max(taken.cores // max(len(taken.ranks), 1), 1))
        title = (
            f"OMP_NUM_THREADS={fitting}, or torch.set_num_threads({fitting}): {count(len(taken.ranks), 'rank')} with "
            f"{count(threads, 'thread')} each compute on {count(taken.cores, 'core')}"
        )
        patch = ({"name": "OMP_NUM_THREADS", "value": fitting},)
        found.append(Fix("env", title, patch, knobs=(("env.OMP_NUM_THREADS", fitting),)))
    if taken.workers >= PART:
        title = f"fewer DataLoader workers (num_workers): they use {percent(100 * taken.workers)} of the job's CPU time"
        found.append(Fix("code", title))
    return tuple(found)


RULES = (
    Rule(
        "compute.no-core",
        "ranks are ready to run and have no core: busy hosts, more threads than cores, a CPU quota",
        looks=(fault("compute.no-core", with_cores, starved, counts_cores=True, between=known_up_to),),
        needs=(signals.steps,),
        error=BETWEEN_RUNS,
        place=205,
    ),
)
