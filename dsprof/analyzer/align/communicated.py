"""What is kept of the arrivals of all ranks, beside the communications that were matched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pandas as pd

from dsprof.live.waiting import Stall
from dsprof.run import RunInfo

from .groups import EXCHANGE, Mesh, find_mesh
from .numbering import mismatches
from .progress import Progress, communications, find_progress, first_disagreement
from .topology import Topology

EXCHANGED: Final = ("rank", "step", "group", "bytes")


@dataclass(frozen=True)
class Communicated:
    """mesh:         the dimensions that like process groups form
    mismatches:   warnings of communications that ranks disagree about, or that could not be matched
    disagreement: the first collective that is not the same on all ranks
    progress:     how far each rank was when its capture ended
    exchanged:    EXCHANGED, bytes that each rank exchanged all-to-all in a group in a step
    nothing:      whether no rank communicated
    """

    mesh: Mesh
    mismatches: tuple[str, ...]
    disagreement: Stall | None
    progress: Progress
    exchanged: pd.DataFrame
    nothing: bool


def summarize_arrivals(arrivals: pd.DataFrame, run: RunInfo, topology: Topology) -> Communicated:
    """Of the arrivals of all ranks, aligned (`align.aligned.align`)."""
    communicates = arrivals["kind"] == "comm"
    exchanges = communicates & (arrivals["name"] == EXCHANGE)
    exchanged = arrivals.loc[exchanges, list(EXCHANGED)].astype({"group": str, "bytes": "float64"})
    mesh, differing = find_mesh(arrivals, run, topology), tuple(mismatches(arrivals, run))
    numbered = communications(arrivals)
    ranks = tuple(int(one) for one in arrivals["rank"].unique())
    return Communicated(
        mesh=mesh,
        mismatches=differing,
        disagreement=first_disagreement(numbered),
        progress=find_progress(numbered, ranks, run),
        exchanged=exchanged.groupby(["rank", "step", "group"], as_index=False)["bytes"].sum(),
        nothing=not communicates.any(),
    )
