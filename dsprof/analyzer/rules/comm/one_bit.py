"""1-bit optimizers: after a warm-up of whole gradients, momenta travel as signs (Tang et al. 2021, arXiv
2102.02888)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from dsprof.schema import FLOAT_BYTES

from ...effect import Effect, WhatIfs
from ...graph.link import Link
from ...study import Study
from ...whatif.merge import Merge, by_backward
from ...whatif.select import Communications
from ..base import NotJudged, configurations
from .deepspeed_config import is_own_engine, need_configuration, stage_of, zero_config
from .dimensions import GRADIENT, Domain, moved_bytes
from .possible_links import links_around, links_of
from .shards import gathers_parameters
from .volume import formats, of_replicas

OWN: Final = "OneBitAdam"
OF_DEEPSPEED: Final = ("OnebitAdam", "OnebitLamb", "ZeroOneAdam")
FREEZE_STEP: Final = 100_000
"""Steps of the warm-up where the configuration gives none, in both engines."""
BITS: Final = 1 / 8
"""Bytes of a value, each way."""
LEGS: Final = 2
"""Collectives: signs go to the rank that averages them, and back."""
PACK_NS: Final = 50.0
PACK_BETWEEN: Final = (0.5, 2.0)
"""What a core needs for a value: packing, unpacking and keeping what the signs lost; measured with one thread on 128 Ki
to 1 Mi values (47 to 91 ns)."""


def with_optimizer(study: Study, value: Any, freeze_step: Any = None) -> Effect:
    """A 1-bit optimizer in the place of the job's, with another length of its warm-up unless that is None. Raises
    NotJudged for any other, and where the run does not tell."""
    need_configuration(study)
    own = is_own_engine(study)
    names = (OWN,) if own else OF_DEEPSPEED
    if value not in names:
        raise NotJudged(
            f"of optimizers only {' and '.join(names)} are predicted, by what they send; what {value} computes is not "
            "told by another one: `dsprof fix --verify` measures it"
        )
    if value == _type(study):
        return Effect("comm.volume", notes=(f"the run has {value} already",))
    if _type(study) in names:
        _need_warm_up(study)
    return _compressed(study, _freeze_step(study) if freeze_step is None else _steps(freeze_step), own)


def with_freeze_step(study: Study, value: Any, optimizer: Any = None) -> Effect:
    """Another length of a 1-bit optimizer's warm-up. optimizer: that is set beside it, None where none is. Raises
    NotJudged where steps of the run are behind the warm-up."""
    wanted, present = _steps(value), _freeze_step(study)
    need_configuration(study)
    own, kind = is_own_engine(study), _type(study)
    if optimizer not in (None, kind):
        return Effect("comm.volume")  # with_optimizer tells it of both
    whole = f"the first {wanted:,} steps reduce whole gradients, as those of this run"
    if kind not in ((OWN,) if own else OF_DEEPSPEED):
        return Effect("comm.volume", notes=(whole,))
    if wanted == present:
        return Effect("comm.volume", notes=(f"the run has a warm-up of {present:,} steps already",))
    _need_warm_up(study)
    return Effect("comm.volume", notes=(whole,)) if wanted > present else _compressed(study, wanted, own)


def _need_warm_up(study: Study) -> None:
    """Raises NotJudged where steps of the run are behind its 1-bit optimizer's warm-up."""
    if int(study.step_numbers[-1]) >= _freeze_step(study):
        raise NotJudged("steps of the run are behind the warm-up: what steps of it take is not told by them")


def _steps(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise NotJudged(f"{value} is no number of steps")
    return value


def _compressed(study: Study, freeze_step: int, own: bool) -> Effect:
    """Steps behind the warm-up: all gradients go at once when backward has ended, of each value a bit."""
    stage, config = stage_of(study), zero_config(study)
    if stage:
        raise NotJudged(
            "a 1-bit optimizer takes whole gradients and parameters on every rank: stage 0 of ZeRO, and the run has "
            f"stage {stage}"
        )
    if own and config is not None and config.heterogeneous.speeds is not None:
        raise NotJudged(
            "a 1-bit optimizer takes ranks that have equally many samples, and the run has heterogeneous.speeds"
        )
    both = [(whole, part) for whole, part in of_replicas(study, GRADIENT) if not gathers_parameters(whole)]
    parts = [part for _, part in both]
    if not parts:
        raise NotJudged("no collective was seen to carry whole gradients")
    for steps in study.need_graph().templates:
        families = [(lane, kind) for _, kind, lane in by_backward(steps, Communications(purposes=(GRADIENT,)))]
        if len(families) > len(set(families)):
            raise NotJudged("gradients are reduced in several backwards of a step, and would be sent in the last only")
    sizes = _value_bytes(study, parts)
    around = {
        (part, group): links_around(link, *_typical(part))
        for whole, part in both
        for group, link in links_of(whole, part).items()
    }
    host_ms = study.host_ms(GRADIENT)

    def variant(place: int) -> tuple[WhatIfs, WhatIfs]:
        now, then = list[Merge](), list[Merge]()
        for (_, group), links in around.items():
            link, of = links[min(place, len(links) - 1)], Communications(purposes=(GRADIENT,), groups=(group,))
            now.append(Merge(of, link, together=1))
            then.append(Merge(of, _legs(link, sizes[group]), most_bytes=math.inf, host_ms=host_ms))
        return tuple(now), tuple(then)

    (as_it_is, then), *others = map(variant, range(max(map(len, around.values()))))
    values = sum(moved_bytes(study, part.table) / sizes[part.groups[0]] for part in parts)
    older = "DeepSpeed 0.19 has no 1-bit optimizers any more: it takes an older one"
    notes = (
        f"of steps behind the warm-up: the first {freeze_step:,} (freeze_step) reduce whole gradients, as those of "
        "this run do",
        "it trains differently: behind the warm-up the variance stays what it is, and momenta travel as signs",
        *(() if own else (older,)),
    )
    return Effect(
        "comm.volume", then, as_it_is, tuple(others), costs_ms=0.0 if study.on_gpu else values * PACK_NS / 1e6,
        costs_between=PACK_BETWEEN, counts_cores=True, notes=notes,
    )  # fmt: skip


def _legs(link: Link, value_bytes: int) -> Link:
    """What the bytes of an all-reduce take as signs: as many legs, and that share of the bytes."""
    return replace(link, latency_ms=LEGS * link.latency_ms, ms_per_byte=link.ms_per_byte * BITS / value_bytes)


def _typical(part: Domain) -> tuple[float, float]:
    """Bytes of a median reduction, and of the largest."""
    return float(part.table["bytes"].median()), float(part.table["bytes"].max())


def _value_bytes(study: Study, parts: list[Domain]) -> Mapping[str, int]:
    """Of each process group, bytes of a value of its gradients. Raises NotJudged where that was not captured."""
    formats_of = formats(study)
    found = {group: FLOAT_BYTES.get(formats_of.get((group, GRADIENT), "")) for part in parts for group in part.groups}
    known = {group: size for group, size in found.items() if size}
    if len(known) < len(found):
        raise NotJudged("the number format of the gradients was not captured")
    return known


def _section(study: Study) -> Mapping[str, Any]:
    sections = [one.get("optimizer") for one in configurations(study)]
    return next((one for one in sections if isinstance(one, Mapping)), {})


def _type(study: Study) -> str:
    return str(_section(study).get("type", ""))


def _freeze_step(study: Study) -> int:
    params = _section(study).get("params")
    value = params.get("freeze_step") if isinstance(params, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else FREEZE_STEP
