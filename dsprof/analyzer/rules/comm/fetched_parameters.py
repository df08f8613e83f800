"""ZeRO's stage 3 with other limits of what is gathered ahead, of how much is whole at once, and of how many gradients
are scattered together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ...effect import Effect, WhatIfs
from ...graph.link import Link, fit_link
from ...graph.step_graph import WAKE_UP_DELAY, StepGraph
from ...price.effects import unseen_ms
from ...study import Study
from ...text import count
from ...whatif import Refused, WhatIf, apply
from ...whatif.fetching import DeepSpeedFetching, FetchedBy, Fetching, OwnFetching, passes
from ...whatif.merge import Merge, packed
from ...whatif.rebucket import NotRebucketed
from ...whatif.select import Communications
from ..base import NotJudged
from .deepspeed_config import is_own_engine, item_bytes, stage_of, told, zero_config
from .dimensions import GRADIENT, Domain, domains, fewer_of
from .possible_links import FAR, agree, links_around, links_of_kinds
from .shards import GATHER, gathers_parameters, is_of_shards, shards_of

PREFETCH: Final = "stage3_prefetch_bucket_size"
LIVE: Final = "stage3_max_live_parameters"
REDUCE: Final = "reduce_bucket_size"
SCATTER: Final = "reduce_scatter gradient"


def with_prefetch_bucket(study: Study, value: Any) -> Effect:
    """So many elements of what comes next gathered ahead. Raises NotJudged where the run does not tell it."""
    return _fetched(study, PREFETCH, value)


def with_live_parameters(study: Study, value: Any) -> Effect:
    """So many gathered elements there at once. Raises NotJudged where the run does not tell it."""
    return _fetched(study, LIVE, value)


def limits(study: Study) -> tuple[float, float, float]:
    """Elements gathered ahead, there at once, and between two uses of what is kept, as the run had them. Raises
    NotJudged where it is not ZeRO's stage 3, or does not say."""
    stage = stage_of(study)
    if stage != 3:
        has = "the job has no ZeRO, as far as was captured" if stage is None else f"the job has stage {stage} of ZeRO"
        raise NotJudged(f"{has}: this is a setting of stage 3, which gathers parameters")
    config = zero_config(study)
    if config is None:
        raise NotJudged("the configuration of the run was not captured, and what it gathers ahead is not known")
    zero = config.zero_optimization
    prefetch = float(zero.stage3_prefetch_bucket_size)
    if not is_own_engine(study) and told(study, "prefetch_bucket_size"):
        prefetch = float(told(study, "prefetch_bucket_size"))
    return prefetch, float(zero.stage3_max_live_parameters), float(zero.stage3_max_reuse_distance)


def _fetched(study: Study, key: str, value: Any) -> Effect:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise NotJudged(f"{value} is no number of elements")
    prefetch, live, reuse = limits(study)
    now = prefetch if key == PREFETCH else live
    if value < now:
        # What is gathered together, or kept, tells of no single module when it would be gathered.
        raise NotJudged(
            f"the run had {now:,.0f} elements: what a smaller {key} would gather by itself is not told by what was "
            "gathered ahead, or kept; ask a run with the smaller one about the larger"
        )
    sharded = [one for one in domains(study) if gathers_parameters(one)]
    if not sharded:
        raise NotJudged("no parameters were seen to be gathered in steps: they are all whole, or were kept")
    prefetch, live = (float(value), live) if key == PREFETCH else (prefetch, float(value))
    policy = (OwnFetching if is_own_engine(study) else DeepSpeedFetching)(prefetch, live, reuse)
    need_sizes(sharded)
    need_passes(study, sharded)
    spared, notes = _spared(study, sharded, policy if value != now else None)

    def fetched(link: Link, gathers: Communications) -> WhatIf | None:
        return FetchedBy(gathers, link, policy, item_bytes(study)) if value != now else None

    pairs = _modelled(sharded, fetched, lambda *_: None)
    (as_it_is, then), *others = pairs
    of_shards = fewer_of(study, spared, *(one.table[is_of_shards(one.table)] for one in sharded))
    try:
        unseen = unseen_ms(study, as_it_is, of_shards)
        woken_late = woken_late_ms(apply(study.need_graph(), as_it_is))
    except Refused as refused:
        raise NotJudged(f"no other limit was tried: {refused.why}") from None
    # Of both it is not told whether the job itself is the cause, or what else runs on its cores: that would stay.
    unsure = spared * (woken_late + unseen)
    return Effect(
        "comm.exposed", then, as_it_is, tuple(others), overlaps="more", fewer=of_shards, counts_cores=True,
        unsure_ms=max(unsure, 0.0), notes=notes,
    )  # fmt: skip


def with_scatter_bucket(study: Study, number: float) -> Effect:
    """Gradients of stage 3 scattered together, in buckets of so many elements. Raises NotJudged where that is less than
    the run had, or no scatters are seen."""
    sharded = [one for one in domains(study) if gathers_parameters(one)]
    gradients = [one.of(GRADIENT).table for one in sharded]
    scattered = [table[table["name"] == "reduce_scatter"] for table in gradients]
    if not any(map(len, scattered)):
        raise NotJudged("no gradients were seen to be scattered beside parameters that are gathered")
    need_sizes(sharded)
    most, reached = number * item_bytes(study), is_own_engine(study)
    if number == told(study, REDUCE):
        return Effect("comm.small-messages", counts_cores=True)
    need_larger(study, number, max(float(table["bytes"].max()) for table in scattered if len(table)))
    before = after = 0.0
    for domain in sharded:
        scatters = Communications(kinds=(SCATTER,), groups=domain.groups)
        for steps in study.need_graph().templates:
            packs = packed(steps, scatters, most, reached)
            of_a_rank = len(steps.numbers) / len(domain.groups)  # which is in one of them
            before += of_a_rank * sum(map(len, packs))
            after += of_a_rank * len(packs)
    host_ms = study.host_ms("gradient")

    def reduced(link: Link, scatters: Communications) -> WhatIf:
        return Merge(scatters, link, most_bytes=most, reached=reached, host_ms=host_ms)

    (as_it_is, then), *others = _modelled(sharded, lambda *_: None, reduced)
    a_step = len(study.need_graph().numbers)
    notes = (f"{count(round(after / a_step), 'scatter')} a step instead of {round(before / a_step)}",)
    return Effect(
        "comm.small-messages", then, as_it_is, tuple(others), counts_cores=True, notes=notes,
        fewer=fewer_of(study, (before - after) / max(before, 1.0), *scattered),
    )  # fmt: skip


def need_larger(study: Study, number: float, largest: float) -> None:
    """Raises NotJudged where buckets of so many elements are smaller than the run's, of which the largest had `largest`
    bytes: that tells where it does not say its setting, beyond which a bucket may reach."""
    present = told(study, REDUCE) or largest / item_bytes(study)
    if number < present:
        raise NotJudged(
            f"the run's buckets hold {present:,.0f} elements: what smaller ones take is not told by larger ones"
        )


def _shard_collectives(study: Study, sharded: list[Domain]) -> float:
    """Gathers and scatters of a rank in the judged steps."""
    shards = [(Communications(kinds=(GATHER, SCATTER), groups=one.groups), len(one.groups)) for one in sharded]
    templates = study.need_graph().templates
    return sum(
        len(steps.numbers) * len(of.of(steps.structure)) / groups for steps in templates for of, groups in shards
    )


def links_of_shards(domain: Domain) -> dict[Communications, list[Link]]:
    """The link of each kind of collective of each group, and others that it may as well be. What one group moves may be
    all of one size: groups of the same ranks share their wires, so what another of them moves tells its latency from
    its bandwidth; of the same kind, or of the other one where a line for both fits."""
    shards = shards_of(domain)
    found: dict[Communications, list[Link]] = {}
    of_kind, together = {}, {}
    for kind in (GATHER, SCATTER):
        places = [places for of, places in shards.kinds.items() if of.kinds == (kind,)]
        of_kind[kind] = shards.table.take(np.concatenate([*places, np.empty(0, np.int64)]))
        together[kind] = fit_link(of_kind[kind], on_device=domain.on_device)
    every = fit_link(shards.table, on_device=domain.on_device)
    for of, link in links_of_kinds(shards).items():
        table, kind = shards.table.take(shards.kinds[of]), GATHER if of.kinds == (GATHER,) else SCATTER
        larger = FAR * float(table["bytes"].max()) < float(of_kind[kind]["bytes"].max())
        median = float(table["bytes"].median())
        if together[kind].fitted and (larger or not link.fitted):
            link = together[kind]
        elif not link.fitted and every.fitted and agree(link, every, median):
            link = every
        # What is gathered together is larger than all that was measured: it may be the bytes that take long.
        whole = float(link.transfer_ms(np.array(median)))
        of_bytes = Link(0.0, whole / max(median, 1.0), link.fitted, link.spread)
        around = links_around(link, median)
        found[of] = around if of_bytes in around else [*around, of_bytes]
    return found


Change = Callable[[Link, Communications], WhatIf | None]
"""(link, the gathers or scatters of a group) -> what is made of them; None: they stay as they are."""


def _modelled(sharded: list[Domain], gathered: Change, reduced: Change) -> list[tuple[WhatIfs, WhatIfs]]:
    """Now and then over each of the links that there may be. Transfers of what stays as it is are modelled, too: what
    is under way at once shares the link."""
    links = {of: around for domain in sharded for of, around in links_of_shards(domain).items()}
    pairs: list[tuple[WhatIfs, WhatIfs]] = []
    for place in range(max(map(len, links.values()))):
        now: list[WhatIf] = []
        then: list[WhatIf] = []
        for of, around in links.items():
            link = around[min(place, len(around) - 1)]
            as_it_is, change = Merge(of, link, together=1), gathered if of.kinds == (GATHER,) else reduced
            now.append(as_it_is)
            then.append(change(link, of) or as_it_is)
        pairs.append((tuple(now), tuple(then)))
    return pairs


def _spared(study: Study, sharded: list[Domain], policy: Fetching | None) -> tuple[float, tuple[str, ...]]:
    """The share of gathers and scatters that there are no more, and what is to be said of it."""
    before = after = 0.0
    kept = 0.0
    for domain in sharded:
        for group in domain.groups:
            gathers = Communications(kinds=(GATHER,), groups=(group,))
            for steps in study.need_graph().templates:
                try:
                    needs = passes(steps, gathers, item_bytes(study))
                except NotRebucketed:
                    continue
                starts = [policy.starts(of) if policy else [(n, [n]) for n in range(len(of))] for of in needs]
                of_a_rank = len(steps.numbers) / len(domain.groups)  # which is in one of them
                before += of_a_rank * sum(map(len, needs))
                after += of_a_rank * sum(map(len, starts))
                gathered = sum(len(batch) for of in starts for _, batch in of)
                kept += of_a_rank * (sum(map(len, needs)) - gathered)
    a_step = len(study.need_graph().numbers)
    told_of = f"{count(round(after / a_step), 'gather')} a step instead of {round(before / a_step)}"
    if spared := round(kept / a_step):
        told_of += f"; {spared} {'is' if spared == 1 else 'are'} not needed, as what would be gathered is still there"
    return (before - after) / _shard_collectives(study, sharded), (told_of,)


def woken_late_ms(graph: StepGraph) -> float:
    """How much later threads go on than what they waited for has ended, ms a step, mean over ranks."""
    whole = sum(float(steps.work[..., WAKE_UP_DELAY].sum(dtype=np.float64)) for steps in graph.templates)
    return whole / max(len(graph.numbers) * graph.leads, 1)


def need_sizes(sharded: list[Domain]) -> None:
    """Raises NotJudged where it was not told how large what is gathered is: neither what fits into a limit is known,
    nor how long several would take together."""
    for domain in sharded:
        if not (domain.table["bytes"][is_of_shards(domain.table)] > 0).any():
            raise NotJudged("the run does not tell how large the parameters are that are gathered")


def need_passes(study: Study, sharded: list[Domain]) -> None:
    """Raises NotJudged where the order in which modules need their parameters is not seen in most steps."""
    for domain in sharded:
        for group in domain.groups:
            reasons: dict[str, int] = {}
            for steps in study.need_graph().templates:
                try:
                    passes(steps, Communications(kinds=(GATHER,), groups=(group,)))
                except NotRebucketed as reason:
                    reasons[str(reason)] = reasons.get(str(reason), 0) + len(steps.numbers)
            if 2 * sum(reasons.values()) > len(study.need_graph().numbers):
                why = max(reasons, key=reasons.__getitem__)
                raise NotJudged(f"the order in which modules need parameters is not seen: {why}")
