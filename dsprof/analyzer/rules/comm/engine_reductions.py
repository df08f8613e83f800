"""dsprof's engine in ZeRO's stages 1 and 2: gradients reduced beside backward, or waited for where they are issued, as
overlap_comm says, in buckets of reduce_bucket_size."""

from __future__ import annotations

from typing import Final

from ...finding import Evidence, Finding, Fix, Gain
from ...study import Study
from ...text import ms
from ..base import LEAST_SHARE, NotJudged, PartlyJudged, gains_tried
from .by_hand import reduced_together
from .ddp_buckets import bucket_size
from .deepspeed_config import elements, told, zero_config, zero_fix
from .dimensions import GRADIENT, Domain, domains, waited_ms
from .zero_stage import with_overlap

BUCKET: Final = "reduce_bucket_size"


def engine_reductions(study: Study, domain: Domain) -> list[Finding]:
    """comm.exposed where overlap_comm is false and reducing beside backward would hide something; comm.small-messages
    and comm.large-bucket by the size of the buckets. Raises NotJudged where nothing can be replayed, and PartlyJudged
    where the one or the other cannot."""
    config = zero_config(study)
    if config is None or config.zero_optimization.overlap_comm:
        return bucket_size(study, domain)
    mine = domain.of(GRADIENT)
    whole = float(mine.table["bytes"].sum()) / len(study.step_numbers) / max(len(mine.groups), 1)

    def in_one(gain: Gain) -> Fix:
        size = elements(study, whole)
        if size <= told(study, BUCKET):  # what divides them is no bucket's size: of other numbers, or other groups
            return Fix("code", "reduce gradients in numbers of one kind, of which a bucket holds all", gain=gain)
        return zero_fix({BUCKET: size}, "gradients are reduced at once", gain)

    found = list[Finding]()
    unjudged: dict[str, tuple[str, ...]] = {}
    try:
        found += reduced_together(study, domain, in_one)
    except PartlyJudged as part:  # what reducing them beside backward would gain, which is judged here
        found += [one for one in part.findings if isinstance(one, Finding)]
    except NotJudged as reason:
        unjudged[str(reason)] = ("comm.small-messages", "comm.large-bucket")
    try:
        found += _beside_backward(study, domain)
    except NotJudged as reason:
        unjudged[str(reason)] = (*unjudged.get(str(reason), ()), "comm.exposed")
    if unjudged:
        raise PartlyJudged(found, tuple(code for codes in unjudged.values() for code in codes), "; ".join(unjudged))
    return found


def _beside_backward(study: Study, domain: Domain) -> list[Finding]:
    """What overlap_comm saves, of all dimensions that reduce gradients: it is said of the one that moves most."""
    waited = waited_ms(study, domain)
    first = next(one for one in domains(study) if len(one.of(GRADIENT).table))
    if domain is not first or waited < LEAST_SHARE * study.step_ms:
        return []
    (gain,) = gains_tried(study, [with_overlap(study, True)], "overlap_comm was not tried")
    if gain.ms < LEAST_SHARE * study.step_ms:
        return []
    evidence = (
        Evidence("exposed communication a step", round(waited, 3), "ms", 0.0),
        Evidence("share of the step", round(100 * waited / study.step_ms, 1), "%"),
    )
    title = f"{ms(waited)} of each step wait for gradients, each bucket of which is reduced while backward stands still"
    fix = zero_fix({"overlap_comm": True}, "buckets are reduced while backward goes on", gain)
    op = str(domain.of(GRADIENT).table["name"].mode().iloc[0])
    return [Finding("comm.exposed", title + domain.inside, "info", domain.where(study, op), evidence, gain, (fix,))]
