"""What the ranks that share layers communicate: how much of the step it takes, and what undivided layers would save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ... import signals
from ...align.groups import TENSOR_PARALLEL
from ...effect import Effect
from ...finding import NOTHING, Evidence, Finding, Fix, Gain
from ...graph.link import Link, fit_link
from ...memory.use_by_step import main_place
from ...price.calibration import ModelError
from ...price.effects import effect_gains
from ...price.gains import sure_up_to
from ...study import Study
from ...text import count, ms, percent, size
from ...whatif.communications import WithoutCommunications
from ...whatif.select import Communications
from ..base import LEAST_SHARE, NotConcerned, PartlyJudged
from ..rule import Look, Rule
from .dimensions import Domain, domains, need_every_rank, waited_ms

DOMINATES: Final = 0.1
"""Share of the step that is waited for these collectives, from which on dividing layers is the bottleneck. Below, what
they cost is told, and the price of dividing a model that does not fit otherwise."""
STATES: Final = ("parameters", "gradients", "optimizer_states")
MOST_USED: Final = 0.9
"""Of the capacity, that may be used once more is held."""


def tensor_parallel(study: Study) -> list[Finding]:
    """Ranks wait for the collectives of the layers that they share."""
    signals.steps(study)
    layers = [one for one in (domain.of(TENSOR_PARALLEL) for domain in domains(study)) if len(one.table)]
    if not layers:
        raise NotConcerned
    need_every_rank(study)
    found: list[Finding] = []
    untold: list[str] = []
    for domain in layers:
        waited = waited_ms(study, domain)
        if waited < LEAST_SHARE * study.step_ms:
            continue
        finding, unknown = _cost(study, domain, waited)
        found.append(finding)
        if unknown and waited >= DOMINATES * study.step_ms:
            untold.append(unknown)
    if untold:
        raise PartlyJudged(found, ("comm.tensor-parallel",), untold[0])
    return found


def _cost(study: Study, domain: Domain, waited: float) -> tuple[Finding, str]:
    """What they cost, and why what would lessen it is not known; empty: it is."""
    a_step, median = domain.a_step(study), float(domain.table["bytes"].median())
    link = fit_link(domain.table)
    ranks = domain.dimension.size if domain.dimension is not None else int(domain.table["ranks"].max())
    share = waited / study.step_ms
    evidence = [
        Evidence("exposed communication a step", round(waited, 3), "ms", 0.0),
        Evidence("share of the step", round(100 * share, 1), "%"),
        Evidence("tensor-parallel collectives a step", round(a_step), "count"),
        Evidence("median size", round(median / 1024, 1), "KiB"),
        Evidence("latency of one", round(link.latency_ms, 4), "ms"),
    ]
    gain, unknown = _undivided(study, domain, link, ranks, waited)
    if share < DOMINATES:  # told, but no accusation
        gain = sure_up_to(gain, 0.0)
    op = str(domain.table["name"].mode().iloc[0])
    many = round(a_step)
    title = (
        f"{count(many, 'tensor-parallel collective')} a step, of {size(median)}{' each, are' if many != 1 else ', is'} "
    )
    title += f"waited for: {ms(waited)}, {percent(100 * share)} of the step{domain.inside}"
    fixes = tuple(_fixes(study, domain, gain, ranks, op))
    found = Finding("comm.tensor-parallel", title, "info", domain.where(study, op), tuple(evidence), gain, fixes)
    return found, unknown


def _undivided(study: Study, domain: Domain, link: Link, ranks: int, waited: float) -> tuple[Gain, str]:
    """What a step saves if the ranks of a group had whole layers, and a part of the batch each; or why that is not
    known.

    Their collectives go, and the gradients of these layers are reduced instead, over the same link and, in the worst
    case, hidden by nothing. Ranks wait for late ones there, so that no more is gained than what is waited for now while
    bytes move. Nothing is told where the layers, with what is kept of them, do not fit.
    """
    uses = [use for rank in study.ranks if (use := main_place(study.memory_uses, rank)) is not None]
    held = max((use.parts.get("parameters", 0) for use in uses), default=0)
    if not held:
        return NOTHING, (
            "how large the layers are that ranks share was not captured (memory), so what undivided ones would save is "
            "not known"
        )
    whole = held * ranks
    for use in uses:
        more = (ranks - 1) * sum(use.parts.get(part, 0) for part in STATES)
        on_place = sum(other.place == use.place for other in uses) if use.on_host else 1
        if use.capacity and use.share is not None and use.share + on_place * more / use.capacity > MOST_USED:
            return NOTHING, (
                "undivided, the layers that ranks share would not fit, and no smaller division was replayed"
            )
    gone = Communications(purposes=(TENSOR_PARALLEL,), groups=domain.groups)
    undivided = Effect(
        "comm.tensor-parallel",
        (WithoutCommunications(gone),),
        at_most_ms=waited,
        costs_ms=float(link.transfer_ms(np.array(float(whole)))),
        costs_between=(0.0, 1 + link.spread),
        counts_cores=True,
    )
    (gain,) = effect_gains(study, [undivided])
    return gain, ""


def _fixes(study: Study, domain: Domain, gain: Gain, ranks: int, op: str) -> Sequence[Fix]:
    found = []
    if gain.ms > 0:
        fewer = "layers whole on each rank (tensor-parallel size 1)"
        note = f"data-parallel over these {ranks} ranks instead, each with a part of the batch"
        found.append(Fix("code", f"{fewer}, {note}: it holds {ranks} times the weights of these layers", gain=gain))
        if ranks > 2:
            found.append(Fix("code", f"divide layers over fewer ranks: {ranks // 2} instead of {ranks}"))
    host_of = {item.rank: item.host for item in study.run.ranks}
    teams = domain.dimension.teams if domain.dimension is not None else ()
    if any(len({host_of.get(rank) for rank in team}) > 1 for team in teams):
        found.append(Fix("code", "keep the ranks that share layers on one host: order the mesh so that they are last"))
    if op == "all_reduce":
        words = "sequence parallelism (SequenceParallel, Shard(1)): a reduce-scatter and an all-gather in the place of "
        words += "each all-reduce. They move as many bytes, and what lies between is computed and kept once, not by all"
        found.append(Fix("code", words))
    return found


RULES = (
    Rule(
        "comm.tensor-parallel",
        "the collectives of layers that ranks share take much of the step",
        explains=("comm_exposed",),
        exhausts=("comm_exposed",),
        looks=(Look(tensor_parallel, needs=(signals.replay,)),),
        needs=(signals.communications,),
        outranked_by=("comm.slow-link",),
        error=ModelError(of_gain=0.25, of_step=0.02, busy=0.02),
        place=105,
    ),
)
