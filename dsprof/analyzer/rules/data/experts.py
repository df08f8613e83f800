"""moe.imbalance: experts that get unequal shares of the tokens, so that each layer takes as long as its largest share.

A router sends each token to some of the experts, which lie on the ranks of a group; what it sends is exchanged by
all-to-alls whose sizes tell each rank's share. Between two of these a rank computes as long as it has tokens, and the
next exchange waits for the last. The same sampler, the same lengths, and no rank is slow: only the routing, or where
experts lie, can be changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dsprof.schema import CALL_SITE

from ... import signals
from ...align.groups import EXCHANGE
from ...arrays import Bool, Float
from ...budget.label import spans_of
from ...finding import Evidence, Finding, Fix, Gain, Where
from ...graph.step_graph import WAKE_UP_DELAY, Steps
from ...price.calibration import ModelError
from ...study import Study, once
from ...text import percent
from ...whatif.work import Change, Spans, within
from ..base import NotConcerned, NotJudged, at, place_fix, settings_fix
from ..rule import Rule, fault
from .routed_tokens import Routed, places_of_teams, routed_tokens

LEAST_CHANGE: Final = 0.002
"""Standard deviation of a rank's share over the steps, of its mean. A router learns and its inputs differ; shares that
never change are of something that was divided unevenly for good, such as tables of embeddings."""
SURELY: Final = 4.0
"""Standard errors that the slope of a piece of work over the tokens is above nothing."""
SAME: Final = 3.0
"""Standard errors by which what the steps say and what the ranks say may differ."""
LEAST_TOLD: Final = 0.5
"""Correlation of a piece's deviation from the mean of the team with the share of the tokens, from which on it is their
work."""
DENSE: Final = 0.25
"""Where shares hardly change, ranks are compared with each other: there must be other work, in which who has more
tokens is slower by less than this part of what he is among the experts; else it is a slow rank."""
MUCH: Final = 0.05
"""Of a step's compute, from which on a piece of it counts as other work."""
MOST_OF_SHARE: Final = 2.0
"""Times the part by which a rank's exchange is above the mean, that its work in a piece can be more: an exchange is as
large as what was sent or what came, so a rank that gets little seems to have the mean."""
SENT_ALIKE: Final = 0.01
"""Standard deviation of the smallest exchange of a step, of its mean, up to which it is what every rank sends."""
CAPACITY: Final = 1.25
COEFFICIENT: Final = 0.01
"""What is usual: tokens that an expert takes at most, times the mean; weight of the balancing loss."""


@dataclass(frozen=True)
class ExpertWork:
    """change: what equal shares would take away (or add), piece by piece; excess: the same, [R, S] ms, by rank and step
    told:   correlation of what ranks compute in those pieces, beyond their team's mean, and of their share
    """

    change: Change
    excess: Float
    told: float


def unequal_shares(study: Study) -> Change | None:
    """Every rank of a team given an equal share of the tokens."""
    signals.peers(study)
    routed = routed_tokens(study)
    if routed is None:
        if study.communicated.exchanged.empty:
            raise NotConcerned
        return None
    if not _varies(routed):
        raise NotJudged(
            "ranks exchange unequal shares all-to-all, and the same ones in every step: something is divided unevenly "
            "for good, such as tables of embeddings, and no router sends tokens"
        )
    if not _in_both_passes(study, routed):
        raise NotJudged(
            "unequal shares are exchanged all-to-all, but not in forward and in backward, as experts do: what they are "
            "exchanged for is not known"
        )
    if study.input_sizes is None and not _sent_alike(study, routed):
        raise NotJudged(
            "unequal shares are exchanged all-to-all, of which ranks send unequal ones as well, and the sizes of the "
            "inputs to forward were not captured: whether routing or inputs differ is not known"
        )
    work = expert_work(study)
    return None if work is None else work.change


def _varies(routed: Routed) -> bool:
    """Whether ranks' parts of what is exchanged change; that all exchange more in one step is of larger batches."""
    part = routed.shares / np.maximum(routed.shares - routed.beyond, 1.0)
    return float(part.std(axis=1).max(initial=0.0)) > LEAST_CHANGE


def _sent_alike(study: Study, routed: Routed) -> bool:
    """Whether all ranks send as much in every step: then who exchanges more got more."""
    teams = places_of_teams(study, routed.dimension)
    return all(_is_sent(routed.shares[places].min(axis=0)) for places in teams if len(places) > 1)


def _is_sent(least: Float) -> bool:
    """Whether the smallest exchange of each step, [S], is what every rank sends."""
    return float(least.std()) <= SENT_ALIKE * float(least.mean())


def _in_both_passes(study: Study, routed: Routed) -> bool:
    """Whether a rank exchanges in its forwards and in its backwards."""
    rank = _one_rank(study, routed)
    rows = study.trace.read(rank, ("kind", "name", "group", "step", "start_ns", "issue_ns"))
    mine = (rows["kind"] == "comm") & (rows["name"] == EXCHANGE) & rows["step"].isin(study.step_numbers)
    mine &= rows["group"].astype(str).isin(routed.dimension.groups)
    issued = rows["issue_ns"].where(rows["issue_ns"].notna(), rows["start_ns"])[mine].to_numpy(np.int64)
    phases = study.training_phases
    phases = phases[phases["rank"] == rank]
    passes = (spans_of(phases[phases["name"] == name]) for name in ("forward", "backward"))
    return all(of.holds(issued).any() for of in passes)


def _one_rank(study: Study, routed: Routed) -> int:
    """The first captured one that exchanges tokens: what a rank does in its program the others do as well."""
    return next(rank for team in routed.dimension.teams for rank in team if rank in study.ranks)


@once
def expert_work(study: Study) -> ExpertWork | None:
    """Which pieces of work, between two events of a rank's program, follow its share of the tokens. None: none does."""
    routed, graph = routed_tokens(study), study.need_graph()
    assert routed is not None
    excess, found = np.zeros_like(routed.beyond), []
    told: list[tuple[Float, Float]] = []
    ranks = graph.ranks[: graph.leads]
    for index, steps in enumerate(graph.templates):
        columns = graph.columns_of(index)
        chosen = np.flatnonzero(graph.judged[columns])
        judged = (np.cumsum(graph.judged) - 1)[columns[chosen]]
        if not len(chosen) or judged.max(initial=0) >= routed.beyond.shape[1]:
            continue
        for team in routed.dimension.teams:
            threads = [thread for thread, rank in enumerate(ranks) if rank in team]
            if len(threads) < 2 or len({steps.structure.programs[thread] for thread in threads}) > 1:
                continue
            places = [study.ranks.index(int(ranks[thread])) for thread in threads]
            beyond, shares = routed.beyond[places][:, judged], routed.shares[places][:, judged]
            work = np.stack([_compute(steps, thread)[:, chosen] for thread in threads])
            gone = _follows(work, beyond, shares)
            if not gone.any():
                continue
            pieces: Bool = np.asarray(gone.any(axis=(0, 2)))
            beside = (work - work.mean(axis=0))[:, pieces].sum(axis=1)
            told.append((beside.ravel(), beyond.ravel()))
            np.add.at(excess, (np.array(places)[:, None], judged[None, :]), gone.sum(axis=1))
            for thread, mine, took in zip(threads, gone, work, strict=True):
                found.append(_spans(steps, thread, pieces, chosen, judged, mine / np.maximum(took, 1e-9)))
    if not found:
        return None
    spans = Spans(*(np.concatenate([getattr(one, name) for one in found]) for name in Spans.__dataclass_fields__))
    beside, tokens = (np.concatenate(each) for each in zip(*told, strict=True))
    return ExpertWork(Change({"compute": excess}, spans=spans), excess, float(np.corrcoef(beside, tokens)[0, 1]))


def explained_by_tokens(study: Study) -> Float | None:
    """The part of each rank's compute that its share of the tokens explains: ms above (+) or below (-) what an equal
    share would cost, [R, S]; None where shares are equal."""
    if study.graph is None or routed_tokens(study) is None:
        return None
    work = expert_work(study)
    return np.zeros_like(study.work("compute")) if work is None else work.excess


def _compute(steps: Steps, thread: int) -> Float:
    """[segments of the thread, S] ms."""
    found: Float = steps.work[steps.structure.of_thread(thread)][..., within("compute")].sum(axis=-1)
    return found


def _follows(work: Float, beyond: Float, shares: Float) -> Float:
    """What of each piece a rank's share beyond the mean explains, [N, W, S] ms, of N ranks of a team.

    work: [N, W, S]; beyond, shares: [N, S]. Told by how a rank's own work follows its own share over the steps; where
    shares hardly change, by how ranks differ.
    """
    beside = work - work.mean(axis=0)
    own = beyond - beyond.mean(axis=1, keepdims=True)
    slope, sure, error = _slope(beside - beside.mean(axis=2, keepdims=True), own)
    of_all, surely, _ = _slope(beside, beyond)
    if sure.any():
        # Where a rank is always ahead of the others the steps tell little, and the ranks much, if they say the same.
        alike = surely & (np.abs(of_all - slope) <= SAME * error)
        slope = np.where(alike, of_all, slope)
        if _among_experts_only(beside, beyond, work):
            sure = sure | alike
    else:
        slope, sure = of_all, surely & _among_experts_only(beside, beyond, work)
    gone = np.where(sure, slope, 0.0)[None, :, None] * beyond[:, None, :]
    most = np.minimum(MOST_OF_SHARE * np.abs(beyond) / np.maximum(shares, 1.0), 0.95)[:, None, :] * work
    found: Float = np.clip(gone, np.minimum(-most, beside), most)
    return found


def _slope(beside: Float, tokens: Float) -> tuple[Float, Bool, Float]:
    """Slope of each piece over the tokens, [W], whether it surely rises with them, and its standard error."""
    squares = max(float((tokens**2).sum()), 1e-9)
    slope = (beside * tokens[:, None, :]).sum(axis=(0, 2)) / squares
    left = beside - slope[None, :, None] * tokens[:, None, :]
    of = np.maximum(beside.shape[0] * beside.shape[2] - beside.shape[0] - 1, 1)
    error = np.sqrt((left**2).sum(axis=(0, 2)) / of / squares)
    told = 1 - (left**2).sum(axis=(0, 2)) / np.maximum((beside**2).sum(axis=(0, 2)), 1e-12)
    return slope, (slope > SURELY * error) & (told >= LEAST_TOLD**2), error


def _among_experts_only(beside: Float, beyond: Float, work: Float) -> bool:
    """Whether who has most tokens is slower in some pieces, and in others is not."""
    hot = int(beyond.mean(axis=1).argmax())
    mean = work.mean(axis=(0, 2))
    slower = beside[hot].mean(axis=1) / np.maximum(mean, 1e-9)
    large = mean >= MUCH * mean.sum()
    return bool(large.any()) and float(slower[large].min()) < DENSE * float(slower[large].max())


def _spans(
    steps: Steps, thread: int, pieces: Bool, chosen: np.ndarray[Any, Any], judged: np.ndarray[Any, Any], share: Float
) -> Spans:
    """The pieces of a thread in which a share of the work goes. share: [W, S]."""
    mine = steps.structure.of_thread(thread)
    began = steps.began[mine][pieces][:, chosen]
    took = steps.work[mine][pieces][:, chosen]
    lasts = took.sum(axis=-1) - took[..., WAKE_UP_DELAY]
    of_step = np.broadcast_to(judged, began.shape)
    return Spans(
        np.full(began.size, thread, np.int64), of_step.ravel().astype(np.int64), began.ravel(), lasts.ravel(),
        share[pieces].ravel(),
    )  # fmt: skip


def imbalance(study: Study, change: Change, gain: Gain, share: Gain) -> Finding:
    """Which ranks' experts are asked most, by how much, and whether they are always the same."""
    routed, work = routed_tokens(study), expert_work(study)
    assert routed is not None
    assert work is not None
    part = _of_mean(study, routed)
    each = part.mean(axis=1)
    hot = int(each.argmax())
    always = _always_the_same(part)
    ranks = (study.ranks[hot],) if always else tuple(rank for team in routed.dimension.teams for rank in team)
    evidence = (
        Evidence("largest share of the tokens a step, of the mean", round(float(part.max(axis=0).mean()), 2), "", 1.0),
        Evidence(f"share of rank {study.ranks[hot]}, of the mean", round(float(each[hot]), 2), "", 1.0),
        Evidence("extra compute of the rank with most", round(float(work.excess.max(axis=0).mean()), 3), "ms", 0.0),
        Evidence("correlation of a rank's extra compute with its share", round(work.told, 2), ""),
    )
    if always:
        more = percent(100 * (float(each[hot]) - 1))
        who = f"rank {study.ranks[hot]}{study.mesh.words(ranks)} gets {more} more than the mean"
    else:
        more = percent(100 * (float(part.max(axis=0).mean()) - 1))
        who = f"the largest of a step is {more} above the mean, on another rank each step"
    title = f"experts get unequal shares of the tokens: {who}"
    where = Where(ranks=ranks, op=EXCHANGE, steps=study.step_range, dimension=routed.dimension.name or None)
    fixes = _fixes(study, routed, gain, always=always)
    return Finding("moe.imbalance", title, "info", where, evidence, gain, fixes, share=share)


def _of_mean(study: Study, routed: Routed) -> Float:
    """Each rank's share, of the mean of its team, [R, S]; 1 of a rank of no team.

    An exchange is as large as what was sent or what came. Where all send as much, it is never less than that, and what
    came is as much in the mean of the ranks.
    """
    found = np.ones_like(routed.shares)
    for places in places_of_teams(study, routed.dimension):
        mine = routed.shares[places]
        if not len(places) or not mine.any():
            continue
        least = mine.min(axis=0)
        mean = least if _is_sent(least) else mine.mean(axis=0)
        found[places] = mine / np.maximum(mean, 1.0)
    return found


def _always_the_same(part: Float) -> bool:
    """Whether ranks differ more from each other than each from step to step."""
    return float(part.mean(axis=1).std()) > float(part.std(axis=1).mean())


def _fixes(study: Study, routed: Routed, alone: Gain, *, always: bool) -> tuple[Fix, ...]:
    """In the words of what the job is written in."""
    site = _site(study, routed)
    if any(word.startswith(("--moe-", "--num-experts")) for word in study.run.command):
        balance: dict[str, Any] = {"--moe-router-load-balancing-type": "aux_loss", "--moe-aux-loss-coeff": COEFFICIENT}
        capacity: dict[str, Any] = {"--moe-expert-capacity-factor": CAPACITY}
        where = None
    elif any(fact.get("framework") == "transformers" for fact in study.facts.get("dataloader", [])):
        balance = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
        capacity, where = {}, None  # most of its models drop no tokens
    else:
        balance, capacity, where = {"aux_loss_coefficient": COEFFICIENT}, {"capacity_factor": CAPACITY}, site
    typed = ", ".join(f"{key} {value}" if key.startswith("-") else f"{key}={value}" for key, value in balance.items())
    balanced = f"give the router a balancing loss, or a larger one ({typed}){at(site)}"
    fixes = [settings_fix(balanced, balance, None, alone) if where is None else place_fix(balanced, where, alone)]
    for limit in capacity:
        limited = f"{limit} {CAPACITY:g}" if limit.startswith("-") else f"{limit}={CAPACITY:g}"
        capped = f"or cap what an expert takes: {limited} (tokens above {CAPACITY:g} times the mean are dropped)"
        fixes.append(settings_fix(capped, capacity, None) if where is None else place_fix(capped, where))
    if always:
        placed = "or place experts anew: those that are asked most on different ranks, or copies of them"
        fixes.append(Fix("code", placed))
    return tuple(fixes)


def _site(study: Study, routed: Routed) -> str | None:
    """The line of the script that exchanges tokens; None: it was not seen."""
    rank = _one_rank(study, routed)
    rows = study.trace.read(rank, ("kind", "name", "purpose", "site"))
    marks = rows[(rows["kind"] == "mark") & (rows["name"] == CALL_SITE) & (rows["purpose"] == EXCHANGE)]
    sites = marks["site"].dropna().astype(str)
    return str(sites.mode().iloc[0]) if len(sites) else None


RULES = (
    Rule(
        "moe.imbalance",
        "experts get unequal shares of the tokens",
        explains=("peer_wait",),
        looks=(fault("moe.imbalance", unequal_shares, imbalance),),
        needs=(signals.steps,),
        error=ModelError(of_gain=0.1, of_step=0.014, busy=0.014),
        place=35,
    ),
)
