"""DeepSpeed's ZeRO stages 1 and 2 on CPUs: gradients are reduced in buckets, each of which backward waits for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pandas as pd

from ...effect import Effect, WhatIfs
from ...finding import NOTHING, Evidence, Finding, Gain, Where
from ...graph.link import Link, capped, fit_link
from ...study import Study
from ...text import count, ms, size
from ...whatif.merge import Merge, packed
from ...whatif.select import Communications
from ..base import LEAST_SHARE, NotJudged, gains_tried
from .by_hand import reduced_in
from .ddp_buckets import with_buckets_of
from .deepspeed_config import elements, is_own_engine, item_bytes, stage_of, told, zero_config, zero_fix
from .dimensions import domains, fewer_of
from .fetched_parameters import need_larger, with_scatter_bucket
from .possible_links import FAR, links_around
from .shards import bucket_work_left

TOGETHER: Final = (2, 4, 8, 16, 32, 64)
"""So many buckets in one are tried."""
KEY: Final = "reduce_bucket_size"
GRADIENTS: Final = Communications(purposes=("gradient",))
OF_ALL_GATHER: Final = 2.0
"""Bytes that an all-reduce moves, as a multiple of an all-gather of as much."""
FEWEST_GATHERS: Final = 5
CLIPPED: Final = 0.95
"""Quantile at which transfer times are clipped."""


@dataclass(frozen=True)
class _Larger:
    """Buckets of up to so many elements: how many a step there would be."""

    elements: int
    buckets: float
    gain: Gain


def blocking_buckets(study: Study) -> list[Finding]:
    """Reductions in backward that each pay the latency: what a larger `reduce_bucket_size` would gain.

    One that is larger holds several of the present buckets, is reduced with the last of them, and waited for there.
    Raises NotJudged where they are not waited for at once, as on a device's stream.
    """
    table = _gradients(study)
    if table.empty:
        raise NotJudged("no collective was seen to carry gradients: none reduces inside backward")
    waited = float(study.ordinary["comm_exposed"].mean())
    link, a_step = _link(study, table), len(table) / len(study.step_numbers)
    best = max(_larger(study, table, link), key=lambda larger: larger.gain.ms, default=None)
    where = Where(
        group=str(table["group"].mode().iloc[0]), op=str(table["name"].mode().iloc[0]), steps=study.step_range
    )
    median = float(table["bytes"].median())
    if best is None or best.gain.ms < LEAST_SHARE * study.step_ms:
        if waited < LEAST_SHARE * study.step_ms:
            return []
        exposed = (
            Evidence("exposed communication a step", round(waited, 3), "ms", 0.0),
            Evidence("share of the step", round(100 * waited / study.step_ms, 1), "%"),
            Evidence("gradient collectives a step", round(a_step), "count"),
        )
        title = f"{ms(waited)} of each step wait for collectives; no larger reduce_bucket_size would save any of it"
        return [Finding("comm.exposed", title, "info", where, exposed, NOTHING)]
    evidence = (
        Evidence("gradient collectives a step", round(a_step), "count", round(best.buckets)),
        Evidence("median size", round(median / 1024, 1), "KiB"),
        Evidence("latency of one", round(link.latency_ms, 4), "ms"),
        Evidence("host time to issue one", round(study.host_ms("gradient"), 4), "ms"),
        Evidence("exposed communication a step", round(waited, 3), "ms", 0.0),
    )
    how_many = count(round(a_step), "reduction")
    title = f"{how_many} of gradients a step, of {size(median)} each, are waited for one by one"
    fix = zero_fix({KEY: best.elements}, f"{count(round(best.buckets), 'reduction')} a step", best.gain)
    return [Finding("comm.small-messages", title, "info", where, evidence, best.gain, (fix,))]


def _link(study: Study, table: pd.DataFrame) -> Link:
    """Fitted to all collectives of the kind and groups of the gradients': buckets are of one size, the all-reduce of
    their norm is a small one."""
    of_kind = study.judged_collectives.table
    for column in ("name", "group"):
        of_kind = of_kind[of_kind[column].isin(table[column].unique())]
    link = fit_link(of_kind)
    if is_own_engine(study):
        return link
    # Each is waited for, so their mean counts, which of small ones is several times the median that the fit goes by.
    took, size = table["transfer_ns"] / 1e6, float(table["bytes"].median())
    mean = float(took.clip(upper=took.quantile(CLIPPED)).mean())
    link = replace(link, latency_ms=max(link.latency_ms + mean - float(took.median()), 0.0))
    gathers = _gathers_of_update(study, table)
    if len(gathers) < FEWEST_GATHERS:
        return link
    a_byte = float((gathers["alone_ns"] / gathers["bytes"]).median()) / 1e6
    return capped(link, size, OF_ALL_GATHER * a_byte, float(gathers["bytes"].max()))


def _gathers_of_update(study: Study, table: pd.DataFrame) -> pd.DataFrame:
    """The gathers of updated parameters by the ranks of the gradients, so much larger than these that they tell what
    bytes take."""
    every = study.collectives
    gathers = every[(every["name"] == "all_gather") & (every["purpose"] == "parameter") & (every["transfer_ns"] > 0)]
    gathers = gathers[gathers["step"].isin(study.step_numbers) & gathers["group"].isin(table["group"].unique())]
    return gathers[gathers["bytes"] >= FAR * table["bytes"].max()]


def _gradients(study: Study) -> pd.DataFrame:
    rows = study.judged_collectives
    return rows.table.take(np.flatnonzero(rows.are("purpose", "gradient")))


def _larger(study: Study, table: pd.DataFrame, link: Link) -> list[_Larger]:
    """The sizes that hold more than one of the present buckets, and more than DeepSpeed was told."""
    largest, item = float(table["bytes"].max()), item_bytes(study)
    before = len(table) / len(study.step_numbers)
    tried: list[tuple[int, float]] = []
    effects: list[Effect] = []
    now = _now(study, table, link)
    for together in TOGETHER:
        most = elements(study, together * largest)
        buckets = _buckets(study, most * item)
        if most > told(study, KEY) and buckets < (tried[-1][1] if tried else before):
            tried.append((most, buckets))
            effects.append(_of_up_to(study, table, link, now, most * item, buckets))
    as_it_is = Effect("comm.exposed", now[0], now[0])  # that must be replayed, whatever else is
    gains = gains_tried(study, effects or [as_it_is], "no other reduce_bucket_size was tried")
    return [_Larger(most, buckets, gain) for (most, buckets), gain in zip(tried, gains, strict=False)]


def _buckets(study: Study, most: float) -> float:
    """How many there would be in a step, mean, of up to `most` bytes."""
    graph = study.need_graph()
    reached = is_own_engine(study)
    of_templates = [len(packed(steps, GRADIENTS, most, reached)) * len(steps.numbers) for steps in graph.templates]
    return sum(of_templates) / len(graph.numbers)


def _now(study: Study, table: pd.DataFrame, link: Link) -> list[WhatIfs]:
    """The buckets as they are, with transfers modelled over each link that there may be."""
    return [_up_to(study, each, 0.0) for each in _links_around(study, table, link, math.inf)]


def _links_around(study: Study, table: pd.DataFrame, link: Link, most: float) -> list[Link]:
    """Those that there may be, of buckets of up to `most` bytes: none is larger than all gradients of a step."""
    whole = float(table["bytes"].sum()) / len(study.step_numbers)
    return links_around(link, float(table["bytes"].median()), min(most, whole))


def _of_up_to(
    study: Study, table: pd.DataFrame, link: Link, now: Sequence[WhatIfs], most: float, buckets: float
) -> Effect:
    """Buckets of up to `most` bytes (0: as they are), of which there are so many a step."""
    each = _links_around(study, table, link, most)  # of `now` the last may be of larger buckets only
    spared = 1 - buckets / (len(table) / len(study.step_numbers))
    left = bucket_work_left(study, table, spared)
    pairs = [(present, _up_to(study, one, most, left)) for present, one in zip(now, each, strict=False)]
    if left < 1:
        pairs.append((now[0], _up_to(study, each[0], most)))
    (as_it_is, then), *others = pairs
    return Effect(
        "comm.small-messages",
        then,
        as_it_is,
        tuple(others),
        fewer=fewer_of(study, spared, table),
        counts_cores=True,
    )


def _up_to(study: Study, link: Link, most: float, left: float = 1.0) -> WhatIfs:
    """left: of what the engine works for buckets (`bucket_work_left`)"""
    # Where the work for buckets was seen, the calls to issue are in it.
    host_ms = study.host_ms("gradient") if left == 1 else 0.0
    reached = is_own_engine(study)
    merge = Merge(GRADIENTS, link, most_bytes=most, reached=reached, host_ms=host_ms, blocking=True, unit_work=left)
    return (merge,)


def with_bucket_size(study: Study, number: float) -> Effect:
    """A larger `reduce_bucket_size`, of so many elements. Raises NotJudged where it holds less than the present one, as
    smaller buckets cannot be made of what is known of larger ones that are waited for at once, and where the stage has
    no such buckets."""
    if stage_of(study) == 3:
        return with_scatter_bucket(study, number)
    if stage_of(study) not in (1, 2):
        raise NotJudged("reduce_bucket_size is predicted for ZeRO's stages 1 to 3 only")
    config = zero_config(study) if is_own_engine(study) else None
    if config is not None and config.zero_optimization.overlap_comm:
        if number == config.zero_optimization.reduce_bucket_size:
            return Effect("comm.small-messages")
        return with_buckets_of(study, int(number * item_bytes(study)))
    table = _gradients(study)
    if table.empty:
        raise NotJudged("no collective was seen to carry gradients")
    most, present = number * item_bytes(study), told(study, KEY)
    need_larger(study, number, float(table["bytes"].max()))
    reduced = [part for part in (one.of("gradient") for one in domains(study)) if len(part.table)]
    if config is not None and len(reduced) == 1:
        return reduced_in(study, reduced[0], 0.0 if number == present else most)
    link, before = _link(study, table), len(table) / len(study.step_numbers)
    now = _now(study, table, link)
    if number == present:
        return _of_up_to(study, table, link, now, 0.0, before)
    return _of_up_to(study, table, link, now, most, _buckets(study, most))
