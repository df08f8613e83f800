"""Gradients that are reduced in buckets while backward goes on: too small, or too large to be hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ...effect import Effect, WhatIfs
from ...finding import NOTHING, Evidence, Finding, Fix, Gain
from ...graph.link import SLOW_MS_PER_BYTE, Link
from ...study import Study, once
from ...text import count, ms, size
from ...whatif.rebucket import Rebucket
from ..base import LEAST_SHARE, NotJudged, ddp_argument_fix, gains_tried
from .deepspeed_config import elements, is_own_engine, item_bytes, stage_of, zero_fix
from .dimensions import GRADIENT, Domain, domains, fewer_of, need_every_rank, waited_ms
from .gradient_division import GradientDivision, Reduced, Sizes, division_of
from .possible_links import FAR, beyond, by_bytes, by_latency

CAPS_MB: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 25, 50, 100)
SMALLEST_PART: Final = 1 / 16
"""Of the gradients: no smaller buckets are tried, unless of 1 MiB."""
NEARLY: Final = 0.97
"""Of what the best size gains: the fewest buckets are proposed that gain so much."""
AS_GOOD: Final = 0.9
"""Of what the best size gains, where the latency of a collective is not known."""
ONE_SIZE: Final = "the collectives seen (all of one size, or always at once) do not tell what other sizes take"


@dataclass(frozen=True)
class Rebucketed:
    """Another bucket size, replayed. buckets: of a group, mean; `in_all`: of all groups of the dimension."""

    cap_mb: float
    buckets: int
    in_all: int
    gain: Gain


def bucket_size(study: Study, domain: Domain) -> list[Finding]:
    """The gradient buckets of a dimension are too small (each pays the latency) or too large (they end after the
    computation).

    Every size is replayed, in all groups of the dimension alike, and the best one says which of the two it is:
    comm.small-messages or comm.large-bucket. Where none gains anything, what waits is comm.exposed. Raises NotJudged
    where buckets are no knob of this job.
    """
    waited = waited_ms(study, domain)
    cut, best = best_division(study, domain)
    if best is not None:
        return [_small(study, cut, best) if best.in_all < cut.in_all else _large(study, cut, best, waited)]
    return [_exposed(study, cut, waited)] if waited >= LEAST_SHARE * study.step_ms else []


def best_division(study: Study, domain: Domain) -> tuple[GradientDivision, Rebucketed | None]:
    """How a dimension's gradients are reduced, and the bucket size that gains most, or nearly so with fewer buckets;
    None: none gains anything. Raises NotJudged where buckets are no knob of this job."""
    known = _divisions(study)
    if domain not in known:
        cut = division_of(study, domain)
        tried = _rebucketings(study, cut)
        known[domain] = cut, _best(cut, [one for one in tried if one.gain.ms >= LEAST_SHARE * study.step_ms])
    return known[domain]


@once
def _divisions(study: Study) -> dict[Domain, tuple[GradientDivision, Rebucketed | None]]:
    """What was found of each dimension that was asked about."""
    return {}


def _best(cut: GradientDivision, tried: list[Rebucketed]) -> Rebucketed | None:
    """The fewest buckets that gain nearly the most. Of large collectives of one size the link's latency is not known,
    which each of many small ones would have."""
    most = max(tried, key=lambda one: one.gain.ms, default=None)
    if most is None or most.gain.ms <= 0:
        return most
    part = NEARLY if cut.link.fitted or cut.link.latency_ms > 0 else AS_GOOD
    least_ms, low_ms = part * most.gain.ms, most.gain.low - (1 - part) * most.gain.ms  # nearly as certain, too
    nearly = [one for one in tried if one.gain.ms >= least_ms and one.gain.low >= low_ms]
    return min(nearly, key=lambda one: one.in_all, default=most)


def _small(study: Study, cut: GradientDivision, best: Rebucketed) -> Finding:
    evidence = (
        Evidence("gradient collectives a step", cut.count, "count", best.buckets),
        Evidence("median size", round(cut.median_bytes / 1024, 1), "KiB"),
        Evidence("latency of one", round(cut.link.latency_ms, 4), "ms"),
        Evidence("host time to issue one", round(cut.host_ms, 4), "ms"),
    )
    title = f"{cut.count} gradient collectives a step (median {size(cut.median_bytes)}) are bound by latency"
    where = cut.domain.where(study, cut.op)
    fixes = (_bucket_fix(study, cut, best),)
    return Finding(
        "comm.small-messages", title + cut.domain.inside, "info", where, evidence, best.gain, fixes,
        unknown="" if cut.link.fitted else ONE_SIZE,
    )  # fmt: skip


def _large(study: Study, cut: GradientDivision, best: Rebucketed, waited: float) -> Finding:
    largest = max(size for group in cut.groups.values() for size in group.sizes)
    evidence = (
        Evidence("largest bucket", round(largest / 2**20, 3), "MiB", round(best.cap_mb, 3)),
        Evidence("gradient collectives a step", cut.count, "count", best.buckets),
        *_waiting(study, waited),
    )
    one = "one bucket" if cut.count == 1 else f"buckets of up to {size(largest)}"
    title = f"gradients are reduced in {one}, too late to hide behind backward: {ms(waited)} of each step wait for them"
    return Finding(
        "comm.large-bucket", title + cut.domain.inside, "info", cut.domain.where(study, cut.op), evidence, best.gain,
        (_bucket_fix(study, cut, best),), unknown="" if cut.link.fitted else ONE_SIZE,
    )  # fmt: skip


def _exposed(study: Study, cut: GradientDivision, waited: float) -> Finding:
    """What no bucket size hides."""
    evidence = (*_waiting(study, waited), Evidence("gradient collectives a step", cut.count, "count"))
    fact = cut.ddp or {}
    note = ", if every parameter is used"
    fix = ddp_argument_fix(fact, "find_unused_parameters", False, note=note)
    unused = (fix,) if fact.get("find_unused_parameters") else ()
    title = f"{ms(waited)} of each step wait for collectives{cut.domain.inside}"
    title += "; no other bucket size would hide more of them" if cut.ddp else ""
    where = cut.domain.where(study, cut.op)
    return Finding("comm.exposed", title, "info", where, evidence, NOTHING, unused)


def _waiting(study: Study, waited: float) -> tuple[Evidence, Evidence]:
    return (
        Evidence("exposed communication a step", round(waited, 3), "ms", 0.0),
        Evidence("share of the step", round(100 * waited / study.step_ms, 1), "%"),
    )


def _rebucketings(study: Study, cut: GradientDivision) -> list[Rebucketed]:
    """Other bucket sizes, with what each gains. Raises NotJudged where buckets are no knob of this job."""
    tried: list[tuple[float, int]] = []
    effects: list[Effect] = []
    now, last = _now([cut]), dict[Reduced, list[int]]()
    for cap in (_as_written(study, cut, most) for most in _caps_mb(cut)):
        sizes = _sizes(cut, cap)
        in_all = sum(map(len, sizes.values()))
        if tried and sizes == last:
            tried[-1] = cap, in_all  # the largest that divides them so
        elif in_all != cut.in_all and not (tried and tried[-1][1] == in_all):
            tried.append((cap, in_all))
            effects.append(_divided_otherwise(study, [cut], [sizes], now))
            last = dict(sizes)
    as_it_is = Effect("comm.exposed", now, now)  # where there is no other size either, that must be a knob
    gains = gains_tried(study, effects or [as_it_is], "no other bucket size was tried")
    groups = len(cut.domain.groups)
    return [
        Rebucketed(cap, round(in_all / groups), in_all, gain)
        for (cap, in_all), gain in zip(tried, gains, strict=False)
    ]  # fmt: skip


def _caps_mb(cut: GradientDivision) -> list[float]:
    """The sizes that are tried of gradients so large. Those below 1 MiB matter over a slow link only: elsewhere so
    little takes no time to speak of, and what it takes is cores that are busy."""
    largest = [(group.link, max(group.sizes, default=0)) for group in cut.groups.values()]
    slow = any(float(link.transfer_ms(np.array(size))) > SLOW_MS_PER_BYTE * size for link, size in largest)
    if not slow or (cut.ddp is not None and cut.ddp.get("framework") == "transformers"):  # its flag takes whole numbers
        return [cap for cap in CAPS_MB if cap >= 1]
    return [cap for cap in CAPS_MB if cap >= min(1.0, SMALLEST_PART * cut.total_bytes / 2**20)]


def _as_written(study: Study, cut: GradientDivision, cap_mb: float) -> float:
    """A bucket's size in MiB as a fix would write it: of an engine in round numbers of elements."""
    if not _is_of_engine(study, cut):
        return cap_mb
    return elements(study, cap_mb * 2**20) * item_bytes(study) / 2**20


def _is_of_engine(study: Study, cut: GradientDivision) -> bool:
    return cut.ddp is None and is_own_engine(study) and stage_of(study) in (1, 2)


def _sizes(cut: GradientDivision, cap_mb: float) -> Sizes:
    return {reduced: now.packed(int(cap_mb * 2**20)) for reduced, now in cut.groups.items()}


def _now(cuts: Sequence[GradientDivision]) -> WhatIfs:
    """The present cuts, with modelled transfers."""
    return tuple(
        one for cut in cuts for one in _divided(cut, {reduced: list(of.sizes) for reduced, of in cut.groups.items()})
    )


def _divided_otherwise(study: Study, cuts: Sequence[GradientDivision], sizes: Sequence[Sizes], now: WhatIfs) -> Effect:
    """The gradients of each of these dimensions cut into `sizes`. The present cut is replayed the same way (`now`), so
    that the model's own error cancels from the difference."""
    before, after = sum(cut.in_all for cut in cuts), sum(len(of) for one in sizes for of in one.values())

    def divided(slower: int, by_bytes: bool = False) -> WhatIfs:
        pairs = zip(map(_by_bytes, cuts) if by_bytes else cuts, sizes, strict=True)
        return tuple(one for cut, of in pairs for one in _divided(cut, of, 1 + slower * cut.link.spread))

    pairs = [(now, divided(1)), (now, divided(-1))]
    # All of one size: it may be the bytes that take long, or a part of it latency, which each further one has.
    if any(cut.domain.on_device and not cut.link.fitted and cut.link.latency_ms > 0 for cut in cuts):
        pairs.append((now, divided(0, by_bytes=True)))
    for other, concerns in ((_with_more_latency, after > before), (_beyond, _are_far(cuts, sizes))):
        if concerns:
            then = tuple(one for cut, of in zip(map(other, cuts), sizes, strict=True) for one in _divided(cut, of))
            pairs.append((_now([other(cut) for cut in cuts]), then))
    return Effect(
        "comm.small-messages" if after < before else "comm.large-bucket",
        divided(0),
        now,
        tuple(pairs),
        overlaps="more" if after > before else "",
        fewer=fewer_of(study, 1 - after / before, *(cut.domain.table for cut in cuts)),
        counts_cores=True,
    )


def _beyond(cut: GradientDivision) -> GradientDivision:
    """The same over links of whose bytes more may take long than was fitted to small ones."""
    return cut.over(lambda now: beyond(now.link) if now.link.fitted else now.link)


def _with_more_latency(cut: GradientDivision) -> GradientDivision:
    """The same over links of whose transfers a part may be latency, where all that were seen are of one size."""
    if cut.domain.on_device:
        return cut
    return cut.over(lambda now: now.link if now.link.fitted else by_latency(now.link, max(now.sizes)))


def _are_far(cuts: Sequence[GradientDivision], sizes: Sequence[Sizes]) -> bool:
    """Whether some of these buckets are much larger than all that a group's link was fitted to."""
    return any(
        cut.groups[reduced].link.fitted and max(of_group, default=0) > FAR * cut.groups[reduced].link.largest
        for cut, of in zip(cuts, sizes, strict=True) for reduced, of_group in of.items()
    )  # fmt: skip


def _by_bytes(cut: GradientDivision) -> GradientDivision:
    """The same over links of which as much as may be is owed to the bytes."""
    return cut.over(lambda now: now.link if now.link.fitted else by_bytes(now.link, cut.median_bytes))


def _divided(cut: GradientDivision, sizes: Sizes, slower: float = 1.0) -> list[Rebucket]:
    """Each group's gradients cut into `sizes`, over links that take so many times as long."""

    def link(reduced: Reduced) -> Link:
        now = cut.groups[reduced].link
        return replace(now, latency_ms=now.latency_ms * slower, ms_per_byte=now.ms_per_byte * slower)

    return [Rebucket(tuple(of_group), link(reduced), cut.host_ms, *reduced) for reduced, of_group in sizes.items()]


def with_cap(study: Study, cap_mb: float) -> Effect:
    """Buckets of another `bucket_cap_mb`, in every dimension whose gradients a DistributedDataParallel reduces. Raises
    NotJudged where none does, or where what it makes of its gradients is not known."""
    need_every_rank(study)
    reduced = [domain for domain in domains(study) if len(domain.of(GRADIENT).table)]
    cuts = [cut for cut in (division_of(study, domain) for domain in reduced) if cut.ddp is not None]
    if not cuts:
        raise NotJudged("no DistributedDataParallel was seen to reduce gradients in this run")
    return _divided_otherwise(study, cuts, [_sizes(cut, cap_mb) for cut in cuts], _now(cuts))


def with_buckets_of(study: Study, most_bytes: int) -> Effect:
    """Gradients that an engine reduces while backward goes on, in buckets of up to so many bytes."""
    need_every_rank(study)
    reduced = [domain for domain in domains(study) if len(domain.of(GRADIENT).table)]
    if not reduced:
        raise NotJudged("no collective was seen to carry gradients")
    cuts = [division_of(study, domain) for domain in reduced]
    return _divided_otherwise(study, cuts, [_sizes(cut, most_bytes / 2**20) for cut in cuts], _now(cuts))


def _bucket_fix(study: Study, cut: GradientDivision, best: Rebucketed) -> Fix:
    if _is_of_engine(study, cut):
        most = elements(study, best.cap_mb * 2**20)
        return zero_fix({"reduce_bucket_size": most}, f"{count(best.buckets, 'reduction')} a step", best.gain)
    if cut.ddp is None:
        return Fix(
            "code",
            f"reduce the gradients in {count(best.buckets, 'piece')} of about {best.cap_mb:g} MiB, each as soon as "
            "backward has made it",
            gain=best.gain,
        )
    note = f": {count(best.buckets, 'collective')} a step"
    return ddp_argument_fix(cut.ddp, "bucket_cap_mb", best.cap_mb, best.gain, note)
