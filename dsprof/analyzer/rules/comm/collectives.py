"""comm.small-messages, comm.large-bucket and comm.exposed: each dimension of the job is judged by itself, by how it
communicates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from ... import signals
from ...align.groups import REPLICATE
from ...candidate import Candidate
from ...finding import Finding
from ...price.calibration import ModelError
from ...study import Study
from ..base import NotConcerned, NotJudged, PartlyJudged, zero_stage
from ..rule import Found, Look, Rule
from .by_hand import reduced_together
from .ddp_buckets import bucket_size
from .deepspeed_config import is_own_engine, stage_of
from .dimensions import GRADIENT, Domain, domains, need_every_rank, waited_for_most, waits_mostly_for_layers
from .engine_reductions import engine_reductions
from .prefetch import exposed_gathers
from .shards import MOSTLY, gathers_parameters, small_shards
from .zero_buckets import blocking_buckets
from .zero_prefetch import exposed_fetches, larger_buckets

CODES: Final = ("comm.small-messages", "comm.large-bucket", "comm.exposed")


def collectives(study: Study) -> Found:
    """What is communicated too often, or in the way although it could overlap the computation."""
    signals.steps(study)
    need_every_rank(study)
    stage = zero_stage(study)
    if stage in (1, 2):
        _need_gradients_to_matter(study)
        return blocking_buckets(study)
    judges = _judges(study, stage)
    if not judges:
        if not domains(study) or waits_mostly_for_layers(study):
            raise NotConcerned
        waited = waited_for_most(study)
        untried = f"ranks wait for {waited}, for which no change is tried in this version, and " if waited else ""
        raise NotJudged(f"{untried}no collective was seen to carry gradients: none reduces inside backward")
    found: list[Candidate | Finding] = []
    unjudged: dict[str, list[str]] = {}
    for domain, judge in judges:
        try:
            found += judge()
        except PartlyJudged as part:
            found += part.findings
            for code in part.unjudged:
                unjudged.setdefault(_named(domain, str(part)), []).append(code)
        except NotJudged as reason:
            unjudged.setdefault(_named(domain, str(reason)), []).extend(CODES)
    if unjudged:
        codes = tuple(dict.fromkeys(code for of in unjudged.values() for code in of))
        raise PartlyJudged(_said_once(found), codes, "; ".join(unjudged))
    return _said_once(found)


def _said_once(found: Sequence[Candidate | Finding]) -> list[Candidate | Finding]:
    """Without comm.exposed where all keys that hide what is waited for are turned by comm.small-messages of the same
    dimension, too, and most of what they gain is owed to fewer gathers, which that one tells of."""
    small = [one for one in found if isinstance(one, Finding) and one.code == "comm.small-messages"]

    def keys(finding: Finding) -> set[str]:
        return {key for fix in finding.fixes for key, _ in fix.knobs}

    def said(one: Candidate | Finding) -> bool:
        return isinstance(one, Finding) and one.code == "comm.exposed" and bool(keys(one)) and any(
            keys(one) <= keys(other)
            and one.where.dimension == other.where.dimension
            and MOSTLY * one.gain.ms <= other.gain.ms
            and one.gain.low <= other.gain.low
            for other in small
        )  # fmt: skip

    return [one for one in found if not said(one)]


def _named(domain: Domain, reason: str) -> str:
    return f"dimension {domain.name}: {reason}" if domain.name else reason


def _judges(study: Study, stage: int | None) -> list[tuple[Domain, Callable[[], list[Finding]]]]:
    """What is to be asked of each dimension that moves gradients or parameters."""
    every = domains(study)
    replicas = [one for one in every if one.role == REPLICATE and len(one.of(GRADIENT).table)]
    found: list[tuple[Domain, Callable[[], list[Finding]]]] = []
    sharded = [one for one in every if gathers_parameters(one)]
    by_zero = stage_of(study) == 3
    by_engine = is_own_engine(study) and stage_of(study) in (1, 2)
    for domain in sharded:
        of_domain = [one for one in replicas if one is not domain]
        by_key = larger_buckets if by_zero else None  # its keys are of stage 3
        found.append((domain, partial(small_shards, study, domain, of_domain, by_key)))
        if by_engine:  # what is gathered there are updated parameters: it is gradients that modules wait for
            found.append((domain, partial(_reduced, study, domain, stage)))
        else:
            found.append((domain, partial(exposed_fetches if by_zero else exposed_gathers, study, domain)))
    for domain in every:
        if domain in sharded or (sharded and domain in replicas) or domain.of(GRADIENT).table.empty:
            continue
        found.append((domain, partial(_reduced, study, domain, stage)))
    return found


def _reduced(study: Study, domain: Domain, stage: int | None) -> list[Finding]:
    """Of gradients that every rank has whole."""
    if stage is not None:
        _need_gradients_to_matter(study)
        raise NotJudged(
            "DeepSpeed reduces gradients when backward is over, in pieces whose size no key tells (stage 0)"
        )
    try:
        if is_own_engine(study) and stage_of(study) in (1, 2):
            return engine_reductions(study, domain)
        return bucket_size(study, domain)
    except NotJudged as unjudged:
        if study.facts.get("ddp"):
            raise
        try:
            return reduced_together(study, domain)
        except NotJudged:
            raise unjudged from None


def _need_gradients_to_matter(study: Study) -> None:
    """Raises NotJudged where waiting for collectives is mostly for those of tensor parallelism."""
    if waits_mostly_for_layers(study):
        raise NotJudged("waiting for collectives is mostly for tensor-parallel ones: see comm.tensor-parallel")


_LOOK = Look(collectives, needs=(signals.replay,))
RULES = (
    Rule(
        "comm.small-messages",
        "many small collectives are bound by latency",
        explains=("comm_exposed",),
        exhausts=("comm_exposed",),
        looks=(_LOOK,),
        needs=(signals.communications,),
        outranked_by=("comm.slow-link",),
        error=ModelError(of_gain=0.25, of_step=0.02, busy=0.02, busy_above=0.05),
        came_true=(48, 50),
        place=90,
    ),
    Rule(
        "comm.large-bucket",
        "gradients are reduced in buckets so large that the last of them are hidden by nothing",
        explains=("comm_exposed",),
        exhausts=("comm_exposed",),
        looks=(_LOOK,),
        needs=(signals.communications,),
        outranked_by=("comm.slow-link",),
        error=ModelError(of_gain=0.105, of_step=0.014, busy=0.014),
        came_true=(25, 25),
        place=95,
    ),
    Rule(
        "comm.exposed",
        "collectives block the computation although they could overlap it",
        explains=("comm_exposed",),
        exhausts=("comm_exposed",),
        looks=(_LOOK,),
        needs=(signals.communications,),
        outranked_by=("comm.slow-link",),
        error=ModelError(of_gain=0.175, of_step=0.014, busy=0.014),
        place=100,
    ),
)
