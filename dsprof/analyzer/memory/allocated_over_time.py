"""What a recorded history of a device's allocator tells: what was in use over time, and what the peak was made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from dsprof.trace import Memory
from dsprof.trace.memory import NO_STACK

from ..arrays import Float, Int
from .allocator_state import Holder, holders_of, sites_of

SIGNS: Final = {"alloc": 1, "free_requested": -1}


@dataclass(frozen=True)
class AllocationHistory:
    """One device's, [E] allocations and frees of tensors, in the order in which they came.

    seconds: since the first of them, [E]
    in_use:  bytes that tensors asked for and have not freed, after each, [E]
    peak:    the event after which most was in use
    holders: what was in use then, by the line of the script that allocated it, largest first
    """

    seconds: Float
    in_use: Int
    peak: int
    holders: tuple[Holder, ...]


def allocation_history(memory: Memory, device: int) -> AllocationHistory | None:
    """None where no history was recorded. What was allocated before it began, or was freed without that it tells when
    it was allocated, has no stack unless it is still in use in the end."""
    events = memory.history[(memory.history["device"] == device) & memory.history["action"].isin(list(SIGNS))]
    if events.empty:
        return None
    of_device = memory.segments["device"].to_numpy(np.int64)[memory.blocks["segment"].to_numpy(np.int64)] == device
    last = memory.blocks[of_device & (memory.blocks["state"] == "allocated").to_numpy(bool)]
    sign = events["action"].astype(object).map(SIGNS).to_numpy(np.int64)
    size, address = events["bytes"].to_numpy(np.int64), events["address"].to_numpy(np.int64)
    change = sign * size
    in_use = int(last["requested"].sum()) - int(change.sum()) + np.cumsum(change)
    peak = int(in_use.argmax())
    order = pd.Series(np.arange(len(events)))
    by_address = order.groupby(address)
    before = by_address.shift(1).isna().to_numpy(bool)
    following = by_address.shift(-1).fillna(len(events)).to_numpy(np.int64)
    at = order.to_numpy(np.int64)
    begun = (sign > 0) & (at <= peak) & (following > peak)
    unseen = (sign < 0) & before & (at > peak)
    kept = last[~last["address"].isin(np.unique(address)).to_numpy(bool)]
    live = pd.concat([
        pd.DataFrame({"stack": events["stack"].to_numpy(np.int64)[begun], "bytes": size[begun]}),
        pd.DataFrame({"stack": NO_STACK, "bytes": size[unseen]}),
        pd.DataFrame({"stack": kept["stack"].to_numpy(np.int64), "bytes": kept["requested"].to_numpy(np.int64)}),
    ])  # fmt: skip
    held = {int(stack): (int(of.sum()), len(of)) for stack, of in live.groupby("stack")["bytes"]}
    seconds = events["time_us"].to_numpy(np.float64)
    return AllocationHistory(
        (seconds - seconds[0]) / 1e6, in_use, peak, tuple(holders_of(held, sites_of(memory.stacks)))
    )
