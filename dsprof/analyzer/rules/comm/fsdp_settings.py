"""FSDP2 with parameters kept from forward to backward, or with more of the next units gathered ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from ...effect import Effect
from ...study import Study
from ...whatif.fetching import forwards_and_backwards
from ...whatif.needless import GatheredOnce
from ...whatif.prefetched import Prefetched
from ...whatif.rebucket import NotRebucketed
from ...whatif.select import Communications
from ..base import NotJudged, without_effect
from .dimensions import domains
from .fetched_parameters import need_passes
from .prefetch import OF_ITSELF
from .shards import GATHER, gathers_parameters, is_of_shards, need_fully_shard, sharding_ms


def with_reshard(study: Study, value: Any) -> Effect:
    """Parameters freed after forward, or kept. Raises NotJudged where the run does not tell what that changes."""
    gathers = _gathers(study)
    again = _again(study, gathers)
    if value is True:
        if again:
            return Effect("comm.redundant-gather", notes=("units are freed after forward in this run",))
        raise NotJudged(
            "the run keeps parameters from forward to backward, so it does not tell where backward would wait for them "
            "to be gathered again"
        )
    if value is not False:
        raise NotJudged(
            f"how long it takes to gather parameters on {value} ranks, from forward to backward, was not measured in "
            "this run; false can be predicted"
        )
    if not again:
        return Effect("comm.redundant-gather", notes=("nothing is gathered a second time in this run",))
    notes = (f"{again:.0f} gathers a step are not needed; each rank holds all parameters until its backward has ended",)
    return Effect(
        "comm.redundant-gather", (GatheredOnce(gathers),), costs_ms=-_spared_ms(study, again), counts_cores=True,
        notes=notes,
    )  # fmt: skip


def with_prefetch(backward: bool) -> Callable[[Study, Any], Effect]:
    """So many of the next units gathered ahead, in backward or in forward."""

    part: Literal["forward", "backward"] = "backward" if backward else "forward"
    key = f"fsdp2.{part}_prefetch"

    def effect(study: Study, value: Any) -> Effect:
        gathers = _gathers(study)
        if not study.on_gpu:
            waits = (
                "where collectives run on the CPU, FSDP2 waits for a gather where it issues it: issued earlier, it is "
                "waited for earlier, and hidden by nothing"
            )
            return without_effect(study, "comm.exposed", waits)
        if key in study.run.knobs:
            raise NotJudged("the run prefetches already, and how far is not told apart from what it would do by itself")
        ahead = max(int(value) - OF_ITSELF, 0)
        if not ahead:
            return Effect("comm.exposed", notes=("FSDP2 gathers one unit ahead by itself",))
        need_passes(study, [one for one in domains(study) if gathers_parameters(one)])
        changes = (Prefetched(gathers, ahead, part),)
        return Effect("comm.exposed", changes, overlaps="more", counts_cores=True)

    return effect


def _gathers(study: Study) -> Communications:
    """Those of units. Raises NotJudged where fully_shard was not seen, or nothing is gathered."""
    need_fully_shard(study)
    groups = [group for one in domains(study) if gathers_parameters(one) for group in one.groups]
    if not groups:
        raise NotJudged("no unit was seen to gather its parameters in a step")
    return Communications(kinds=(GATHER,), groups=tuple(dict.fromkeys(groups)))


def _again(study: Study, gathers: Communications) -> float:
    """Gathers of a rank in a step that bring what its first forward has brought, mean."""
    found, steps = 0.0, 0
    for of in study.need_graph().templates:
        for group in gathers.groups or ():
            try:
                passes = forwards_and_backwards(of, Communications(kinds=gathers.kinds, groups=(group,)))
            except NotRebucketed as reason:
                raise NotJudged(f"the order in which units need parameters is not seen: {reason}") from None
            every = sum(len(forward) + len(backward) for forward, backward in passes)
            found += len(of.numbers) * (every - (len(passes[0][0]) if passes else 0))
        steps += len(of.numbers)
    return found / max(steps, 1) / _groups_of_a_rank(study, gathers)


def _groups_of_a_rank(study: Study, gathers: Communications) -> float:
    """In how many groups there are for each in which a rank takes part: replicas gather the same."""
    ranks = [len(study.run.group(group).get("ranks") or study.ranks) for group in gathers.groups or ()]
    return max(len(ranks) * len(study.ranks) / max(sum(ranks), 1), 1.0) if ranks else 1.0


def _spared_ms(study: Study, again: float) -> float:
    """What FSDP works for gathers that are not needed, as much as for any of its collectives; 0 on devices, whose
    kernels the replay moves."""
    table = study.judged_collectives.table
    a_step = int(np.sum(is_of_shards(table))) / len(study.step_numbers)
    return 0.0 if study.on_gpu or not a_step else sharding_ms(study) * min(again / a_step, 1.0)
