"""What is kept of the arrivals of all ranks, beside the communications that were matched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from dsprof.live.waiting import Stall
from dsprof.run import RunInfo

from ..arrays import Bool
from ..columns import RankRows, as_rows
from .groups import EXCHANGE, Mesh, find_mesh
from .numbering import mismatches
from .progress import Progress, find_progress, first_disagreement
from .topology import Topology

EXCHANGED: Final = ("rank", "step", "group", "place", "bytes")
MOST_EXCHANGES: Final = 2_000_000
"""Of all ranks together, that are kept one by one."""


@dataclass(frozen=True)
class Communicated:
    """mesh:         the dimensions that like process groups form
    mismatches:   warnings of communications that ranks disagree about, or that could not be matched
    disagreement: the first collective that is not the same on all ranks
    progress:     how far each rank was when its capture ended
    exchanged:    EXCHANGED, bytes that each rank exchanged all-to-all in a group in a step, exchange by exchange in
                  their order, `place`; together, -1, where all are more than MOST_EXCHANGES
    nothing:      whether no rank communicated
    """

    mesh: Mesh
    mismatches: tuple[str, ...]
    disagreement: Stall | None
    progress: Progress
    exchanged: pd.DataFrame
    nothing: bool


def summarize_arrivals(arrivals: pd.DataFrame | RankRows, run: RunInfo, topology: Topology) -> Communicated:
    """Of the arrivals of all ranks, aligned (`align.aligned.align`)."""
    rows = as_rows(arrivals)
    communicates = rows.are("kind", "comm")
    return Communicated(
        mesh=find_mesh(rows, run, topology),
        mismatches=tuple(mismatches(rows, run)),
        disagreement=first_disagreement(rows),
        progress=find_progress(rows, run),
        exchanged=_exchanged(rows, communicates & rows.are("name", EXCHANGE)),
        nothing=not communicates.any(),
    )


def _exchanged(rows: RankRows, exchanges: Bool) -> pd.DataFrame:
    """Of steps: not what is exchanged before the first."""
    chosen = exchanges & rows.known("group") & (rows.whole("step", -1) >= 0)
    wanted = ("rank", "step", "group", "seq", "bytes")
    table = rows.take(wanted, np.flatnonzero(chosen)).astype({"group": str, "bytes": "float64"})
    of_step = ["rank", "step", "group"]
    if len(table) > MOST_EXCHANGES:
        return table.groupby(of_step, as_index=False)["bytes"].sum().assign(place=-1)[list(EXCHANGED)]
    table = table.sort_values([*of_step, "seq"], kind="stable", ignore_index=True)
    place = table.groupby(of_step).cumcount().to_numpy(np.int64) if len(table) else np.empty(0, np.int64)
    return table.assign(place=place)[list(EXCHANGED)]
