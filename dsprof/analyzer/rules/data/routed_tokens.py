"""Tokens that go to the ranks of their experts: which rank gets more of them, and what that makes it compute.

A rank whose expert is asked more often computes longer. That is neither its input's doing, so no other sampler mends
it, nor the rank's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ...align.groups import Dimension
from ...arrays import Float
from ...study import Study, once
from ...text import percent

LEAST_UNEQUAL: Final = 0.05
"""Of the mean of a team: shares that differ by less are equal."""

BY_INPUT: Final = 0.7
"""Correlation of what ranks exchange, and what they were given as input, beyond the mean of their team: from this on it
is the input that differs."""


@dataclass(frozen=True)
class Routed:
    """dimension: in which tokens are exchanged
    beyond:    bytes that each rank exchanges in a step, beyond the mean of its team, [R, S] over the ordinary steps
    spread:    the largest share less the smallest, of the mean: mean over steps, of the most unequal team
    shares:    bytes that each rank exchanges in a step, [R, S]
    """

    dimension: Dimension
    beyond: Float
    spread: float
    shares: Float

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
        if spread > most and not _follows_input(study, dimension, beyond):
            found = Routed(dimension, beyond, spread, wide)
    return found


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
