"""Each forward and backward of a micro-batch on one rank: when it was, and what it computed."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from ..arrays import Bool, Int
from ..budget.step_budget import RankTime
from ..columns import is_one_of

PASS_COLUMNS: Final = ("rank", "step", "stage", "micro", "name", "start_ns", "dur_ns", "own_ns")
"""own_ns: of `dur_ns` what is compute, and no waiting for others or pause."""
FORWARD: Final = "F"
BACKWARD: Final = "B"
WEIGHTS: Final = "W"
FORWARDS, BACKWARDS = "forward", "backward"
"""Names of phases."""


def find_passes(rows: pd.DataFrame, time: RankTime) -> pd.DataFrame:
    """PASS_COLUMNS of the actions of a pipeline's schedule; without one, of the training thread's forwards with
    gradients and backwards, of which `micro` counts those of a step and `stage` is 0. `rows`: of one rank."""
    columns = ["rank", "step", "name", "stage", "start_ns", "dur_ns"]
    acted = rows[[*columns, "microbatch"]].take(np.flatnonzero(is_one_of(rows["kind"], "pipe")))
    if len(acted):
        acted = acted[acted[["dur_ns", "stage", "microbatch"]].notna().all(axis=1)]
        acted = acted[acted["name"].isin([FORWARD, BACKWARD, WEIGHTS])]
    if len(acted):
        stage, micro = (acted[name].to_numpy(np.int64) for name in ("stage", "microbatch"))
        name = acted["name"].astype(str).reset_index(drop=True)
        found = acted
    else:
        acts = is_one_of(rows["kind"], "phase") & is_one_of(rows["lane"], "main")
        forward = is_one_of(rows["name"], FORWARDS)
        there = np.flatnonzero(acts & (forward | is_one_of(rows["name"], BACKWARDS)))
        phases = rows[[*columns[:3], *columns[4:], "grad"]].take(there)
        forward = forward[there]
        trains = ~forward | phases["grad"].to_numpy(bool, na_value=True)
        chosen = np.flatnonzero(phases["dur_ns"].notna().to_numpy(bool) & trains)
        found, forward = phases.take(chosen), forward[chosen]
        name = pd.Series(np.where(forward, FORWARD, BACKWARD), dtype=str)
        stage, micro = np.zeros(len(found), np.int64), _place_in_step(found["step"].to_numpy(np.int64), forward)
    start, length = found["start_ns"].to_numpy(np.int64), found["dur_ns"].to_numpy(np.int64)
    whole = {column: found[column].to_numpy(np.int64) for column in ("rank", "step")}
    own = time.of_part("compute", start + length) - time.of_part("compute", start)
    return pd.DataFrame(
        {**whole, "stage": stage, "micro": micro, "name": name, "start_ns": start, "dur_ns": length, "own_ns": own}
    )


def _place_in_step(step: Int, forward: Bool) -> Int:
    """How many of its kind the step had before each."""
    kind = 2 * step + forward
    order = np.argsort(kind, kind="stable")
    begins = np.flatnonzero(np.append(True, np.diff(kind[order]) != 0)[: len(order)])
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order)) - np.repeat(begins, np.diff(np.append(begins, len(order))))
    return place
