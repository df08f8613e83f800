"""Sharded parameters that are gathered, and gradients that are scattered, in too many small pieces: FSDP, ZeRO."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pandas as pd

from ...arrays import Float
from ...finding import Evidence, Finding, Fix, Gain, Where
from ...graph.link import Link, fit_link
from ...graph.step_graph import SHARDING_PART
from ...price.contention import freed_ms
from ...price.gains import mean_gain
from ...study import Study, once
from ...text import count, size
from ...whatif.merge import Merge
from ...whatif.select import Communications
from ..base import LEAST_SHARE, at, code_fix, replay_divided, zero_stage
from .deepspeed_config import elements, told, zero_fix

TOGETHER: Final = (2, 4, 8, 16)
"""Neighbours merged into one, that are tried."""
KINDS: Final = ("all_gather parameter", "reduce_scatter gradient")
OF_SHARDS: Final = Communications(kinds=KINDS)
OF_A_UNIT: Final = 0.93
"""The share of the work for a unit, but for copying, that does not grow with what is in it: calibrated."""
COPY_MS_PER_BYTE: Final = 5e-7
"""Of copying shards in and out, nominal: 2 GB/s."""
SLOWEST_MS_PER_BYTE: Final = 1e-5
"""100 MB/s."""
UNJUDGED: Final = "prefetching of sharded parameters is not replayed in this version"


@dataclass(frozen=True)
class _Merged:
    together: int
    gain: Gain


@once
def of_shards(study: Study) -> pd.DataFrame:
    """The collectives of the ordinary steps that gather sharded parameters or scatter their gradients."""
    table = study.collectives
    kinds = [kind.split(" ") for kind in KINDS]
    of_kind = np.any([(table["name"] == name) & (table["purpose"] == purpose) for name, purpose in kinds], axis=0)
    return table[of_kind & table["step"].isin(study.step_numbers)]


def sharded(study: Study) -> bool:
    """Whether parameters are gathered in every step."""
    return bool((of_shards(study)["name"] == "all_gather").any())


def small_shards(study: Study) -> list[Finding]:
    """Many small gathers and scatters, each of which pays the latency: what merging neighbours would gain."""
    table = of_shards(study)
    steps = len(study.step_numbers)
    a_step = len(table) / steps
    worked = _sharding_ms(study)
    # Where the work for units was seen, the calls to issue are in it.
    host_ms = 0.0 if worked else study.host_ms("gradient", "parameter")
    link = fit_link(table)
    best = max(_merges(study, link, host_ms, a_step), key=lambda merged: merged.gain.ms, default=None)
    if best is None or best.gain.ms < LEAST_SHARE * study.step_ms:
        return []
    median = float(table["bytes"].median())
    evidence = (
        Evidence("all-gathers and reduce-scatters a step", round(a_step), "count", round(a_step / best.together)),
        Evidence("median size", round(median / 1024, 1), "KiB"),
        Evidence("latency of one", round(link.latency_ms, 4), "ms"),
        Evidence("work for the units a step", round(worked, 3), "ms")
        if worked
        else Evidence("host time to issue one", round(host_ms, 4), "ms"),
        Evidence("exposed communication a step", round(float(study.ordinary["comm_exposed"].mean()), 3), "ms", 0.0),
    )
    title = f"{a_step:.0f} all-gathers and reduce-scatters a step, of {size(median)} each, are bound by latency"
    where = Where(group=str(table["group"].mode().iloc[0]), op="all_gather", steps=study.step_range)
    fixes = _fixes(study, best)
    return [Finding("comm.small-messages", title, "info", where, evidence, best.gain, fixes)]


def _merges(study: Study, link: Link, host_ms: float, a_step: float) -> list[_Merged]:
    """What each of TOGETHER gains that leaves several of the `a_step` collectives there are."""
    tried = [together for together in TOGETHER if 2 * together <= a_step / 2]
    if not tried:
        return []
    links = links_around(link, float(of_shards(study)["bytes"].median()))
    before = [_replay(study, each, host_ms, 1) for each in links]
    freed = freed_ms(study, before[0], _moved_bytes(study))
    found = []
    for together in tried:
        fewer = freed * (1 - 1 / together)
        saved = [now - _replay(study, each, host_ms, together) + fewer for now, each in zip(before, links, strict=True)]
        gain, ends = mean_gain(study, saved[0]), [float(of_link.mean()) for of_link in saved[1:]]
        found.append(_Merged(together, replace(gain, low=min(gain.low, *ends), high=max(gain.high, *ends))))
    return found


def links_around(link: Link, size: float) -> list[Link]:
    """The link, and others that it may as well be, by what was seen of transfers of `size` bytes."""
    links = [link] + [
        replace(link, latency_ms=link.latency_ms * slower, ms_per_byte=link.ms_per_byte * slower)
        for slower in (1 - link.spread, 1 + link.spread)
    ]
    if not link.fitted:  # all of one size: it may be the bytes that take long
        links.append(_by_bytes(link, size))
    return links


def _by_bytes(link: Link, size: float) -> Link:
    """The same transfer of `size` bytes, with as much of it owed to the bytes as a slow link may need."""
    whole = float(link.transfer_ms(np.array(size)))
    a_byte = min(whole / max(size, 1.0), SLOWEST_MS_PER_BYTE)
    return Link(whole - size * a_byte, a_byte, False, link.spread)


def _replay(study: Study, link: Link, host_ms: float, together: int) -> Float:
    worked = _sharding_ms(study)
    copied = min(_moved_bytes(study) * COPY_MS_PER_BYTE / worked, 1.0) if worked else 1.0
    left = 1 - (1 - copied) * OF_A_UNIT * (1 - 1 / together)

    merged = Merge(OF_SHARDS, link, together, host_ms=host_ms, unit_work=left)
    return replay_divided(study, merged, "no other number of gathers was tried")


@once
def _sharding_ms(study: Study) -> float:
    """What FSDP itself works for its units in a step, mean over ranks and steps; 0 where that is not recorded."""
    graph = study.need_graph()
    whole = sum(float(steps.work[..., SHARDING_PART].sum()) for steps in graph.templates)
    return whole / len(graph.numbers) / graph.leads


@once
def _moved_bytes(study: Study) -> float:
    """By the gathers and scatters of one rank in a step."""
    table = of_shards(study)
    return float((table["bytes"] * table["ranks"]).sum()) / len(study.step_numbers) / max(len(study.ranks), 1)


def _fixes(study: Study, best: _Merged) -> tuple[Fix, ...]:
    fact = next(iter(study.facts.get("fsdp", [])[-1:]), None)
    if fact is not None:
        units = int(fact.get("units") or 0)
        fewer = f"{count(max(units // best.together, 1), 'unit')} instead of {units}" if units else "fewer units"
        call = "fully_shard" if fact.get("version") == 2 else "FullyShardedDataParallel"
        site = fact.get("site")
        title = f"wrap {best.together} neighbouring layers in one {call}{at(site)}: {fewer}; each holds more memory"
        grouped = "fully_shard([layer, layer, ...])" if fact.get("version") == 2 else "auto_wrap_policy"
        return (code_fix(title, grouped, "", site, best.gain),)
    if zero_stage(study) is not None:
        return (_bucket_fix(study, best),)
    return (Fix("code", f"gather and reduce {best.together} neighbours at a time", gain=best.gain),)


def _bucket_fix(study: Study, best: _Merged) -> Fix:
    """Of DeepSpeed's stage 3: as many parameters are gathered, and gradients reduced, at a time as a bucket holds."""
    largest = of_shards(study).groupby("name", observed=True)["bytes"].max()
    keys = {
        "all_gather": ("stage3_prefetch_bucket_size", "prefetch_bucket_size"),
        "reduce_scatter": ("reduce_bucket_size", "reduce_bucket_size"),
    }
    wanted = {keys[str(name)]: elements(study, best.together * float(size)) for name, size in largest.items()}
    settings = {key: value for (key, setting), value in wanted.items() if value > told(study, setting)}
    note = f"{best.together} of the present ones at a time; it holds more memory"
    return zero_fix(settings, note, best.gain) if settings else Fix("code", f"gather {note}", gain=best.gain)
