"""Each forward and backward of a micro-batch on one rank: when it was, and what it computed."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from ..arrays import Bool, Int
from ..budget.step_budget import RankTime
from ..columns import RankRows, as_rows

PASS_COLUMNS: Final = ("rank", "step", "stage", "micro", "name", "start_ns", "dur_ns", "own_ns")
"""own_ns: of `dur_ns` what is compute, and no waiting for others or pause."""
FORWARD: Final = "F"
BACKWARD: Final = "B"
WEIGHTS: Final = "W"
NAMES: Final = pd.CategoricalDtype(pd.Index([BACKWARD, FORWARD, WEIGHTS], dtype=object))
FORWARDS, BACKWARDS = "forward", "backward"
"""Names of phases."""


def find_passes(rows: pd.DataFrame | RankRows, time: RankTime) -> pd.DataFrame:
    """PASS_COLUMNS of the actions of a pipeline's schedule; without one, of the training thread's forwards with
    gradients and backwards, of which `micro` counts those of a step and `stage` is 0. `rows`: of one rank."""
    rows = as_rows(rows)
    acts = rows.are("kind", "pipe") & rows.known("dur_ns") & rows.known("stage") & rows.known("microbatch")
    there = np.flatnonzero(acts & rows.are("name", FORWARD, BACKWARD, WEIGHTS))
    step = rows.whole("step")
    if len(there):
        name = rows.words("name", there)
        stage, micro = rows.whole("stage")[there], rows.whole("microbatch")[there]
    else:
        phases = rows.are("kind", "phase") & rows.are("lane", "main") & rows.known("dur_ns")
        forward = rows.are("name", FORWARDS)
        trains = (forward & rows.true("grad", missing=True)) | rows.are("name", BACKWARDS)
        there = np.flatnonzero(phases & trains)
        forward = forward[there]
        name = np.where(forward, FORWARD, BACKWARD).astype(object)
        stage, micro = np.zeros(len(there), np.int64), _place_in_step(step[there], forward)
    start, length = rows.whole("start_ns")[there], rows.whole("dur_ns")[there]
    own = time.of_part("compute", start + length) - time.of_part("compute", start)
    return pd.DataFrame(
        {
            "rank": rows.whole("rank")[there].astype(np.int32),
            "step": step[there].astype(np.int32),
            "stage": stage.astype(np.int16),
            "micro": micro.astype(np.int32),
            "name": pd.Categorical(name, dtype=NAMES),
            "start_ns": start,
            "dur_ns": length,
            "own_ns": own,
        },
        copy=False,
    )


def _place_in_step(step: Int, forward: Bool) -> Int:
    """How many of its kind the step had before each."""
    kind = 2 * step + forward
    order = np.argsort(kind, kind="stable")
    begins = np.flatnonzero(np.append(True, np.diff(kind[order]) != 0)[: len(order)])
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order)) - np.repeat(begins, np.diff(np.append(begins, len(order))))
    return place
