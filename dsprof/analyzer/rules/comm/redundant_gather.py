"""comm.redundant-gather: sharded parameters that are freed after forward and gathered again, though they would fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ... import signals
from ...align.groups import REPLICATE
from ...candidate import Candidate, Price
from ...effect import Effect
from ...finding import Evidence, Finding, Fix, Gain
from ...memory.free import least_free
from ...price.calibration import ModelError
from ...price.gains import sure_up_to
from ...study import Study
from ...text import ms, size
from ...whatif.merge import by_backward
from ...whatif.needless import GatheredOnce
from ...whatif.select import Communications
from ..base import LEAST_SHARE, NotConcerned, NotJudged, at, code_fix, config_sections, gain_of_all
from ..rule import Found, Look, Rule
from .deepspeed_config import stage_of
from .dimensions import Domain, domains, need_every_rank, waited_ms
from .fsdp_settings import with_reshard
from .shards import GATHER, gathers_parameters
from .zero_stage import with_stage

MATTERS: Final = 0.05
"""Share of the step that keeping parameters saves, from which on it is the bottleneck. Less is what it costs to hold a
model in shards, and a healthy run may pay it."""
AGAIN: Final = 1.2
"""So many times the bytes of the first forward are gathered in a step, from which on some are gathered again."""


@dataclass(frozen=True)
class _Gathered:
    """Of each rank in a step: bytes of the parameters, and how many times as many are gathered."""

    domain: Domain
    whole_bytes: float
    times: float


def redundant_gather(study: Study) -> Found:
    """Parameters that are kept once they have been gathered, until the step ends."""
    need_every_rank(study)
    sharded = [one for one in domains(study) if gathers_parameters(one)]
    if not sharded:
        raise NotConcerned
    if _changed_in_between(study):
        return []
    every = list[_Gathered]()
    for domain in sharded:
        gathered = _gathered(study, domain)
        waited = waited_ms(study, domain.of("parameter"))
        if gathered is not None and waited * (1 - 1 / gathered.times) >= MATTERS * study.step_ms:
            every.append(gathered)
    fit = [gathered for gathered in every if _fit(study, gathered)]
    if _is_zero(study) and fit:
        return _of_setting(study, fit, lambda: with_stage(study, 2))
    if fit and len(fit) == len(sharded) and all(_by_setting(study, gathered) for gathered in fit):
        return _of_setting(study, fit, lambda: with_reshard(study, False))
    return [_candidate(study, gathered) for gathered in fit]


def _is_zero(study: Study) -> bool:
    """Whether a lower stage of ZeRO is what would keep them."""
    return stage_of(study) is not None and not study.facts.get("fsdp")


def _of_setting(study: Study, every: Sequence[_Gathered], setting: Callable[[], Effect]) -> Found:
    """What one setting would save that keeps the parameters of all dimensions: stage 2 of ZeRO, or FSDP2's
    reshard_after_forward. Where that is not told, what keeping them after their first gather would, or nothing."""
    try:
        gain = gain_of_all(study, [setting()])
    except NotJudged:
        return [_candidate(study, gathered) for gathered in every]
    domain = every[0].domain if len(every) == 1 else replace(every[0].domain, name="")
    whole = replace(every[0], domain=domain, whole_bytes=sum(gathered.whole_bytes for gathered in every))
    return [_finding(study, whole, gain)] if gain.ms >= LEAST_SHARE * study.step_ms and _fit(study, whole) else []


def _by_setting(study: Study, gathered: _Gathered) -> bool:
    """Whether FSDP2's reshard_after_forward alone keeps them."""
    fact: Any = next(iter(study.facts.get("fsdp", [])[-1:]), {})
    return fact.get("version") == 2 and gathered.times <= 2 + AGAIN - 1


def _changed_in_between(study: Study) -> bool:
    """Whether a step trains on after an optimizer's step: what that has changed is gathered for the first time."""
    phases = study.training_phases
    mine = phases[(phases["rank"] == study.ranks[0]) & phases["step"].isin(study.step_numbers)]
    updated = mine[mine["name"] == "optimizer"].groupby("step")["start_ns"].min()
    backward = mine[mine["name"] == "backward"].groupby("step")["start_ns"].max()
    return bool((backward > updated.reindex(backward.index)).any())


def _gathered(study: Study, domain: Domain) -> _Gathered | None:
    """None where nothing is gathered again after the first forward."""
    steps = max(study.need_graph().templates, key=lambda of: len(of.numbers))
    first = every = 0.0
    groups = 0
    for group in domain.groups:
        families = by_backward(steps, Communications(kinds=(GATHER,), groups=(group,)))
        if not families:
            continue
        groups += 1
        earliest = min(begun for begun, _, _ in families)
        for (begun, _, _), tasks in families.items():
            moved = float(np.sum(steps.size[tasks].mean(axis=1)))
            first, every = first + moved * (begun == earliest), every + moved
    return _Gathered(domain, first / max(groups, 1), every / first) if first and every >= AGAIN * first else None


def _fit(study: Study, gathered: _Gathered) -> bool:
    """Whether every rank surely has room for all parameters at its peak. Raises NotJudged where that is not known."""
    free = least_free(study.memory, study.memory_uses, study.ranks)
    if free is None:
        raise NotJudged(
            f"parameters are gathered {gathered.times:.1f} times in a step, and whether they could be kept is not "
            "known: how much memory is used, and how much there is, was not captured"
        )
    return gathered.whole_bytes <= free


def _candidate(study: Study, gathered: _Gathered) -> Candidate:
    change = GatheredOnce(Communications(kinds=(GATHER,), groups=gathered.domain.groups))

    def say(price: Price) -> Finding:
        return _finding(study, gathered, sure_up_to(price.gain, 0.0) if _is_zero(study) else price.gain)

    return Candidate("comm.redundant-gather", change, say, a_trade=True)


def _finding(study: Study, gathered: _Gathered, gain: Gain) -> Finding:
    domain = gathered.domain
    if gain.ms < MATTERS * study.step_ms:
        gain = sure_up_to(gain, 0.0)
    evidence = (
        Evidence("parameters gathered, times a step", round(gathered.times, 2), "", 1.0),
        Evidence("parameters", round(gathered.whole_bytes / 2**20, 3), "MiB"),
        Evidence("exposed communication a step", round(waited_ms(study, domain.of("parameter")), 3), "ms", 0.0),
    )

    title = (
        f"{size(gathered.whole_bytes)} of parameters are gathered {gathered.times:.2g} times in each step"
        f"{domain.inside}, and keeping them would save {ms(gain.ms)}"
    )
    fixes = (_fix(study, gathered, gain),)
    return Finding("comm.redundant-gather", title, "info", domain.where(study, "all_gather"), evidence, gain, fixes)


def _fix(study: Study, gathered: _Gathered, gain: Gain) -> Fix:
    costs = f"each rank then holds {size(gathered.whole_bytes)} more from forward to the end of backward"
    fact: Any = next(iter(study.facts.get("fsdp", [])[-1:]), None)
    if fact is not None:
        site = fact.get("site")
        if fact.get("version") != 2:
            replicas = any(one.role == REPLICATE and one is not gathered.domain for one in domains(study))
            strategy = f"ShardingStrategy.{'_HYBRID_SHARD_ZERO2' if replicas else 'SHARD_GRAD_OP'}"
            title = f"FullyShardedDataParallel(sharding_strategy={strategy}){at(site)}: {costs}"
            return code_fix(title, "sharding_strategy", strategy, site, gain)
        again = not _by_setting(study, gathered)
        title = f"fully_shard(reshard_after_forward=False){at(site)}"
        title += ", and model.set_reshard_after_backward(False) in all micro-batches but the last" if again else ""
        knobs = {} if again else {"fsdp2.reshard_after_forward": False}
        return code_fix(f"{title}: {costs}", "reshard_after_forward", False, site, gain, knobs)
    if stage_of(study) is not None:
        return _lower_stage(study, gathered, gain)
    return Fix("code", f"keep parameters from forward to backward: {costs}", gain=gain)


def _lower_stage(study: Study, gathered: _Gathered, gain: Gain) -> Fix:
    """Stage 2 in the place of 3, and without what only stage 3 takes."""
    costs = f"each rank then always holds all parameters, {size(gathered.whole_bytes)}"
    patch = {"op": "replace", "path": "/zero_optimization/stage", "value": 2}
    if not any(section.get("offload_param") for section in config_sections(study, "zero_optimization")):
        return Fix("config", f"zero_optimization.stage: 2: {costs}", (patch,), gain, (("zero_optimization.stage", 2),))
    gone = {"op": "remove", "path": "/zero_optimization/offload_param"}
    title = f"zero_optimization.stage: 2, without offload_param, which only stage 3 takes: {costs}"
    return Fix("config", title, (patch, gone), gain)


RULES = (
    Rule(
        "comm.redundant-gather",
        "the same parameters are gathered again in a step, though there is memory to keep them",
        explains=("comm_exposed",),
        looks=(Look(redundant_gather, needs=(signals.replay,)),),
        needs=(signals.communications,),
        outranked_by=("comm.exposed", "comm.slow-link"),
        error=ModelError(of_gain=0.105, of_step=0.014, busy=0.014),
        place=107,
    ),
)
