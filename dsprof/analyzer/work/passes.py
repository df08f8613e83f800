"""Each forward and backward of a micro-batch on one rank: when it was, and what it computed."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from ..budget.step_budget import RankTime

PASS_COLUMNS: Final = ("rank", "step", "stage", "micro", "name", "start_ns", "dur_ns", "own_ns")
"""own_ns: of `dur_ns` what is compute, and no waiting for others or pause."""
FORWARD: Final = "F"
BACKWARD: Final = "B"
WEIGHTS: Final = "W"


def find_passes(rows: pd.DataFrame, time: RankTime) -> pd.DataFrame:
    """PASS_COLUMNS of the actions of a pipeline's schedule; without one, of the training thread's forwards with
    gradients and backwards, of which `micro` counts those of a step and `stage` is 0. `rows`: of one rank."""
    columns = ["rank", "step", "name", "stage", "start_ns", "dur_ns"]
    acted = rows[[*columns, "microbatch"]].take(np.flatnonzero(rows["kind"] == "pipe"))
    if len(acted):
        acted = acted[acted[["dur_ns", "stage", "microbatch"]].notna().all(axis=1)]
        acted = acted[acted["name"].isin([FORWARD, BACKWARD, WEIGHTS])]
    if len(acted):
        found = acted.assign(micro=acted["microbatch"], name=acted["name"].astype(str))
    else:
        there = np.flatnonzero((rows["kind"] == "phase") & (rows["lane"] == "main"))
        phases = rows[[*columns, "grad"]].take(there)
        phases = phases[phases["dur_ns"].notna()]
        forward = (phases["name"] == "forward") & phases["grad"].fillna(True).astype(bool)
        found = phases[forward | (phases["name"] == "backward")]
        found = found.assign(name=np.where(found["name"] == "forward", FORWARD, BACKWARD), stage=0)
        found = found.assign(micro=found.groupby(["step", "name"]).cumcount())
    start, length = found["start_ns"].to_numpy(np.int64), found["dur_ns"].to_numpy(np.int64)
    own = time.before(start + length)["compute"] - time.before(start)["compute"]
    whole = ["rank", "step", "stage", "micro", "dur_ns"]
    found = found.assign(own_ns=own)[list(PASS_COLUMNS)].astype(dict.fromkeys(whole, "int64"))
    return found.reset_index(drop=True)
