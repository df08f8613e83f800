"""moe.imbalance: experts that get unequal shares of the tokens, so that each layer takes as long as its largest share.

A router sends each token to some of the experts, which lie on the ranks of a group; what it sends is exchanged by
all-to-alls whose sizes tell each rank's share. Between two of these a rank computes as long as it has tokens, and the
next exchange waits for the last. The same sampler, the same lengths, and no rank is slow: only the routing, or where
experts lie, can be changed.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from dsprof.schema import CALL_SITE

from ... import signals
from ...align.groups import EXCHANGE
from ...arrays import Float
from ...budget.label import spans_of
from ...finding import Evidence, Finding, Fix, Gain, Where
from ...price.calibration import ModelError
from ...study import Study, once
from ...text import percent
from ...text import ranks as ranks_in_words
from ...whatif.work import Change
from ..base import NotConcerned, NotJudged, at, place_fix, settings_fix
from ..rule import Rule, fault
from .every_rank import of_every_rank
from .pieces import Pieces, pieces_that_follow
from .routed_tokens import Routed, exchanges, is_sent, places_of_teams, routed_tokens, sent_alike

LEAST_CHANGE: Final = 0.002
"""Standard deviation of a rank's share over the steps, of its mean. A router learns and its inputs differ; shares that
never change are of something that was divided unevenly for good, such as tables of embeddings."""
AS_MUCH: Final = 0.5
"""Of what the rank with most gets beyond the mean, from which on another gets as much: replicas share experts."""
CAPACITY: Final = 1.25
COEFFICIENT: Final = 0.01
"""What is usual: tokens that an expert takes at most, times the mean; weight of the balancing loss."""


def unequal_shares(study: Study) -> Change | None:
    """Every rank of a team given an equal share of the tokens."""
    signals.peers(study)
    routed = routed_tokens(study)
    if routed is None:
        exchanged = study.communicated.exchanged
        if exchanged.empty:
            raise NotConcerned
        if (exchanged["place"] < 0).any():
            raise NotJudged(
                "ranks get equal shares of what is exchanged all-to-all in a step; whether they do in each exchange is "
                "not known: these are too many to be kept one by one"
            )
        return None
    if not _varies(study, routed):
        raise NotJudged(
            "ranks exchange unequal shares all-to-all, and the same ones in every step: something is divided unevenly "
            "for good, such as tables of embeddings, and no router sends tokens"
        )
    if not _in_both_passes(study, routed):
        raise NotJudged(
            "unequal shares are exchanged all-to-all, but not in forward and in backward, as experts do: what they are "
            "exchanged for is not known"
        )
    if study.input_sizes is None and not sent_alike(study, routed.dimension, exchanges(routed)):
        raise NotJudged(
            "unequal shares are exchanged all-to-all, of which ranks send unequal ones as well, and the sizes of the "
            "inputs to forward were not captured: whether routing or inputs differ is not known"
        )
    work = expert_work(study)
    return None if work is None else of_every_rank(study, work.change)


def _varies(study: Study, routed: Routed) -> bool:
    """Whether ranks' parts of what is exchanged change; that all exchange more in one step is of larger batches."""
    every = exchanges(routed)
    part = np.ones_like(every)
    for places in places_of_teams(study, routed.dimension):
        part[places] = every[places] / np.maximum(every[places].mean(axis=0), 1.0)
    return float(part.std(axis=1).max(initial=0.0)) > LEAST_CHANGE


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
def expert_work(study: Study) -> Pieces | None:
    """Which pieces of work follow a rank's share of the tokens. None: none does."""
    routed = routed_tokens(study)
    assert routed is not None
    return pieces_that_follow(study, routed.dimension.teams, routed.of_pieces)


def explained_by_tokens(study: Study) -> Float | None:
    """The part of each rank's compute that its share of the tokens explains: ms above (+) or below (-) what an equal
    share would cost, [R, S]; None where shares are equal."""
    if study.graph is None or routed_tokens(study) is None:
        return None
    work = expert_work(study)
    return np.zeros_like(study.work("compute")) if work is None else work.excess


def imbalance(study: Study, change: Change, gain: Gain, share: Gain) -> Finding:
    """Which ranks' experts are asked most, by how much, and whether they are always the same."""
    routed, work = routed_tokens(study), expert_work(study)
    assert routed is not None
    assert work is not None
    by_exchange = _of_mean(study, routed)
    part = by_exchange.reshape(len(by_exchange), -1)
    each = part.mean(axis=1)
    hot = int(each.argmax())
    always = _always_the_same(part)  # the same in all exchanges
    what = "a step" if routed.each is None else "an exchange"
    asked_most = study.ranks_where(each - 1 >= AS_MUCH * (each[hot] - 1))
    ranks = asked_most if always else tuple(rank for team in routed.dimension.teams for rank in team)
    largest = round(float(part.max(axis=0).mean()), 2)
    evidence: tuple[Evidence, ...] = (
        Evidence(f"largest share of the tokens of {what}, of the mean", largest, "", 1.0),
    )
    if routed.each is None:  # else it is another rank that has it in the next exchange
        evidence += (
            Evidence(f"share of rank {study.ranks[hot]}, of the mean", round(float(each[hot]), 2), "", 1.0),
            Evidence("extra compute of the rank with most", round(float(work.excess.max(axis=0).mean()), 3), "ms", 0.0),
        )
    evidence += (Evidence("correlation of a rank's extra compute with its share", round(work.told, 2), ""),)
    if always:
        more = percent(100 * (float(each[np.isin(study.ranks, ranks)].mean()) - 1))
        gets = "gets" if len(ranks) == 1 else "get"
        who = f"{ranks_in_words(ranks)}{study.mesh.words(ranks)} {gets} {more} more than the mean"
    else:
        more = percent(100 * (float(part.max(axis=0).mean()) - 1))
        whose = "on another rank each step" if routed.each is None else "on another rank from exchange to exchange"
        who = f"the largest of {what} is {more} above the mean, {whose}"
    title = f"experts get unequal shares of the tokens: {who}"
    where = Where(ranks=ranks, op=EXCHANGE, steps=study.step_range, dimension=routed.dimension.name or None)
    for_good = all(_always_the_same(by_exchange[..., k]) for k in range(by_exchange.shape[2]))
    fixes = _fixes(study, routed, gain, always=for_good)
    return Finding("moe.imbalance", title, "info", where, evidence, gain, fixes, share=share)


def _of_mean(study: Study, routed: Routed) -> Float:
    """Each rank's share of each exchange, of the mean of its team, [R, S, K]; 1 of a rank of no team. K is 1 where
    whole steps tell.

    An exchange is as large as what was sent or what came. Where all send as much, it is never less than that, and what
    came is as much in the mean of the ranks.
    """
    every = exchanges(routed)
    found = np.ones_like(every)
    for places in places_of_teams(study, routed.dimension):
        mine = every[places]
        if not len(places) or not mine.any():
            continue
        least = mine.min(axis=0)
        mean = np.where(is_sent(least), least, mine.mean(axis=0))
        found[places] = mine / np.maximum(mean, 1.0)
    return found


def _always_the_same(part: Float) -> bool:
    """Whether ranks differ more from each other than each from step to step, or from exchange to exchange. part: [R, S]
    of steps, or of exchanges"""
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
