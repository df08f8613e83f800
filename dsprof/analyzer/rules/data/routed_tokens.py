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


@dataclass(frozen=True)
class Routed:
    """dimension: in which tokens are exchanged
    beyond:    bytes that each rank exchanges in a step, beyond the mean of its team, [R, S] over the ordinary steps
    spread:    the largest share less the smallest, of the mean: mean over steps, of the most unequal team
    """

    dimension: Dimension
    beyond: Float
    spread: float

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
    """None where no tokens are exchanged, or all ranks of a group get as many."""
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
        for team in dimension.teams:
            places = [place for place, rank in enumerate(study.ranks) if rank in team]
            if len(places) < 2:
                continue
            mean = wide[places].mean(axis=0)
            beyond[places] = wide[places] - mean
            spread = max(spread, float((np.ptp(wide[places], axis=0) / np.maximum(mean, 1.0)).mean()))
        if spread > LEAST_UNEQUAL and (found is None or spread > found.spread):
            found = Routed(dimension, beyond, spread)
    return found


@once
def explained_by_tokens(study: Study) -> Float | None:
    """The part of each rank's compute that its share of the tokens explains: ms above (+) or below (-) what an equal
    share would cost, [R, S]; None where shares are equal. Compute is taken as linear in them."""
    routed = routed_tokens(study)
    if routed is None:
        return None
    compute, beyond = study.work("compute"), routed.beyond
    mine = np.zeros_like(compute)
    for team in routed.dimension.teams:
        places = [place for place, rank in enumerate(study.ranks) if rank in team]
        mine[places] = compute[places] - compute[places].mean(axis=0)
    slope = float((beyond * mine).sum() / max(float((beyond**2).sum()), 1e-9))
    return np.minimum(max(slope, 0.0) * beyond, 0.95 * compute)
