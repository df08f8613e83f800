"""What a communication is for, as far as its place tells."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import pandas as pd

from .rows import ends

REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")


def purposes(rows: pd.DataFrame, facts: Collection[str]) -> pd.Series[str]:
    """Purpose of each row: as the engine says; else, of a collective, by where it was issued; else null.

    facts: kinds of facts that the rank stated. Reductions issued inside backward carry gradients. With FSDP, what is
    gathered in forward or backward is parameters; with DDP, what is broadcast in forward is buffers.
    """
    comm = rows["kind"] == "comm"
    purpose = pd.Series(None, index=rows.index, dtype=object)
    purpose[comm] = "other"
    purpose[comm & (rows["name"] == "barrier")] = "barrier"
    forward, backward = (_issued_in(rows, phase) for phase in ("forward", "backward"))
    if "ddp" in facts:
        purpose[comm & forward & (rows["name"] == "broadcast")] = "buffer"
    if "fsdp" in facts:
        purpose[comm & (forward | backward) & (rows["name"] == "all_gather")] = "parameter"
    purpose[comm & backward & rows["name"].isin(REDUCTIONS)] = "gradient"
    return rows["purpose"].fillna(purpose)


def _issued_in(rows: pd.DataFrame, phase: str) -> npt.NDArray[np.bool_]:
    """Which rows were issued in a phase of this name, of any thread. One that never ended lasts for good."""
    phases = rows[(rows["kind"] == "phase") & (rows["name"] == phase)].sort_values("start_ns")
    if phases.empty:
        return np.zeros(len(rows), bool)
    end = np.where(phases["dur_ns"].isna(), np.iinfo(np.int64).max, ends(phases))
    when = rows["issue_ns"].fillna(0).to_numpy(np.int64)
    at = np.searchsorted(phases["start_ns"].to_numpy(np.int64), when, side="right") - 1
    inside: npt.NDArray[np.bool_] = (at >= 0) & (when <= end[at])
    return inside
