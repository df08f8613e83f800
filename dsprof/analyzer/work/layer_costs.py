"""What each layer of the engine's pipelines takes, for dividing them among stages."""

from __future__ import annotations

from typing import Final, TypedDict

import numpy as np
import pandas as pd

from dsprof.schema import SHARDING
from dsprof.trace.load import Columns

from ..columns import RankRows


class LayerCost(TypedDict):
    """One layer, in the form that `dsprof.engine.partition.read_costs` reads."""

    name: str
    forward_s: float
    backward_s: float


NEEDED: Final = ("step", "kind", "name", "start_ns", "dur_ns", "stage")


def staged_rows(rows: RankRows) -> Columns:
    """What is of a stage: layers and actions, with the columns NEEDED."""
    of_stages = rows.known("stage") & rows.are("kind", "module", "pipe") & ~rows.are("name", SHARDING)
    return rows.take_arrays(NEEDED, np.flatnonzero(of_stages))


def layer_costs(rows: pd.DataFrame) -> list[LayerCost]:
    """Seconds of each layer for one micro-batch, in the model's order; empty without a pipeline of the engine.

    Forwards are medians over ranks, steps after the first, and micro-batches. Backwards are not seen layer by layer: a
    stage's (B and W together) is divided as its forward is.
    """
    done = rows[rows["dur_ns"].notna() & rows["stage"].notna() & (rows["step"] >= 0)]
    later = done[done["step"] > done["step"].min()]
    done = done if later.empty else later
    layers, pipe = done[done["kind"] == "module"], done[done["kind"] == "pipe"]
    found: list[LayerCost] = []
    for stage in sorted(layers["stage"].unique()):
        mine = layers[layers["stage"] == stage]
        actions = pipe[pipe["stage"] == stage].groupby(pipe["name"].astype(str))["dur_ns"].median()
        if "F" not in actions or not actions["F"]:
            continue
        back = float(actions.get("B", 0) + actions.get("W", 0)) / float(actions["F"])
        taken = mine.groupby(mine["name"].astype(str))["dur_ns"].median().astype(float).to_dict()
        first = mine.sort_values("start_ns").drop_duplicates("name")["name"].astype(str)
        found += [LayerCost(name=n, forward_s=taken[n] / 1e9, backward_s=back * taken[n] / 1e9) for n in first]
    return found
