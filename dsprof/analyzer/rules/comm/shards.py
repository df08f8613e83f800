"""Sharded parameters that are gathered, and gradients that are scattered, in too many small pieces: FSDP, ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from ...align.groups import REPLICATE
from ...effect import Effect, WhatIfs
from ...finding import Evidence, Finding, Fix, Gain
from ...graph.link import Link
from ...graph.step_graph import SHARDING_PART
from ...study import Study, once
from ...text import count, size
from ...whatif.communications import BY_BYTES
from ...whatif.merge import Merge
from ...whatif.select import Communications
from ..base import LEAST_SHARE, NotJudged, at, code_fix, gains_tried
from .dimensions import Domain, domains, fewer_of, moved_bytes, waited_ms
from .possible_links import Links, links_around, links_of_kinds

TOGETHER: Final = (2, 4, 8, 16)
"""Neighbours merged into one, that are tried."""
GATHER: Final = "all_gather parameter"
KINDS: Final = (GATHER, "reduce_scatter gradient")
MODULES: Final = "fsdp2.modules_per_unit"
OF_REPLICAS: Final = "all_reduce gradient"
OF_A_UNIT: Final = 0.93
"""The share of the work for a unit, but for copying, that does not grow with what is in it: calibrated."""
OF_A_BUCKET: Final = 0.8
"""Share of what an engine works for buckets, but for copying bytes, that goes with their number; the rest goes with the
number of gradients. When 40 buckets of 64 KiB became one, 21.8 ms a step of DeepSpeed's became 3.9. For dsprof's engine
it is taken to be as much."""
COPY_MS_PER_BYTE: Final = 5e-7
"""Of copying shards in and out, nominal: 2 GB/s."""
MOSTLY: Final = 0.5
"""Of what gathering earlier and more at a time gains, what fewer gathers must save for messages to be too small."""


ByKey = Callable[[Study, Domain, int, Gain], Fix]
"""(study, dimension, how many neighbours are merged, what that saves) -> the fix of a job with a configuration, with
what that saves."""


@dataclass(frozen=True)
class _Merged:
    """Neighbours merged into one. alone: what that saves by itself; fixes: what makes them so, the first of which saves
    `gain`."""

    together: int
    alone: Gain
    fixes: tuple[Fix, ...]

    @property
    def gain(self) -> Gain:
        return self.fixes[0].gain or self.alone


def is_of_shards(table: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Which collectives gather sharded parameters or scatter their gradients."""
    kinds = [kind.split(" ") for kind in KINDS]
    found: npt.NDArray[np.bool_] = np.any(
        [(table["name"] == name) & (table["purpose"] == purpose) for name, purpose in kinds], axis=0
    )
    return found


def shards_of(domain: Domain) -> Domain:
    """The part of it that gathers sharded parameters or scatters their gradients."""
    return replace(domain, table=domain.table[is_of_shards(domain.table)])


def gathers_parameters(domain: Domain) -> bool:
    """Whether parameters are gathered in it in every step."""
    return bool(((domain.table["name"] == "all_gather") & (domain.table["purpose"] == "parameter")).any())


@dataclass(frozen=True)
class _ShardUnits:
    """What is communicated for sharded units in a dimension, and, where shards have replicas, in that of the replicas.

    domain: the gathers and scatters of the dimension of the shards; `replicas`: the reductions of the other
    a_step: collectives of a rank in a step, of the domain
    """

    domain: Domain
    replicas: tuple[Domain, ...]
    a_step: float
    worked_ms: float
    host_ms: float

    @cached_property
    def links_of_shards(self) -> Links:
        """Of each kind that is merged, by group."""
        return links_of_kinds(self.domain)

    @cached_property
    def links(self) -> Links:
        """The same, with what replicas reduce."""
        found = dict(self.links_of_shards)
        for domain in self.replicas:
            for group, link in domain.links().items():
                found[Communications(kinds=(OF_REPLICAS,), groups=(group,))] = link
        return found

    def latency(self) -> tuple[float, float]:
        """Of a gather or scatter, the mean: ms, and which part of what it takes."""
        domain = self.domain
        each = [(len(domain.kinds[of]), domain.median_bytes(of), link) for of, link in self.links_of_shards.items()]
        count, latency = [many for many, _, _ in each], [link.latency_ms for _, _, link in each]
        whole = [max(float(link.transfer_ms(np.array(size))), 1e-9) for _, size, link in each]
        mean = float(np.average(latency, weights=count))
        return mean, float(np.average(np.divide(latency, whole), weights=count))


def small_shards(
    study: Study, domain: Domain, replicas: Sequence[Domain] = (), by_key: ByKey | None = None
) -> list[Finding]:
    """Many small gathers and scatters, each of which pays the latency: what merging neighbours would gain, in all
    groups of the dimension alike.

    replicas: the dimensions in which scattered gradients are reduced once more (HSDP): as many fewer, too
    by_key:   the fix where a configuration divides them
    """
    units = _units(study, domain, replicas)
    table, a_step, worked, host_ms = units.domain.table, units.a_step, units.worked_ms, units.host_ms
    latency_ms, of_the_whole = units.latency()
    best = max(_merges(study, units, by_key), key=lambda merged: merged.gain.ms, default=None)
    if best is None or best.gain.ms < LEAST_SHARE * study.step_ms:
        return []
    saved_ms = a_step * (1 - 1 / best.together) * latency_ms if study.on_gpu else best.alone.ms
    if saved_ms < MOSTLY * best.gain.ms:
        return []  # it is that they are gathered earlier that gains: comm.exposed
    median = float(table["bytes"].median())
    evidence = (
        Evidence("all-gathers and reduce-scatters a step", round(a_step), "count", round(a_step / best.together)),
        Evidence("median size", round(median / 1024, 1), "KiB"),
        Evidence("latency of one", round(latency_ms, 4), "ms"),
        Evidence("work for the units a step", round(worked, 3), "ms")
        if worked
        else Evidence("host time to issue one", round(host_ms, 4), "ms"),
        Evidence("exposed communication a step", round(waited_ms(study, domain), 3), "ms", 0.0),
    )
    title = f"{a_step:.0f} all-gathers and reduce-scatters a step (median {size(median)}) "
    title += "are bound by latency" if of_the_whole > BY_BYTES or not worked else "take work for each unit"
    where = domain.where(study, "all_gather")
    return [Finding("comm.small-messages", title + domain.inside, "info", where, evidence, best.gain, best.fixes)]


def _units(study: Study, domain: Domain, replicas: Sequence[Domain]) -> _ShardUnits:
    shards = shards_of(domain)
    worked = sharding_ms(study) if study.facts.get("fsdp") else 0.0  # DeepSpeed's is of modules, however many are one
    # Where the work for units was seen, the calls to issue are in it.
    host_ms = 0.0 if worked else study.host_ms("gradient", "parameter")
    return _ShardUnits(shards, tuple(one.of("gradient") for one in replicas), shards.a_step(study), worked, host_ms)


def need_fully_shard(study: Study) -> None:
    """Raises NotJudged where FSDP2 was not seen to divide a model."""
    if not any(fact.get("version") == 2 for fact in study.facts.get("fsdp", [])):
        raise NotJudged("no call of fully_shard was seen in this run")


def with_modules_per_unit(study: Study, together: int) -> Effect:
    """FSDP2's units of so many of the present ones each. Raises NotJudged where fully_shard was not seen, or the run's
    own units are not of one module."""
    need_fully_shard(study)
    if MODULES in study.run.knobs:
        raise NotJudged(f"this run had --set {MODULES} itself; ask of a run without it")
    every = domains(study)
    replicas = [one for one in every if one.role == REPLICATE and len(one.of("gradient").table)]
    sharded = [
        _units(study, domain, [one for one in replicas if one is not domain])
        for domain in every
        if gathers_parameters(domain)
    ]
    if not sharded:
        raise NotJudged("no parameters were seen to be gathered")
    if together < 2:
        return Effect("comm.small-messages", counts_cores=True)
    return _together(study, sharded, together, _as_they_are(study, sharded, together))


def _as_they_are(study: Study, sharded: Sequence[_ShardUnits], most: int) -> list[WhatIfs]:
    """The present gathers and scatters with modelled transfers, over the links that there may be. most: neighbours that
    are to be merged into one."""
    return [_merged_all(study, sharded, variant, 1, most) for variant in range(_most_links(sharded, most))]


def _together(study: Study, sharded: Sequence[_ShardUnits], together: int, now: Sequence[WhatIfs]) -> Effect:
    """So many neighbours merged into one, in every dimension of these."""
    possible = now[: _most_links(sharded, together)]  # the last may be of more neighbours only
    pairs = [
        (present, _merged_all(study, sharded, variant, together, together)) for variant, present in enumerate(possible)
    ]
    (as_it_is, then), *others = pairs
    return Effect(
        "comm.small-messages",
        then,
        as_it_is,
        tuple(others),
        fewer=fewer_of(
            study, 1 - 1 / together, *(one.table for units in sharded for one in (units.domain, *units.replicas))
        ),
        counts_cores=True,
    )


def _most_links(sharded: Sequence[_ShardUnits], most: int) -> int:
    return max(len(_links(units, most)) for units in sharded)


def _merged_all(study: Study, sharded: Sequence[_ShardUnits], variant: int, together: int, most: int) -> WhatIfs:
    """So many together, over one of the links that tell of `most` together."""
    found: list[Merge] = []
    for units in sharded:
        links = _links(units, most)
        found += _merged(study, units, links[min(variant, len(links) - 1)], together)
    return tuple(found)


def _links(units: _ShardUnits, together: int) -> list[dict[Communications, Link]]:
    """The links over which it moves, and then others that they may as well be. together: the most that is merged."""
    sizes = units.domain.table["bytes"].astype(float)
    median, largest = float(sizes.median()), together * float(sizes.max())
    around = {of: links_around(link, median, largest) for of, link in units.links.items()}
    variants = max(map(len, around.values()))
    return [{of: links[min(i, len(links) - 1)] for of, links in around.items()} for i in range(variants)]


def _merges(study: Study, units: _ShardUnits, by_key: ByKey | None) -> list[_Merged]:
    """What each of TOGETHER gains that leaves several of the collectives there are, and its fixes."""
    tried = [together for together in TOGETHER if 2 * together <= units.a_step / 2]
    now = _as_they_are(study, [units], max(tried)) if tried else []
    effects = [_together(study, [units], together, now) for together in tried]
    gains = gains_tried(study, effects, "no other number of gathers was tried")
    return [
        _Merged(together, gain, _fixes(study, units.domain, together, gain, by_key))
        for together, gain in zip(tried, gains, strict=True)
    ]


def _merged(study: Study, units: _ShardUnits, links: Mapping[Communications, Link], together: int) -> list[Merge]:
    worked = units.worked_ms
    # On a GPU the device copies.
    on_host = 0.0 if study.on_gpu else moved_bytes(study, units.domain.table) * COPY_MS_PER_BYTE
    copied = min(on_host / worked, 1.0) if worked else 1.0
    left = 1 - (1 - copied) * OF_A_UNIT * (1 - 1 / together)
    ahead = study.on_gpu and bool(study.facts.get("fsdp"))
    # FSDP's own work is of no group, so one of these takes it along.
    return [
        Merge(of, link, together, host_ms=units.host_ms, unit_work=left if i == 0 else 1.0, in_advance=ahead)
        for i, (of, link) in enumerate(links.items())
    ]


@once
def sharding_ms(study: Study) -> float:
    """What FSDP itself works for its units in a step, DeepSpeed for modules (stage 3) or buckets (1 and 2), or dsprof's
    engine for both, mean over ranks and steps; 0 where that is not recorded."""
    graph = study.need_graph()
    whole = sum(float(steps.work[..., SHARDING_PART].sum(dtype=np.float64)) for steps in graph.templates)
    return whole / len(graph.numbers) / graph.leads


def bucket_work_left(study: Study, table: pd.DataFrame, spared: float) -> float:
    """Share of what an engine works for its buckets that is left of the same gradients, whose reductions are `table`,
    where a share of the buckets is spared; 1 where that was not told apart, and on devices, where threads of autograd
    do most of it and nobody waits for them."""
    worked = sharding_ms(study)
    if not worked or study.on_gpu:
        return 1.0
    copied = min(moved_bytes(study, table) * COPY_MS_PER_BYTE / worked, 1.0)
    return 1 - (1 - copied) * OF_A_BUCKET * spared


def _fixes(study: Study, domain: Domain, together: int, gain: Gain, by_key: ByKey | None) -> tuple[Fix, ...]:
    fact = next(iter(study.facts.get("fsdp", [])[-1:]), None)
    if fact is not None:
        units = int(fact.get("units") or 0)
        left = f"{count(-(-units // together), 'unit')} instead of {units}" if units else "fewer units"
        call = "fully_shard" if fact.get("version") == 2 else "FullyShardedDataParallel"
        site = fact.get("site")
        title = f"wrap {together} neighbouring layers in one {call}{at(site)}: {left}; each holds more memory"
        grouped = "fully_shard([layer, layer, ...])" if fact.get("version") == 2 else "auto_wrap_policy"
        knobs = {MODULES: together} if fact.get("version") == 2 else {}
        return (code_fix(title, grouped, "", site, gain, knobs),)
    if by_key is not None:
        return (by_key(study, domain, together, gain),)
    return (Fix("code", f"gather and reduce {together} neighbours at a time", gain=gain),)
