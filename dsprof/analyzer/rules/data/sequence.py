"""Ranks that share a sequence, of which the later have more to do: a causal mask over contiguous shards.

In a step every rank of a context-parallel team works on its own piece of each sequence. With a causal mask a piece
attends to itself and to those before it, so that of contiguous pieces the work grows by the same from one rank to the
next: 1 : 3 : 5 : 7 of four. It is how the sequence is dealt, and no rank's machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from ... import signals
from ...align.groups import CONTEXT_PARALLEL, CP
from ...align.match import PAIR, SEND_RECV
from ...arrays import Float
from ...candidate import Candidate, Price
from ...effect import Effect
from ...finding import Evidence, Finding, Fix, Where
from ...study import Study, once
from ...text import ms
from ...text import ranks as ranks_in_words
from ...whatif.even_segments import EvenSegments
from ..base import NotJudged, engine_config
from ..rule import Found
from .skipped import PairsOfRanks

KEY: Final = "context_parallel.order"
FEWEST: Final = 3
"""Ranks of a team of which a line says something; of two, `skipped`."""
LEAST_FIT: Final = 0.95
"""Of the variance between ranks that a line through their places explains."""
LEAST_FIT_OF_PHASE: Final = 0.8
"""The same of forward alone, and of backward: each is shorter, so that a stop of the machine's weighs more."""
LEAST_SLOPE: Final = 0.05
"""Of the mean compute, that the last rank has more than the first."""


@dataclass(frozen=True)
class Team:
    """ranks: in the order of the sequence; groups: in which they exchange, where that is known."""

    ranks: tuple[int, ...]
    groups: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Causal:
    """teams: in the order of the sequence; excess: [R, S] ms of each rank beyond the mean of its team that its place
    explains; fit: the share of the variance between ranks that a line explains, of two ranks `Skipped.fit`; times: the
    last rank's compute over the first's, as far as their places explain it; even: equal shares of the attention."""

    teams: tuple[tuple[int, ...], ...]
    excess: Float
    fit: float
    times: float
    even: EvenSegments


@once
def causal(study: Study) -> Causal | None:
    """None where no ranks share sequences, or their work does not grow with the place."""
    if study.on_gpu:  # there the host's time in phases says nothing of the device's
        return None
    if _attention(study) == "ulysses" or _order(study) not in (None, "contiguous") or not len(study.step_numbers):
        return None
    place = {rank: index for index, rank in enumerate(study.ranks)}
    teams = [team for team in sequence_teams(study) if place.keys() >= set(team.ranks)]
    if not teams:
        return None
    compute, excess, fits, times = study.work("compute"), np.zeros_like(study.work("compute")), [], []
    mean, by_phase = compute.mean(axis=1), _by_phase(study)
    pairs = None
    if study.graph is not None and any(len(team.ranks) < FEWEST for team in teams):
        pairs = PairsOfRanks(study, study.graph, stated=_key(study))
    for team in teams:
        places, size = [place[rank] for rank in team.ranks], len(team.ranks)
        fit = _line(mean[places])
        lines = [_line(each[places], LEAST_FIT_OF_PHASE) for each in by_phase]
        if fit is None or len(lines) < 2 or None in lines:
            return None
        if size < FEWEST:
            found = pairs.skipped(team.ranks, team.groups) if pairs is not None else None
            if found is None:
                return None
            excess[places], fit = found.excess, found.fit
            most = float(mean[places[0]] + found.excess[1].mean() - found.excess[0].mean())
        else:
            away = _centred(size)[:, None]
            excess[places] = away * (compute[places] * away).sum(axis=0) / float((away**2).sum())
            most = float(mean[places[-1]])
        fits.append(fit)
        times.append(most / max(float(mean[places[0]]), 1e-9))
        if times[-1] > 2 * size - 1:  # contiguous pieces have 1 : 3 : 5 .. of the attention, and as much of all else
            return None
    ranks = tuple(team.ranks for team in teams)
    return Causal(
        ranks, excess, min(fits), float(np.mean(times)), EvenSegments(ranks, None if pairs is None else pairs.share)
    )


def _centred(count: int) -> Float:
    found: Float = np.arange(count, dtype=np.float64) - (count - 1) / 2
    return found


def _line(of_ranks: Float, least: float = LEAST_FIT) -> float | None:
    """The share of the variance that a rising line through the places explains; None: it does not rise, or not so."""
    place = _centred(len(of_ranks))
    beside = of_ranks - of_ranks.mean()
    slope = float((place * beside).sum() / (place**2).sum())
    fit = slope**2 * float((place**2).sum()) / max(float((beside**2).sum()), 1e-12)
    rises = slope * (len(of_ranks) - 1) > LEAST_SLOPE * max(float(of_ranks.mean()), 1e-9)
    return fit if rises and fit >= least else None


def _by_phase(study: Study) -> list[Float]:
    """What each rank computes in its forwards, and in its backwards, [R] each, any unit."""
    table = study.passes
    table = table[table["step"].isin(study.step_numbers)]
    own = table.groupby(["name", "rank"], observed=True)["own_ns"].sum().unstack(fill_value=0)
    return list(own.reindex(columns=list(study.ranks), fill_value=0).to_numpy(np.float64))


def sequence_teams(study: Study) -> list[Team]:
    """Ranks that share sequences, by their places: those that pass messages around in a ring, else the teams of a
    dimension that the job says is for that. None in a pipeline, where messages are its own. Two ranks that exchange
    messages are no ring, nor are ranks that only look like a dimension for context parallelism: what they exchange may
    be anything. In Ulysses every rank has all positions, of some of the heads."""
    if study.in_stages:
        return []
    rows = study.judged_collectives
    sent = rows.are("name", SEND_RECV)
    found = [Team(ring) for ring in rings(rows.table["group"][sent].astype(str))] if sent.any() else []
    said = [one for one in study.mesh.dimensions if one.role == CP and (one.stated or CONTEXT_PARALLEL in one.purposes)]
    return found or [
        Team(team, one.groups) for one in said if not one.name.lower().startswith("ulysses") for team in one.teams
    ]


def rings(sent: pd.Series[str]) -> list[tuple[int, ...]]:
    """Cycles of ranks, each of which exchanges messages with two others. sent: the group of each message (`0 2>3`)."""
    pairs = sent.drop_duplicates().str.extract(PAIR).dropna().astype("int64")
    neighbours: dict[int, set[int]] = {}
    for one, other in pairs.itertuples(index=False):
        neighbours.setdefault(int(one), set()).add(int(other))
        neighbours.setdefault(int(other), set()).add(int(one))
    found, seen = [], set[int]()
    for first in sorted(neighbours):
        if first in seen:
            continue
        ring, stack = set[int](), [first]
        while stack:
            rank = stack.pop()
            if rank not in ring:
                ring.add(rank)
                stack += neighbours[rank]
        seen |= ring
        if len(ring) >= FEWEST and all(len(neighbours[rank]) == 2 for rank in ring):
            found.append(tuple(sorted(ring)))
    return found


def with_order(study: Study, order: Any) -> Effect:
    """Another order of a sequence's positions on the engine's ranks. Raises NotJudged where this run does not tell."""
    now = _order(study)
    if now is None:
        raise NotJudged("no ring of dsprof's engine was seen in this run (context_parallel.attention)")
    if order == now:
        raise NotJudged(f"the run has {KEY}={now} already")
    if order != "zigzag":
        raise NotJudged(f"how unequal {order} pieces are is not told by a run with {now} ones")
    found = causal(study)
    if found is None:
        raise NotJudged("the ranks that share a sequence do not compute more the later their part of it is")
    return Effect("data.imbalance", (found.even,))


def _attention(study: Study) -> str | None:
    """How ranks of dsprof's engine that share sequences compute attention; None without such."""
    content = engine_config(study) or {}
    if content.get("sequence_parallel_size") in (None, 0, 1):
        return None
    section = content.get("context_parallel")
    return str(section.get("attention", "ulysses")) if isinstance(section, Mapping) else "ulysses"


def _order(study: Study) -> str | None:
    """Of the positions that go round in a ring of dsprof's engine; None without one."""
    if _attention(study) != "ring":
        return None
    content = engine_config(study) or {}
    return str(content["context_parallel"].get("order", "zigzag"))


def _key(study: Study) -> bool:
    """Whether the order stands in the configuration, as one that leaves ranks unequal work."""
    return _order(study) == "contiguous"


def causal_shards(study: Study) -> Found:
    """Every rank of a team with the mean of its team, turn by turn."""
    found = causal(study)
    if found is None:
        return []
    signals.peers(study)
    compute = study.work("compute").mean(axis=1)
    team = found.teams[0]
    explained = "of the difference between ranks, explained by their place in the sequence"
    how = "up by the same from rank to rank"
    if len(team) < FEWEST:
        explained = f"of what rank {team[-1]} takes longer in backward, where rank {team[0]} has nothing to do"
        how = f"as rank {team[0]} skips the keys that are masked"
    evidence = (
        *(
            Evidence(f"compute a step of rank {rank}", round(float(compute[study.ranks.index(rank)]), 3), "ms")
            for rank in (team[0], team[-1])
        ),
        Evidence(explained, round(found.fit, 3), ""),
        Evidence("peers wait a step", round(float(study.work("peer_wait").mean()), 3), "ms", 0.0),
    )
    title = (
        f"the later a rank's part of the sequence, the more it computes: rank {team[-1]} takes {found.times:.1f} times "
        f"what rank {team[0]} does, {how}"
    )
    late = tuple(rank for one in found.teams for rank in one[(len(one) + 1) // 2 :])
    where = Where(ranks=late, steps=study.step_range)
    key = _key(study)
    zigzag = (
        f'{KEY}: "zigzag", so that a causal mask leaves every rank as much'
        if key
        else (
            "deal the sequence in zigzag (cut it into 2P chunks, r and 2P-1-r to rank r of P) or in stripes, so that a "
            "causal mask leaves every rank as much; contiguous parts give the last rank most"
        )
    )

    def say(price: Price) -> Finding:
        fix = Fix("code", zigzag, gain=price.gain)
        if key:
            patch = ({"op": "replace", "path": "/context_parallel/order", "value": "zigzag"},)
            fix = Fix("config", zigzag, patch, price.gain, ((KEY, "zigzag"),))
        fixes = (fix,)
        more = ms(float(found.excess.mean(axis=1).max()))
        saved = f"{title}; {ranks_in_words(late)} {'have' if len(late) > 1 else 'has'} {more} more than the mean"
        return Finding("data.imbalance", saved, "info", where, evidence, price.gain, fixes, share=price.share)

    return [Candidate("data.imbalance", found.even, say)]
