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
from ...arrays import Float, Int
from ...graph.step_graph import Structure
from ...study import Study, once
from ...text import percent

LEAST_UNEQUAL: Final = 0.05
"""Of the mean of a team: shares that differ by less are equal."""
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
               rank gets more, and `spread` is that of single ones; None: whole steps tell
    """

    dimension: Dimension
    beyond: Float
    spread: float
    shares: Float
    each: Float | None = None

    def of_pieces(self, structure: Structure, threads: list[int], places: list[int], at: Int) -> tuple[Float, Float]:
        """Of ranks of a team, what each exchanges beyond the mean of the team, and in all, [N, W, S], for each of the W
        pieces of its program: in the exchange before it, or in the whole step.

        threads: which of the graph's they are; places: in [R, ..]; at: [S] in [.., S, ..]"""
        beyond, shares = self.beyond[places][:, at], self.shares[places][:, at]
        if self.each is not None:
            after = _exchange_before(structure, threads[0], self.dimension.groups, self.each.shape[2])
            if after is not None:
                every = np.moveaxis(self.each[places][:, at], 2, 1)
                every = np.concatenate([every, np.zeros_like(every[:, :1])], axis=1)[:, after]  # -1: before the first
                return every - every.mean(axis=0), every
        return beyond[:, None, :], shares[:, None, :]

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
        single = _each(study, dimension, mine)
        apart = 0.0 if single is None else _apart(study, dimension, single)
        if apart > max(most, MORE_UNEQUAL * spread):
            found = Routed(dimension, beyond, apart, wide, single)
        elif spread > most and not _follows_input(study, dimension, beyond):
            found = Routed(dimension, beyond, spread, wide)
    return found


def _each(study: Study, dimension: Dimension, exchanged: pd.DataFrame) -> Float | None:
    """Bytes of each exchange of a dimension, [R, S, K]; None where not all ranks and steps have as many, or each rank
    is in several of its groups."""
    count = int(exchanged["place"].max()) + 1
    if count < 2 or exchanged.groupby(["rank", "step"])["group"].nunique().max() > 1:
        return None
    ranks = np.flatnonzero(np.isin(study.ranks, exchanged["rank"].unique()))
    if len(exchanged) != len(ranks) * len(study.step_numbers) * count:
        return None
    exchanged = exchanged.sort_values(["rank", "step", "place"])
    found = np.zeros((len(study.ranks), len(study.step_numbers), count))
    found[ranks] = exchanged["bytes"].to_numpy(np.float64).reshape(len(ranks), -1, count)
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
    """Bytes that each rank exchanges in a step, [R, S, K]: in each exchange, or, K being 1, in all together."""
    return routed.shares[..., None] if routed.each is None else routed.each


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
