"""Tokens that go to the ranks of their experts: which rank gets more of them, and what that makes it compute.

A rank whose expert is asked more often computes longer. That is neither its input's doing, so no other sampler mends
it, nor the rank's own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from ...align.groups import EXCHANGE, Dimension
from ...arrays import Bool, Float, Int
from ...graph.step_graph import Structure
from ...study import Study, once
from ...text import percent

LEAST_UNEQUAL: Final = 0.05
"""Of the mean of a team: shares that differ by less are equal."""
SENT_ALIKE: Final = 0.01
"""Standard deviation of the smallest exchange of a step, of its mean, up to which it is what every rank sends."""
SMALL: Final = 0.01
"""Of the largest exchange."""
WHOLE: Final = 0.9
"""Of the steps, in which all exchanges were seen."""
MORE_UNEQUAL: Final = 1.5
"""Times as unequal as whole steps are single exchanges of them, where each layer asks another rank's experts more."""

BY_INPUT: Final = 0.7
"""Correlation of what ranks exchange, and what they were given as input, beyond the mean of their team: from this on it
is the input that differs."""


@dataclass(frozen=True)
class Routed:
    """dimension: in which tokens are exchanged
    beyond:    bytes that each rank exchanges in a step, beyond the mean of its team, [R, S] over the ordinary steps
    spread:    the largest share less the smallest, of the mean: mean over steps, of the most unequal team
    shares:    bytes that each rank exchanges in a step, [R, S]
    each:      bytes of each exchange in the order of a step, [R, S, K], where it is from one to the next that another
               rank gets more, of which all send as much; `spread` is that of single ones. None: whole steps tell
    received:  of these, what came (`_received`)
    """

    dimension: Dimension
    beyond: Float
    spread: float
    shares: Float
    each: Float | None = None
    received: Float | None = None

    def of_pieces(
        self, structure: Structure, thread: int, places: list[int], at: Int
    ) -> tuple[Float, Float, Bool | None]:
        """Of ranks of a team, what each gets beyond the mean of the team, and in all, [N, W, S], for each of the W
        pieces of a thread's program: in the exchange before it, or in the whole step. And where it is seen to be no
        more than the mean, but not how much less.

        places: in [R, ..]; at: [S] in [.., S, ..]"""
        beyond, shares = self.beyond[places][:, at], self.shares[places][:, at]
        if self.each is not None and self.received is not None:
            after = _exchange_before(structure, thread, self.dimension.groups, self.received.shape[2])
            if after is not None:
                every, sent = (np.moveaxis(of[places][:, at], 2, 1) for of in (self.received, self.each))
                every, sent = (
                    np.concatenate([of, np.zeros_like(of[:, :1])], axis=1)[:, after]  # -1: before the first
                    for of in (every, sent)
                )
                return every - every.mean(axis=0), every, every < sent
        return beyond[:, None, :], shares[:, None, :], None

    @property
    def reason(self) -> str:
        """Why an imbalance is not laid to inputs."""
        where = f"dimension {self.dimension.name}" if self.dimension.name else f"groups of {self.dimension.size} ranks"
        return (
            f"ranks exchange unequal shares of tokens (all_to_all in {where}: {percent(100 * self.spread)} between the "
            "largest and the smallest), as experts do: what a rank computes follows from how tokens are routed, and "
            "not from its input"
        )


@once
def routed_tokens(study: Study) -> Routed | None:
    """None where no tokens are exchanged, all ranks of a group get as many, or who gets more is who was given more
    input: then it is the input's doing."""
    exchanged = study.communicated.exchanged
    exchanged = exchanged[exchanged["step"].isin(study.step_numbers)]
    found: Routed | None = None
    for dimension in study.mesh.dimensions:
        mine = exchanged[exchanged["group"].isin(dimension.groups)]
        if mine.empty:
            continue
        table = mine.groupby(["rank", "step"])["bytes"].sum().unstack()
        wide: Float = table.reindex(index=study.ranks, columns=study.step_numbers).fillna(0.0).to_numpy(np.float64)
        beyond, spread = np.zeros_like(wide), 0.0
        for places in places_of_teams(study, dimension):
            if len(places) < 2:
                continue
            mean = wide[places].mean(axis=0)
            beyond[places] = wide[places] - mean
            spread = max(spread, float((np.ptp(wide[places], axis=0) / np.maximum(mean, 1.0)).mean()))
        most = LEAST_UNEQUAL if found is None else found.spread
        single = _each(study, mine)
        apart = 0.0 if single is None else _apart(study, dimension, single)
        if single is not None and apart > max(most, MORE_UNEQUAL * spread) and sent_alike(study, dimension, single):
            found = Routed(dimension, beyond, apart, wide, single, _received(study, dimension, single))
        elif spread > most and not _follows_input(study, dimension, beyond):
            found = Routed(dimension, beyond, spread, wide)
    return found


def _each(study: Study, exchanged: pd.DataFrame) -> Float | None:
    """Bytes of each exchange of a dimension, [R, S, K]; None where ranks are in several of its groups, or not nearly
    all steps of all ranks have as many exchanges. In a step that is not whole each rank has what it has in the mean."""
    exchanged = exchanged[exchanged["place"] >= 0]
    counts = exchanged.groupby(["rank", "step"])["bytes"].agg(["size", "count"]).unstack()
    if exchanged.empty or exchanged.groupby(["rank", "step"])["group"].nunique().max() > 1:
        return None
    most = int(counts["size"].stack().mode().iloc[0])
    whole = (counts == most).all()
    steps = np.intersect1d(*(whole[name].index[whole[name]] for name in ("size", "count")))
    if most < 2 or len(steps) < WHOLE * len(study.step_numbers):
        return None
    table = exchanged[exchanged["step"].isin(steps)].sort_values(["rank", "step", "place"])
    ranks = np.searchsorted(study.ranks, np.unique(table["rank"]))
    found = np.zeros((len(study.ranks), len(study.step_numbers), most))
    told = table["bytes"].to_numpy(np.float64).reshape(len(ranks), len(steps), most)
    found[ranks] = told.mean(axis=1, keepdims=True)
    found[np.ix_(ranks, np.searchsorted(study.step_numbers, steps))] = told
    return found


def sent_alike(study: Study, dimension: Dimension, every: Float) -> bool:
    """Whether all ranks of each team send as much in every step, by what each exchanges, [R, S, K]: then who exchanges
    more got more. Teams that lack a rank do not tell, where others do not: all but that one may get more."""
    teams = [places for places in places_of_teams(study, dimension) if len(places) > 1]
    whole = [places for places in teams if len(places) == max(map(len, teams))]
    return all(bool(is_sent(large(every)[places].min(axis=0)).all()) for places in whole)


def _received(study: Study, dimension: Dimension, every: Float) -> Float:
    """What came in each exchange, [R, S, K], where all ranks of a team send as much. Where less came than was sent,
    only the latter is seen. These ranks share evenly what others have left: in all as much comes as is sent."""
    found, chosen = every.copy(), _is_large(every)
    for team, places in zip(dimension.teams, places_of_teams(study, dimension), strict=True):
        if len(places) < 2:
            continue
        mine = every[places]
        least = mine.min(axis=0)
        sent = np.where(is_sent(least), least.mean(axis=0), mine.min(axis=(0, 1)))  # of a team that lacks a rank
        more = mine > sent * (1 + SENT_ALIKE)
        left = np.clip(len(team) * sent - np.where(more, mine, 0.0).sum(axis=0), 0.0, None)
        others = np.maximum(len(team) - more.sum(axis=0), 1)
        found[places] = np.where(more | ~chosen, mine, np.minimum(left / others, sent))
    return found


def is_sent(least: Float) -> Bool:
    """Of exchanges, [S, K], whether the smallest of each step is what every rank sends, [K]."""
    found: Bool = least.std(axis=0) <= SENT_ALIKE * least.mean(axis=0)
    return found


def large(every: Float) -> Float:
    """Of exchanges, [R, S, K], those that are not small beside others, such as how many tokens will come."""
    found: Float = every[..., _is_large(every)]
    return found


def _is_large(every: Float) -> Bool:
    """Which these are, [K]."""
    size = every.mean(axis=(0, 1))
    found: Bool = size >= SMALL * size.max()
    return found


def _apart(study: Study, dimension: Dimension, each: Float) -> float:
    """`Routed.spread` of single exchanges, by their bytes."""
    teams = [each[places] for places in places_of_teams(study, dimension) if len(places) > 1]
    return max(
        (float((np.ptp(of, axis=0).sum(-1) / np.maximum(of.mean(axis=0).sum(-1), 1.0)).mean()) for of in teams),
        default=0.0,
    )


def _exchange_before(structure: Structure, thread: int, groups: Collection[str], count: int) -> Int | None:
    """Which exchange each piece of a thread's program comes after, [W]; -1: none. None where its step has not `count`
    of them that it waits for."""
    tasks = [
        c for c, task in enumerate(structure.tasks)
        if task.lane in groups and task.kind.partition(" ")[0] == EXCHANGE and (thread, c) in structure.first_waits
    ]  # fmt: skip
    if len(tasks) != count:
        return None
    mine = structure.of_thread(thread)
    waits = np.maximum.accumulate([structure.first_waits[thread, c] - mine.start for c in tasks])
    found: Int = np.searchsorted(waits, np.arange(mine.stop - mine.start), "right") - 1
    return found


def exchanges(routed: Routed) -> Float:
    """Bytes that each rank exchanges in a step, [R, S, K]: in each large exchange, or, K being 1, in all together."""
    return routed.shares[..., None] if routed.each is None else large(routed.each)


def places_of_teams(study: Study, dimension: Dimension) -> list[list[int]]:
    """Of each team the rows that its captured ranks have in [R, S]."""
    place_of = {rank: place for place, rank in enumerate(study.ranks)}
    return [sorted(place_of[rank] for rank in team if rank in place_of) for team in dimension.teams]


def _follows_input(study: Study, dimension: Dimension, beyond: Float) -> bool:
    """Whether ranks exchange more since their inputs are larger."""
    sizes = study.input_sizes
    if sizes is None:
        return False
    given = np.zeros_like(beyond)
    for places in places_of_teams(study, dimension):
        if places:
            given[places] = sizes[places] - sizes[places].mean(axis=0)
    both = float((given**2).sum() * (beyond**2).sum())
    return both > 0 and float((given * beyond).sum()) >= BY_INPUT * both**0.5
