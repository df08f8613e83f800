"""Gradients that a script reduces itself after backward, one at a time: what reducing them together would gain."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from ...effect import Effect, WhatIfs
from ...finding import Evidence, Finding, Fix, Gain
from ...graph.link import Link
from ...study import Study
from ...text import size
from ...whatif.merge import Merge, packed
from ...whatif.select import Communications
from ..base import LEAST_SHARE, PartlyJudged, gains_tried
from .ddp_buckets import ONE_SIZE
from .deepspeed_config import is_own_engine
from .dimensions import GRADIENT, Domain, domains, fewer_of, waited_ms
from .possible_links import FAR, SLOWEST_WIRE_MS_PER_BYTE, by_bytes, links_around
from .shards import bucket_work_left

UNJUDGED = (
    "each reduction of gradients is waited for before anything else is done: what reducing them while backward goes on "
    "would gain, as DistributedDataParallel does, is not replayed; try it"
)
FLATTEN = "flatten the gradients of a group into one tensor, and reduce them at once"
FEWEST = 2
PARTS_OF_WIRE = (1.0, 2.0, 0.5)
"""Bytes that one kind of collective may put on the wire, as a multiple of what another does of as large a tensor."""
MATTERS = 0.01
"""Of the step: less exposed communication than this need not be judged."""


def reduced_together(study: Study, domain: Domain, say: Callable[[Gain], Fix] | None = None) -> list[Finding]:
    """Each group's gradients flattened and reduced at once: comm.small-messages. What hiding them behind backward would
    gain is not judged, if it matters (PartlyJudged). Raises NotJudged where they are not waited for one by one.

    say: the fix that reduces them at once; None: in words, for a script that reduces them itself
    """
    domain = domain.of(GRADIENT)
    link, a_step = domain.links()[domain.groups[0]], domain.a_step(study)
    several = a_step >= FEWEST
    effect = reduced_in(study, domain, math.inf if several else 0.0)
    found: list[Finding] = []
    (gain,) = gains_tried(study, [effect], "reducing gradients together was not tried")
    if several and gain.ms >= LEAST_SHARE * study.step_ms:
        median = float(domain.table["bytes"].median())
        evidence = (
            Evidence("gradient collectives a step", round(a_step), "count", 1),
            Evidence("median size", round(median / 1024, 1), "KiB"),
            Evidence("latency of one", round(link.latency_ms, 4), "ms"),
            Evidence("exposed communication a step", round(waited_ms(study, domain), 3), "ms", 0.0),
        )
        title = f"{a_step:.0f} reductions of gradients a step, of {size(median)} each, are waited for one by one"
        op = str(domain.table["name"].mode().iloc[0])
        fix = say(gain) if say is not None else Fix("code", FLATTEN, gain=gain)
        found.append(
            Finding(
                "comm.small-messages",
                title + domain.inside,
                "info",
                domain.where(study, op),
                evidence,
                gain,
                (fix,),
                unknown="" if link.fitted else ONE_SIZE,
            )
        )
    if waited_ms(study, domain) > MATTERS * study.step_ms:
        raise PartlyJudged(found, ("comm.exposed",), UNJUDGED)
    return found


def reduced_in(study: Study, domain: Domain, most: float) -> Effect:
    """A dimension's gradients in reductions of up to `most` bytes (0: as they are), each waited for at once. dsprof's
    engine closes one only when these are reached."""
    before = after = 0
    for steps in study.need_graph().templates:
        for group in domain.groups:
            packs = packed(steps, Communications(purposes=(GRADIENT,), groups=(group,)), most, is_own_engine(study))
            before += len(steps.numbers) * sum(map(len, packs))
            after += len(steps.numbers) * len(packs)
    spared = 1 - after / before if before else 0.0
    alone = sum(len(one.of(GRADIENT).table) > 0 for one in domains(study)) == 1  # else whose work it is is not told
    left = bucket_work_left(study, domain.table, spared) if alone and is_own_engine(study) else 1.0
    around = _links_around(study, domain)
    now = [_up_to(study, each, 0.0) for each in around]
    then = [_up_to(study, each, most, left) for each in around] if most else now
    pairs = list(zip(now, then, strict=True))
    if left < 1:
        pairs.append((now[0], _up_to(study, around[0], most)))
    return Effect(
        "comm.small-messages",
        then[0],
        now[0],
        tuple(pairs[1:]),
        fewer=fewer_of(study, spared, domain.table),
        counts_cores=True,
    )


def _links_around(study: Study, domain: Domain) -> list[dict[str, Link]]:
    """Each group's link, and then others that they may as well be, by what was seen of reductions of their sizes; none
    is larger than all gradients of a step."""
    links, groups = domain.links(), domain.table["group"].astype(str)
    around = {}
    for group, link in links.items():
        sizes = domain.table["bytes"][groups == group]
        median, most = float(sizes.median()), float(sizes.sum()) / len(study.step_numbers)
        a_byte = None if link.fitted else _ms_per_byte(study, group, FAR * float(sizes.max()))
        if a_byte is not None:
            seen = [by_bytes(link, median, times * a_byte) for times in PARTS_OF_WIRE]
            around[group] = [*links_around(replace(seen[0], fitted=True), median), *seen[1:]]
            continue
        around[group] = links_around(link, median, most)
        if not link.fitted:
            around[group].append(by_bytes(link, median, SLOWEST_WIRE_MS_PER_BYTE))
    variants = range(max(map(len, around.values())))
    return [{group: of[min(i, len(of) - 1)] for group, of in around.items()} for i in variants]


def _ms_per_byte(study: Study, group: str, least: float) -> float | None:
    """What a byte takes the ranks of a group in their other communications of at least so many bytes, such as gathers
    of updated parameters in a group of their own: the wires are the same. None: there are none."""
    members = study.run.group(group).get("ranks")
    every = study.judged_collectives.table
    alike = [one for one in every["group"].astype(str).unique() if study.run.group(one).get("ranks") == members]
    large = every[every["group"].astype(str).isin(alike) & (every["bytes"] >= least) & (every["transfer_ns"] > 0)]
    if not members or large.empty:
        return None
    return float((large["alone_ns"] / large["bytes"]).median()) / 1e6


def _up_to(study: Study, links: Mapping[str, Link], most: float, left: float = 1.0) -> WhatIfs:
    """Reductions of up to `most` bytes; 0: as they are, with modelled transfers.

    left: of what the engine works for buckets (`bucket_work_left`)"""
    # Where the work for buckets was seen, the calls to issue are in it.
    host_ms = study.host_ms(GRADIENT) if left == 1 else 0.0
    return tuple(
        Merge(
            Communications(purposes=(GRADIENT,), groups=(group,)),
            link,
            most_bytes=most,
            reached=is_own_engine(study),
            host_ms=host_ms,
            blocking=True,
            unit_work=left if place == 0 else 1.0,  # the work is of no group, so one of these takes it along
        )
        for place, (group, link) in enumerate(links.items())
    )
