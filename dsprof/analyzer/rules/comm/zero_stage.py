"""ZeRO at another stage, and with its reductions beside backward or not: overlap_comm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, Literal

from ...align.backends import captured_backend
from ...effect import Effect, WhatIfs
from ...graph.link import same_sizes
from ...graph.step_graph import Steps
from ...study import Study
from ...whatif import WhatIf
from ...whatif.communications import ScaleLink
from ...whatif.fetching import FetchedBy, GatheredWhole
from ...whatif.merge import Merge
from ...whatif.needless import InLastBackward
from ...whatif.select import Communications
from ...whatif.waited_for import WaitedFor
from ...whatif.work import ScaleWork
from ..base import NotJudged, without_effect
from .deepspeed_config import is_own_engine, item_bytes, need_zero, stage_of
from .dimensions import Domain, domains
from .fetched_parameters import links_of_shards, need_passes, need_sizes
from .shards import GATHER, gathers_parameters, sharding_ms

STAGES: Final = (1, 2, 3)
GRADIENTS: Final = Communications(purposes=("gradient",))
WHOLE: Final = 2.0
"""Bytes that an all-reduce moves, as a multiple of a reduce-scatter of the same gradients that moves no more than it
must (`Backend.scatters_whole`)."""
HOOKS_LEFT: Final = 0.5
"""Assumed as the other end of what is possible: stages 1 and 2 work half as much for gradients as stage 3 does for the
parameters of modules. The two were not measured apart."""
OWN_LEFT: Final = (0.25, 0.0, HOOKS_LEFT)
"""Of what dsprof's engine works for parameters and gradients in stage 3, what is left without parameters that are
fetched: most likely, and between which ends. (Of five layers of 257 KiB it was 1.3 of 6.1 ms.)"""
UNDER_WAY: Final = 2
"""Buckets that dsprof's engine leaves under way (`engine/zero/bucket.py`)."""


def with_stage(study: Study, value: Any) -> Effect:
    """Another stage of ZeRO. Raises NotJudged where the run does not tell what it would communicate."""
    now = stage_of(study)
    if now is None:
        raise NotJudged("the job has no ZeRO, as far as was captured")
    if value not in STAGES or now not in STAGES:
        raise NotJudged(f"stages 1, 2 and 3 are predicted of each other; the run has {now}")
    if value == now:
        return Effect("comm.redundant-gather")
    if value == 3:
        raise NotJudged(
            f"stage {now} gathers all parameters when they have been updated: where each module would wait for its own "
            "in stage 3 is not told by that; `dsprof fix --verify` measures it"
        )
    in_last = (InLastBackward(GRADIENTS),)
    backwards = max(map(_backwards, study.need_graph().templates))
    if now == 3:
        return _without_shards(study, in_last if value == 1 and backwards > 1 else ())
    if backwards <= 1:
        same = "with one backward a step, stages 1 and 2 reduce and gather the same; they differ in memory"
        return without_effect(study, "comm.redundant-reduce", same)
    if value == 2:
        raise NotJudged(
            "stage 2 reduces gradients in each backward of a step: when they would be there in those that stage 1 "
            "does not reduce in is not told by this run"
        )
    notes = ("gradients are reduced in the last backward of a step only",)
    if study.on_gpu or not sharding_ms(study):
        return Effect("comm.redundant-reduce", in_last, counts_cores=True, notes=notes)
    # What is worked for buckets goes with them; to add gradients up in the other backwards may take as long.
    less = (*in_last, ScaleWork({"sharding": 1 / backwards}))
    return Effect("comm.redundant-reduce", less, others=(((), in_last),), counts_cores=True, notes=notes)


def _backwards(steps: Steps) -> int:
    """Of a rank in a step."""
    return round(float(steps.structure.backward.sum()) / max(steps.structure.threads, 1))


def _without_shards(study: Study, more: WhatIfs) -> Effect:
    """Stage 1 or 2 in the place of 3: all parameters gathered together, once a step, and nothing waited for in between.
    more: what else is changed."""
    sharded = [one for one in domains(study) if gathers_parameters(one)]
    if not sharded:
        raise NotJudged("no parameters were seen to be gathered in steps: they are all whole, or were kept")
    need_sizes(sharded)
    need_passes(study, sharded)
    own, links = is_own_engine(study), {domain: links_of_shards(domain) for domain in sharded}
    most = max(len(around) for kinds in links.values() for of, around in kinds.items() if of.kinds == (GATHER,))
    pairs: list[tuple[WhatIfs, WhatIfs]] = []
    for place in range(most):
        now: list[WhatIf] = []
        then: list[WhatIf] = list(more)
        for of_kinds in links.values():
            for gathers, around in of_kinds.items():
                if gathers.kinds != (GATHER,):
                    continue
                link = around[min(place, len(around) - 1)]
                now.append(Merge(gathers, link, together=1))
                then.append(FetchedBy(gathers, link, GatheredWhole(), item_bytes(study)))
        pairs.append((tuple(now), tuple(then)))
    notes = ["all parameters are gathered together once a step, and kept"]
    if not own and not _scatters_whole(study):  # its stages 1 and 2 reduce whole buckets on all ranks
        slower = ScaleLink(WHOLE, 1 / WHOLE, GRADIENTS)
        pairs = [(pairs[0][0], (*pairs[0][1], slower)), *((one, (*then, slower)) for one, then in pairs[1:]), pairs[0]]
        notes.append("gradients are all-reduced, which moves twice the bytes of a reduce-scatter")
    elif not own and len(study.ranks) > 2:
        pairs.append((pairs[0][0], (*pairs[0][1], ScaleLink(1 / WHOLE, WHOLE, GRADIENTS))))
    if not study.on_gpu and sharding_ms(study):
        likely, *ends = (ScaleWork({"sharding": left}) for left in (OWN_LEFT if own else (0.0, HOOKS_LEFT)))
        first, whole = pairs[0]
        pairs = [*((one, (*then, likely)) for one, then in pairs), *((first, (*whole, left)) for left in ends)]
        notes.append("modules fetch and release no parameters")
    (as_it_is, changed), *others = pairs
    return Effect("comm.redundant-gather", changed, as_it_is, tuple(others), counts_cores=True, notes=tuple(notes))


def _scatters_whole(study: Study) -> bool:
    """Whether every group that reduces gradients is known to take no longer for all of them on all ranks."""
    groups = {group for domain in domains(study) if len(domain.of("gradient").table) for group in domain.groups}
    backends = [captured_backend(group, study.run) for group in groups]
    return bool(backends) and not study.on_gpu and all(one is not None and one.scatters_whole for one in backends)


def with_overlap(study: Study, value: Any) -> Effect:
    """Gradients reduced beside backward, or waited for at once."""
    if not isinstance(value, bool):
        raise NotJudged(f"{value} is neither true nor false")
    _, config = need_zero(study)
    if value == config.zero_optimization.overlap_comm:
        return Effect("comm.exposed")
    if not is_own_engine(study):
        if study.on_gpu:
            raise NotJudged(
                "on which stream DeepSpeed's reductions would wait for one another is not predicted yet; "
                "`dsprof fix --verify` measures it"
            )
        waits = "on CPUs DeepSpeed waits for each reduction where it issues it, whatever overlap_comm says"
        return without_effect(study, "comm.exposed", waits)
    if study.on_gpu:
        raise NotJudged("the lanes of the engine on devices are not replayed with other waits yet")
    reducing = [one for one in (domain.of("gradient") for domain in domains(study)) if len(one.table)]
    if not reducing:
        raise NotJudged("no collective was seen to carry gradients")
    links = _links_of_gradients(reducing)
    variants = []
    for factor in (0, 1, -1):
        divided = tuple(
            Merge(
                Communications(purposes=("gradient",), groups=(group,)),
                replace(
                    link,
                    latency_ms=link.latency_ms * (1 + factor * link.spread),
                    ms_per_byte=link.ms_per_byte * (1 + factor * link.spread),
                ),
                together=1,
            )
            for group, link in links.items()
        )
        moved = WaitedFor(GRADIENTS, UNDER_WAY if value else 0)
        variants.append((divided, (*divided, moved)))

    (as_it_is, then), *others = variants
    overlaps: Literal["more", "no more"] = "more" if value else "no more"
    return Effect("comm.exposed", then, as_it_is, tuple(others), overlaps=overlaps, counts_cores=True)


def _links_of_gradients(reducing: list[Domain]) -> dict[str, Any]:
    """Of buckets that stay as large as they are."""
    return {
        group: same_sizes(link, domain.of_group(group))
        for domain in reducing for group, link in domain.links().items()
    }  # fmt: skip
