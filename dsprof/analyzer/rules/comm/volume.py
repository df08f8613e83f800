"""comm.volume: gradients or shards whose bytes take longer than can be hidden, however they are divided: fewer are what
is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ... import signals
from ...align.groups import PARAMETER, PP, REPLICATE, TP
from ...effect import Effect, WhatIfs
from ...finding import NOTHING, Evidence, Finding, Fix, Gain
from ...price.calibration import ModelError
from ...price.effects import effect_gains, part_of_cores
from ...study import Study, once
from ...text import ms, percent, size
from ...whatif import WhatIf
from ...whatif.communications import ScaleLink, WithoutCommunications
from ...whatif.select import Communications
from ..base import NotConcerned, NotJudged, hosts_of, sharded_stage
from ..rule import Look, Rule
from .ddp_buckets import best_division
from .dimensions import GRADIENT, Domain, domains, moved_bytes, need_every_rank, waited_ms
from .fewer_bytes import compression_fix, micro_batches_fix, short_shards_fix
from .possible_links import (
    SLOWEST_WIRE_MS_PER_BYTE,
    Links,
    by_bytes,
    links_of,
    links_of_kinds,
    untold_latency_ms,
)
from .redundant_reduce import repeated_reductions
from .shards import gathers_parameters
from .slow_link import slow_links

DOMINATES: Final = 0.1
"""Share of the step that no other change hides, from which on the bytes are the bottleneck. Less is what data
parallelism costs, and a healthy run may have as much."""
BOUND: Final = 0.5
"""The share of the transfers that the bytes take, from which on they are bound by bandwidth."""
OF_BACKWARD: Final = 2 / 3
"""The share of the computation that is backward, in which gradients can be hidden."""
WHOLE: Final = ("float32", "float64")
"""Number formats of which half of the bytes may be left out."""
SHORT: Final = "travel in short numbers already, or their number format was not captured"
AS_STATED: Final = 0.75
"""What is moved is less than this part of the gradients: they are compressed already."""
AS_GOOD: Final = 1 / 3
"""Numbers of half the size are proposed first where they surely save this part of what fewer reductions do: they leave
the batch as it is."""
CAST_MS_PER_BYTE: Final = 6e-7
CAST_BETWEEN: Final = (0.5, 2.0)
"""Of a byte of gradients that a CPU turns into another number format, adds up and turns back; half and twice as much
are possible. Measured by benchmarks/constants.py: half of it for buckets of a MB and more, twice for small ones."""


@dataclass(frozen=True)
class _Volume:
    """What a dimension moves. left_ms: what no other change would hide of the waiting; moved_bytes, wire_ms: of a rank
    in a step, and how long the link needs for them."""

    domain: Domain
    waited_ms: float
    left_ms: float
    moved_bytes: float
    wire_ms: float
    links: Links
    ddp: Mapping[str, Any] | None

    @property
    def of_shards(self) -> bool:
        return gathers_parameters(self.domain)


def volume(study: Study) -> list[Finding]:
    """Dimensions of data parallelism that move so many bytes that a large part of the step is left, however they are
    divided and overlapped."""
    need_every_rank(study)
    parts = of_replicas(study, GRADIENT, PARAMETER)
    if not parts:
        raise NotConcerned
    if repeated_reductions(study) is not None:
        return []  # most of it is for nothing: comm.redundant-reduce
    moved = [_moved(study, whole, part) for whole, part in parts]
    return [_finding(study, one) for one in moved if one is not None]


def of_replicas(study: Study, *purposes: str) -> list[tuple[Domain, Domain]]:
    """Dimensions whose ranks share no layers and are no stages, each with what it communicates for these purposes."""
    parts = [(one, one.of(*purposes)) for one in domains(study) if one.role not in (TP, PP)]
    return [(whole, part) for whole, part in parts if len(part.table)]


def _moved(study: Study, whole: Domain, domain: Domain) -> _Volume | None:
    """None where the bytes are not what takes long, or other changes may hide so much of it that the rest is small.
    whole: the dimension that `domain` is of."""
    waited = waited_ms(study, domain)
    if waited < DOMINATES * study.step_ms or any(one.domain is whole for one in slow_links(study)):
        return None
    table, links = domain.table, _links(whole, domain)
    if not (table["bytes"] > 0).any():
        raise NotJudged("how many bytes the collectives move that ranks wait for was not captured")
    ranks = table["ranks"].to_numpy(np.float64)
    a_rank = len(study.step_numbers) * max(len(study.ranks), 1)
    per_byte = np.zeros(len(table))
    for kind, places in domain.kinds.items():
        per_byte[places] = next(link.ms_per_byte for of, link in links.items() if of.meets(kind))
    sizes = table["bytes"].to_numpy(np.float64)
    taken = float((table["alone_ns"].to_numpy(np.float64) * ranks).sum()) / 1e6 / a_rank
    wire = float((sizes * per_byte * ranks).sum()) / a_rank
    if wire < BOUND * taken:
        return None  # latency: comm.small-messages
    left, ddp = _left_ms(study, whole, waited, taken)
    if left < DOMINATES * study.step_ms:
        return None
    return _Volume(domain, waited, left, moved_bytes(study, domain.table), wire, links, ddp)


def _links(whole: Domain, part: Domain) -> Links:
    """Of what a part of a dimension communicates: of shards each kind has its own, which differ."""
    if gathers_parameters(part):
        return links_of_kinds(part)
    return {Communications(groups=(group,)): link for group, link in links_of(whole, part).items()}


def _left_ms(study: Study, domain: Domain, waited: float, taken: float) -> tuple[float, Mapping[str, Any] | None]:
    """How much of the waiting no other change would hide, ms a step; and the largest DistributedDataParallel that the
    gradients are of.

    That is what the proposed bucket size leaves at best; where buckets are no knob of the job, what would be left if as
    much were hidden as there is computation to hide it behind.
    """
    if not gathers_parameters(domain):
        try:
            cut, best = best_division(study, domain)
            if cut.ddp is not None:
                return waited - (max(best.gain.high, 0.0) if best is not None else 0.0), cut.ddp
        except NotJudged:
            pass
    compute = float(study.ordinary["compute"].mean())
    beside = compute if gathers_parameters(domain) else OF_BACKWARD * compute
    unused = max(beside - max(taken - waited, 0.0), 0.0)
    return waited - unused, None


def _finding(study: Study, moved: _Volume) -> Finding:
    domain, table = moved.domain, moved.domain.table
    halved, accumulated = _halved(study, moved), _accumulated(study, moved)
    fixes: list[Fix] = []
    if accumulated is not None:
        fixes.append(micro_batches_fix(study, moved.ddp, accumulated))
    if halved is not None and halved.ms > 0:
        short = (
            short_shards_fix(study, halved, _whole(study, [domain], (GRADIENT, PARAMETER)))
            if moved.of_shards
            else compression_fix(study, moved.ddp, halved)
        )
        first = accumulated is None or halved.low > AS_GOOD * accumulated.low
        fixes.insert(0 if first else len(fixes), short)
    gain = fixes[0].gain if fixes and fixes[0].gain is not None else NOTHING
    what = "parameters and their gradients" if moved.of_shards else "gradients"
    speed = moved.moved_bytes / max(moved.wire_ms, 1e-9) / 1e6
    evidence = (
        Evidence("exposed communication a step", round(moved.waited_ms, 3), "ms", 0.0),
        Evidence("share of the step", round(100 * moved.waited_ms / study.step_ms, 1), "%"),
        Evidence("what no other change hides", round(moved.left_ms, 3), "ms", 0.0),
        Evidence("moved a step", round(moved.moved_bytes / 2**20, 3), "MiB"),
        Evidence("bytes over time", round(speed, 3), "GB/s"),
    )
    share = percent(100 * moved.left_ms / study.step_ms)
    title = f"{ms(moved.left_ms)} of each step ({share}) wait for {size(moved.moved_bytes)} of {what}{domain.inside}, "
    title += "which neither other buckets nor overlap would hide: fewer bytes are what is left"
    op = str(table["name"].mode().iloc[0])
    return Finding("comm.volume", title, "info", domain.where(study, op), evidence, gain, tuple(fixes))


def _halved(study: Study, moved: _Volume) -> Gain | None:
    """What is saved if numbers of half as many bytes travel for each purpose that has whole ones; None where all are
    short already."""
    purposes = _whole(study, [moved.domain], (GRADIENT, PARAMETER) if moved.of_shards else (GRADIENT,))
    stated = sum(moved.ddp["gradient_bytes"]) if moved.ddp is not None else 0
    if not purposes or moved.moved_bytes < AS_STATED * stated:
        return None
    parts = [(moved.domain, moved.links)]
    try:
        again = _reduced_again(study) if moved.of_shards and GRADIENT in purposes else []
    except NotJudged:  # what this change saves is not known; what others do is
        return None
    (gain,) = effect_gains(study, [_short_numbers(study, parts, purposes, again=again)])
    return gain


def _reduced_again(study: Study) -> list[Domain]:
    """The dimensions of replicas in which scattered gradients are reduced once more, in the number format in which they
    were scattered (HSDP). Raises NotJudged where some may be reduced there by DistributedDataParallel."""
    found = [
        part for whole, part in of_replicas(study, GRADIENT)
        if whole.role == REPLICATE and not gathers_parameters(whole)
    ]  # fmt: skip
    if found and study.facts.get("ddp"):
        raise NotJudged(
            "which of the gradients that replicas reduce are of sharded layers, and which DistributedDataParallel's, "
            "was not captured"
        )
    return found


def _short_numbers(
    study: Study,
    parts: Sequence[tuple[Domain, Links]],
    purposes: tuple[str, ...],
    *,
    again: Sequence[Domain] = (),
    note: str = "",
) -> Effect:
    """Numbers of half the size travel for these purposes in these dimensions, each with all that it moves of gradients
    and parameters. again: dimensions in which what was reduced there is reduced once more, as it is."""
    every = [*parts, *((part, links_of_kinds(part)) for part in again)]
    # Of other purposes what is moved stays as it is.
    every = [(part, {of: link for of, link in links.items() if _carries(of, purposes)}) for part, links in every]

    def halved(certain: bool) -> WhatIfs:
        return tuple(one for part, links in every for one in with_fewer_bytes(part, links, certain, purposes=purposes))

    others: list[tuple[WhatIfs, WhatIfs]] = [((), halved(False))]
    inside = [part for part, _ in every if not _over_a_network(study, part)]
    if not study.on_gpu and inside:
        # Inside of a host cores move and add the bytes: as many bytes of short numbers take twice as long.
        least: list[WhatIf] = []
        for part, links in every:
            for of, link in links.items():
                cores = part_of_cores(study, link.ms_per_byte) if part in inside else 0.0
                least += with_fewer_bytes(part, {of: link}, True, 2 / (1 + cores), purposes)
        others.append(((), tuple(least)))
    if not study.on_gpu and any(
        not link.fitted and link.latency_ms > 0 for _, links in every for link in links.values()
    ):
        # Of small ones of one size all counts as latency, and it may be their bytes that take long.
        most: list[WhatIf] = []
        for part, links in every:
            slow = {
                of: link
                if link.fitted or link.latency_ms <= 0
                else by_bytes(link, part.median_bytes(replace(of, purposes=purposes)), SLOWEST_WIRE_MS_PER_BYTE)
                for of, link in links.items()
            }
            most += with_fewer_bytes(part, slow, True, purposes=purposes)
        others.append(((), tuple(most)))
    cast_bytes = 0.0 if study.on_gpu else sum(_cast_bytes(study, part, purposes) for part, _ in parts)
    return Effect(
        "comm.volume", halved(True), others=tuple(others), costs_ms=cast_bytes * CAST_MS_PER_BYTE,
        costs_between=CAST_BETWEEN, counts_cores=True, notes=(note,) if note else (),
    )  # fmt: skip


def _cast_bytes(study: Study, part: Domain, purposes: tuple[str, ...]) -> float:
    """Of gradients that each rank turns into another number format before they are reduced, where numbers of half the
    size travel for these purposes. Layers whose parameters are gathered compute in the format that these have, so their
    gradients are turned only where they are to travel in another one."""
    whole = set(_whole(study, [part], (GRADIENT, PARAMETER))) - set(purposes)
    if gathers_parameters(part) and (GRADIENT in whole) == (PARAMETER in whole):
        return 0.0
    return moved_bytes(study, part.of(GRADIENT).table)


def _carries(of: Communications, purposes: Sequence[str]) -> bool:
    """Whether some of these may be for one of the purposes."""
    return of.kinds is None or any(kind.partition(" ")[2] in purposes for kind in of.kinds)


def with_fewer_bytes(
    domain: Domain, links: Links, certain: bool, times: float = 2.0,
    purposes: tuple[str, ...] = (GRADIENT, PARAMETER),
) -> list[WhatIf]:  # fmt: skip
    """What moves for these purposes has so many times fewer bytes. certain: transfers are divided as they were fitted;
    else as much of them as may be is latency."""
    found: list[WhatIf] = []
    for of, link in links.items():
        of = replace(of, purposes=purposes)
        median = domain.median_bytes(of)
        if np.isnan(median):
            continue
        latency, whole = link.latency_ms, float(link.transfer_ms(np.array(median)))
        if not certain:
            more = link.spread * latency if link.fitted else untold_latency_ms(whole)
            latency = min(latency + more, whole)
        divided = replace(link, latency_ms=latency, ms_per_byte=(whole - latency) / max(median, 1.0))
        found.append(ScaleLink(bandwidth=times, of=of, link=divided))
    return found


def _accumulated(study: Study, moved: _Volume) -> Gain | None:
    """What is saved for each micro-batch if the gradients of two are reduced at once, and nothing else changes; None
    where the job reduces in each all the same."""
    if sharded_stage(study) >= 2 or moved.of_shards:
        return None
    gone = Communications(purposes=(GRADIENT,), groups=moved.domain.groups)
    # Without them ranks do not wait for one another either, but only until they next do.
    every_other = Effect(
        "comm.volume", (WithoutCommunications(gone),), at_most_ms=moved.waited_ms, part=0.5, counts_cores=True
    )
    (gain,) = effect_gains(study, [every_other])
    return gain


def with_short_gradients(study: Study) -> Effect:
    """Gradients that travel in numbers of half the size. Raises NotJudged where they do already, or none were seen."""
    both = [(whole, part) for whole, part in of_replicas(study, GRADIENT, PARAMETER) if len(part.of(GRADIENT).table)]
    if not both:
        raise NotJudged("no collective was seen to carry gradients")
    if not _whole(study, [part for _, part in both], (GRADIENT,)):
        raise NotJudged(f"gradients {SHORT}")
    return _short_numbers(study, [(part, _links(whole, part)) for whole, part in both], (GRADIENT,))


def with_short_shards(study: Study, *purposes: str, note: str = "") -> Effect:
    """Sharded parameters, their gradients, or both, that travel in numbers of half the size, but for those that do
    already. Raises NotJudged where the first of these purposes does, or none were seen."""
    parts = [part for _, part in of_replicas(study, GRADIENT, PARAMETER) if gathers_parameters(part)]
    if not parts:
        raise NotJudged("no parameters were seen to be gathered in this run")
    whole = _whole(study, parts, purposes)
    if purposes[0] not in whole:
        raise NotJudged(f"{purposes[0]}s of sharded layers {SHORT}")
    again = _reduced_again(study) if GRADIENT in whole else []
    if again and GRADIENT not in _whole(study, again, (GRADIENT,)):
        raise NotJudged(f"gradients that replicas reduce {SHORT}")
    return _short_numbers(study, [(part, links_of_kinds(part)) for part in parts], whole, again=again, note=note)


def _whole(study: Study, parts: Sequence[Domain], purposes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of these purposes for which float32 or wider numbers travel, in all of these dimensions that communicate
    for them."""
    formats_of = formats(study)

    def is_whole(purpose: str) -> bool:
        groups = [group for part in parts for group in part.of(purpose).groups]
        return bool(groups) and all(formats_of.get((group, purpose)) in WHOLE for group in groups)

    return tuple(filter(is_whole, purposes))


@once
def formats(study: Study) -> dict[tuple[str, str], str]:
    """(process group, purpose) -> the number format that most of the bytes of its gradients, or of its parameters,
    have, as the first captured rank of it says."""
    both = (GRADIENT, PARAMETER)
    wanted = {(group, purpose) for one in domains(study) for purpose in both for group in one.of(purpose).groups}
    found: dict[tuple[str, str], str] = {}
    for rank in study.ranks:
        for key, dtype in study.summaries[rank].activity.formats.items():
            if key in wanted:
                found.setdefault(key, dtype)
    return found


def _over_a_network(study: Study, domain: Domain) -> bool:
    """Whether some process group of the dimension has ranks on several hosts."""
    members = [study.run.group(group).get("ranks") or study.ranks for group in domain.groups]
    return any(len(hosts_of(study, map(int, ranks))) > 1 for ranks in members)


RULES = (
    Rule(
        "comm.volume",
        "more bytes are communicated in each step than can be hidden, however they are divided",
        explains=("comm_exposed",),
        looks=(Look(volume, needs=(signals.replay,)),),
        needs=(signals.communications,),
        outranked_by=(
            "comm.exposed",
            "comm.large-bucket",
            "comm.small-messages",
            "comm.slow-link",
            "comm.redundant-gather",
        ),
        error=ModelError(of_gain=0.105, of_step=0.014, busy=0.014),
        place=103,
    ),
)
