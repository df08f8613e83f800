"""ZeRO's stage 3 with other limits of what is gathered ahead, and of how much is whole at once."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ...effect import Effect
from ...graph.link import Link, fit_link
from ...graph.step_graph import WAKE_UP_DELAY
from ...price.effects import unseen_ms
from ...study import Study
from ...text import count
from ...whatif import Refused, WhatIf
from ...whatif.fetching import DeepSpeedFetching, FetchedBy, Fetching, OwnFetching, passes
from ...whatif.merge import Merge
from ...whatif.rebucket import NotRebucketed
from ...whatif.select import Communications
from ..base import NotJudged
from .deepspeed_config import is_own_engine, item_bytes, stage_of, told, zero_config
from .dimensions import Domain, domains
from .shards import FAR, GATHER, gathers_parameters, is_of_shards, links_around

PREFETCH: Final = "stage3_prefetch_bucket_size"
LIVE: Final = "stage3_max_live_parameters"
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
    links = {domain: links_of_shards(domain) for domain in sharded}
    most = max(len(around) for of in links.values() for around in of.values())
    pairs = [_variant(study, links, policy if value != now else None, place) for place in range(most)]
    fewer, notes = _fewer(study, sharded, policy if value != now else None)
    table = sharded[0].table
    moved = float((table["bytes"] * table["ranks"]).sum()) / len(study.step_numbers) / max(len(study.ranks), 1)

    (as_it_is, then), *others = pairs
    try:
        unseen = unseen_ms(study, as_it_is, moved)
    except Refused as refused:
        raise NotJudged(f"no other limit was tried: {refused.why}") from None
    # Of both it is not told whether the job itself is the cause, or what else runs on its cores: that would stay.
    unsure = fewer * (woken_late_ms(study) + unseen)
    return Effect(
        "comm.exposed", then, as_it_is, tuple(others), overlaps="more", fewer=fewer, moved_bytes=moved,
        counts_cores=True, unsure_ms=max(unsure, 0.0), notes=notes,
    )  # fmt: skip


def links_of_shards(domain: Domain) -> dict[str, list[Link]]:
    """Each group's link, and others that it may as well be. What one group moves may be all of one size: groups of the
    same ranks share their wires, so what another of them moves tells its latency from its bandwidth."""
    shards = domain.table[is_of_shards(domain.table)]
    together, found = fit_link(shards, on_device=domain.on_device), {}
    for group, table in shards.groupby(shards["group"].astype(str), sort=False):
        link = fit_link(table, on_device=domain.on_device)
        larger = FAR * float(table["bytes"].max()) < float(shards["bytes"].max())
        link = together if together.fitted and (larger or not link.fitted) else link
        median = float(table["bytes"].median())
        # What is gathered together is larger than all that was measured: it may be the bytes that take long.
        whole = float(link.transfer_ms(np.array(median)))
        of_bytes = Link(0.0, whole / max(median, 1.0), link.fitted, link.spread)
        found[str(group)] = [*links_around(link, median), of_bytes]
    return found


def _variant(
    study: Study, links: dict[Domain, dict[str, list[Link]]], policy: Fetching | None, place: int
) -> tuple[tuple[WhatIf, ...], tuple[WhatIf, ...]]:
    """Now and then, over one of the links that there may be."""
    now: list[WhatIf] = []
    then: list[WhatIf] = []
    for of_groups in links.values():
        for group, around in of_groups.items():
            link = around[min(place, len(around) - 1)]
            gathers = Communications(kinds=(GATHER,), groups=(group,))
            scatters = Merge(Communications(kinds=(SCATTER,), groups=(group,)), link, together=1)
            as_it_is = Merge(gathers, link, together=1)
            now += [as_it_is, scatters]
            then += [FetchedBy(gathers, link, policy, item_bytes(study)) if policy else as_it_is, scatters]
    return tuple(now), tuple(then)


def _fewer(study: Study, sharded: list[Domain], policy: Fetching | None) -> tuple[float, tuple[str, ...]]:
    """The share of the gathers that there are no more, and what is to be said of it."""
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
                before += len(steps.numbers) * sum(map(len, needs))
                after += len(steps.numbers) * sum(map(len, starts))
                gathered = sum(len(batch) for of in starts for _, batch in of)
                kept += len(steps.numbers) * (sum(map(len, needs)) - gathered)
    a_step = len(study.need_graph().numbers)
    told_of = f"{count(round(after / a_step), 'gather')} a step instead of {round(before / a_step)}"
    if spared := round(kept / a_step):
        told_of += f"; {spared} {'is' if spared == 1 else 'are'} not needed, as what would be gathered is still there"
    return 1 - after / before, (told_of,)


def woken_late_ms(study: Study) -> float:
    """How much later threads go on than what they waited for has ended, ms a step, mean over ranks."""
    graph = study.need_graph()
    whole = sum(float(steps.work[..., WAKE_UP_DELAY].sum()) for steps in graph.templates)
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
