"""Collectives: too small, or in the way although they could overlap the computation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ... import signals
from ...arrays import Float
from ...finding import Evidence, Finding, Fix, Gain, Where
from ...graph.link import Link, fit_link
from ...price.calibration import ModelError
from ...price.contention import freed_ms, kept_of_overlap
from ...price.gains import beside_other_work, mean_gain
from ...study import Study
from ...text import count, ms, size
from ...whatif.rebucket import Rebucket
from ..base import LEAST_SHARE, NotConcerned, NotJudged, PartlyJudged, ddp_argument_fix, replay_divided, zero_stage
from ..rule import Look, Rule
from .shards import UNJUDGED, sharded, small_shards
from .zero_buckets import blocking_buckets

CAPS_MB: Final = (1, 2, 5, 10, 25, 50, 100)
TENSOR_PARALLEL: Final = "tensor-parallel"
"""Purpose of what the ranks that share a layer communicate."""


@dataclass(frozen=True)
class Rebucketed:
    """Another bucket size, replayed."""

    cap_mb: float
    buckets: int
    gain: Gain


def bucket_size(study: Study) -> list[Finding]:
    """The gradient buckets are too small (each pays the latency) or too large (they end after the computation).

    Every size is replayed, and the best one says which of the two it is: comm.small-messages or comm.exposed.
    """
    signals.steps(study)
    if study.ranks_missing:
        raise NotJudged("without every rank's capture, waiting for a late peer looks the same")
    stage = zero_stage(study)
    if stage in (1, 2):
        _need_gradients_to_matter(study)
        return blocking_buckets(study)
    if sharded(study):
        raise PartlyJudged(small_shards(study), ("comm.exposed",), UNJUDGED)
    if stage is not None:
        _need_gradients_to_matter(study)
        raise NotJudged(
            "DeepSpeed reduces gradients when backward is over, in pieces whose size no key tells (stage 0)"
        )
    waited = float(study.ordinary["comm_exposed"].mean())
    cut = _gradients(study)
    if cut is None:
        if study.collectives["step"].isin(study.step_numbers).any():
            _need_gradients_to_matter(study)
            raise NotJudged("no collective was seen to carry gradients: none reduces inside backward")
        raise NotConcerned
    rebucketings = _rebucketings(study, cut)
    best = max(rebucketings, key=lambda rebucketed: rebucketed.gain.ms, default=None)
    if best is not None and best.gain.ms < LEAST_SHARE * study.step_ms:
        best = None
    if best is None:
        _need_gradients_to_matter(study)
    if best is not None and best.buckets < cut.count:
        return [_small(study, cut, best)]
    if best is None and waited < LEAST_SHARE * study.step_ms:
        return []
    return [_exposed(study, cut, best, waited)]


def _need_gradients_to_matter(study: Study) -> None:
    """Raises NotJudged where waiting for collectives is mostly for those of tensor parallelism."""
    waits, named = study.waits, ["group", "seq"]
    start, arrival, end = (waits[name].astype("Float64") for name in ("start_ns", "arrival_ns", "end_ns"))
    exposed = (end - np.maximum(start, arrival.fillna(start))).clip(lower=0)
    issued = study.collectives[study.collectives["step"].isin(study.step_numbers)]
    purposes = (
        waits[named].astype(object).merge(issued[[*named, "purpose"]].astype(object), "left", on=named)["purpose"]
    )
    of = exposed.astype(float).groupby(purposes.to_numpy(object)).sum()
    if len(of) and of.get(TENSOR_PARALLEL, 0.0) > of.sum() / 2:
        raise NotJudged(
            "waiting for collectives is mostly for tensor-parallel ones, and no other division of the layers was tried"
        )


def _small(study: Study, cut: _Cut, best: Rebucketed) -> Finding:
    evidence = (
        Evidence("gradient collectives a step", cut.count, "count", best.buckets),
        Evidence("median size", round(cut.median_bytes / 1024, 1), "KiB"),
        Evidence("latency of one", round(cut.link.latency_ms, 4), "ms"),
        Evidence("host time to issue one", round(cut.host_ms, 4), "ms"),
    )
    title = f"{cut.count} gradient collectives a step of {size(cut.median_bytes)} each are bound by latency"
    where = Where(group=cut.group, op=cut.op, steps=study.step_range)
    fixes = (_bucket_fix(cut, best),)
    return Finding("comm.small-messages", title, "info", where, evidence, best.gain, fixes)


def _exposed(study: Study, cut: _Cut, best: Rebucketed | None, waited: float) -> Finding:
    evidence = (
        Evidence("exposed communication a step", round(waited, 3), "ms", 0.0),
        Evidence("share of the step", round(100 * waited / study.step_ms, 1), "%"),
        Evidence("gradient collectives a step", cut.count, "count", best.buckets if best else None),
    )
    gain = best.gain if best is not None else Gain(0.0, 0.0, 0.0, 0.0)
    fixes = [_bucket_fix(cut, best)] if best is not None else []
    fact = cut.ddp or {}
    if fact.get("find_unused_parameters"):
        note = ", if every parameter is used"
        fixes.append(ddp_argument_fix(fact, "find_unused_parameters", False, note=note))
    title = f"{ms(waited)} of each step wait for collectives"
    title += "; no other bucket size would hide more of them" if best is None and cut.ddp else ""
    where = Where(group=cut.group, op=cut.op, steps=study.step_range)
    return Finding("comm.exposed", title, "info", where, evidence, gain, tuple(fixes))


@dataclass(frozen=True)
class _Cut:
    """How the gradients are reduced now."""

    group: str
    op: str
    count: int
    total_bytes: float
    median_bytes: float
    host_ms: float
    link: Link
    sizes: tuple[int, ...]
    """Of a typical step, in order of issue."""
    ddp: dict[str, Any] | None
    """What the DistributedDataParallel that makes them said of itself."""


def _gradients(study: Study) -> _Cut | None:
    table = study.collectives
    table = table[(table["purpose"] == "gradient") & table["step"].isin(study.step_numbers)]
    if table.empty:
        return None
    steps = table["step"].nunique()
    total = float(table["bytes"].sum() / steps)
    one_step = table[table["step"] == table["step"].iloc[len(table) // 2]]
    return _Cut(
        group=str(table["group"].mode().iloc[0]),
        op=str(table["name"].mode().iloc[0]),
        count=round(len(table) / steps),
        total_bytes=total,
        median_bytes=float(table["bytes"].median()),
        host_ms=study.host_ms("gradient"),
        link=fit_link(table),
        sizes=tuple(int(size) for size in one_step.sort_values("first_ns")["bytes"]),
        ddp=_ddp_of(study, total),
    )


def _ddp_of(study: Study, total_bytes: float) -> dict[str, Any] | None:
    """The DDP whose gradients are as large as what is reduced, if any."""
    for fact in study.facts.get("ddp", []):
        if 0.5 < sum(fact.get("gradient_bytes", [])) / max(total_bytes, 1) < 2:
            return fact
    return None


def _rebucketings(study: Study, cut: _Cut) -> list[Rebucketed]:
    """The step replayed with other bucket sizes. Raises NotJudged where buckets are no knob of this job."""
    before = _replay_cut(study, cut, list(cut.sizes))
    freed = freed_ms(study, before, cut.total_bytes)
    spread = (1.0, 1 + cut.link.spread, 1 - cut.link.spread)
    found: list[Rebucketed] = []
    for cap in CAPS_MB:
        sizes = pack(_tensor_bytes(cut), cap << 20)
        if len(sizes) == cut.count or (found and found[-1].buckets == len(sizes)):
            continue
        saved = [before - _replay_cut(study, cut, sizes, slower) for slower in spread]
        if len(sizes) > cut.count:
            kept = kept_of_overlap(study)
            saved = [before - beside_other_work(study, before, before - of_link) for of_link in saved]
            saved = [np.where(of_link > 0, kept * of_link, of_link) for of_link in saved]
        gain, *ends = (mean_gain(study, of_link + freed * (1 - len(sizes) / cut.count)) for of_link in saved)
        low, high = min(end.ms for end in ends), max(end.ms for end in ends)
        found.append(Rebucketed(cap, len(sizes), replace(gain, low=min(gain.low, low), high=max(gain.high, high))))
    return found


def _replay_cut(study: Study, cut: _Cut, sizes: list[int], slower: float = 1.0) -> Float:
    """Step durations [S] with gradients cut into `sizes`. The present cut is replayed the same way, with modelled
    transfers, so that the model's own error cancels from the difference."""
    link = replace(cut.link, latency_ms=cut.link.latency_ms * slower, ms_per_byte=cut.link.ms_per_byte * slower)

    return replay_divided(study, Rebucket(tuple(sizes), link, cut.host_ms), "no other bucket size was tried")


def _tensor_bytes(cut: _Cut) -> list[int]:
    """Gradient sizes in the order they become ready; where DDP did not tell, pieces of 64 KiB."""
    if cut.ddp is not None:
        return [int(size) for size in cut.ddp["gradient_bytes"]]
    piece = 1 << 16
    return [piece] * max(int(cut.total_bytes // piece), 1)


def pack(tensors: list[int], cap_bytes: int) -> list[int]:
    """Bucket sizes as DDP makes them for an explicit bucket_cap_mb: a bucket closes when it has reached its size."""
    sizes, current = [], 0
    for tensor in tensors:
        current += tensor
        if current >= cap_bytes:
            sizes.append(current)
            current = 0
    return [*sizes, current] if current else sizes


def _bucket_fix(cut: _Cut, best: Rebucketed) -> Fix:
    if cut.ddp is None:
        return Fix(
            "code",
            f"reduce the gradients in {count(best.buckets, 'piece')} of about {best.cap_mb:g} MiB",
            gain=best.gain,
        )
    note = f": {count(best.buckets, 'collective')} a step"
    return ddp_argument_fix(cut.ddp, "bucket_cap_mb", best.cap_mb, best.gain, note)


_LOOK = Look(bucket_size, needs=(signals.replay,))
RULES = (
    Rule(
        "comm.small-messages",
        "many small collectives are bound by latency",
        explains=("comm_exposed",),
        looks=(_LOOK,),
        error=ModelError(of_gain=0.25, of_step=0.02, busy=0.02, busy_above=0.05),
        came_true=(48, 50),
        place=90,
    ),
    Rule(
        "comm.exposed",
        "collectives block the computation although they could overlap it",
        explains=("comm_exposed",),
        looks=(_LOOK,),
        error=ModelError(of_gain=0.175, of_step=0.014, busy=0.014),
        came_true=(25, 25),
        place=100,
    ),
)
