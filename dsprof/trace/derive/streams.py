"""What a device's streams did, of events on them: their clock aligned with the host's, what each of their waits was
for, and where the stream waited for DDP's reducer.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd
from pandas.arrays import IntegerArray

from dsprof.schema import BACKWARD_DONE, DEVICE_CLOCK

from .rows import Int, ends, present, texts
from .waits import backward_waits

Float = npt.NDArray[np.float64]

SEGMENT_NS: Final = 20_000_000_000
"""The clocks are compared once in so long: in that time they drift apart by a fraction of a millisecond at most."""
TIGHTEST: Final = 0.25
"""Share of a segment's samples that counts: those that tell the difference best."""
NAMED_BY: Final = ("name", "group", "seq", "peer", "tag", "module", "purpose", "stage", "microbatch")
"""What a wait of a stream takes over from the host's record of it."""


def align_clock(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with the times of a device's streams on the host's clock, and without the samples that tell it."""
    sampled = (texts(rows, "kind") == "gauge") & (texts(rows, "name") == DEVICE_CLOCK)
    if not sampled.any():
        return rows
    timed = (rows["device"] & rows["dur_ns"].notna()).to_numpy(bool)
    when, offset, _ = clock_offsets(rows[sampled])
    rows = rows[~sampled].reset_index(drop=True)
    timed = timed[~sampled]
    start, end = rows["start_ns"].to_numpy(np.int64)[timed], ends(rows)[timed]
    started, ended = (at + np.rint(np.interp(at, when, offset)).astype(np.int64) for at in (start, end))
    rows.loc[timed, "start_ns"] = started
    rows.loc[timed, "dur_ns"] = pd.array(np.maximum(ended - started, 0), "Int64")
    return rows


def with_arrivals(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with `arrival_ns`: a device's communication begins for its rank when its stream has got to it, a host's
    when what runs it has taken it: until then its workers were busy with others."""
    device = rows["device"].to_numpy(bool)
    begins = np.where(device, present(rows, "dur_ns"), rows["taken"].to_numpy(bool)) & (texts(rows, "kind") == "comm")
    return rows.assign(arrival_ns=IntegerArray(rows["start_ns"].to_numpy(np.int64).copy(), ~begins))


def clock_offsets(samples: pd.DataFrame) -> tuple[Float, Float, float]:
    """What to add to a device's times (ns) at some of them, in order, and how far off that may be, ns.

    A sample says that it was `value` on the device at some time from `start_ns` to `start_ns + dur_ns`.
    """
    device = samples["value"].to_numpy(np.float64)
    early = samples["start_ns"].to_numpy(np.float64) - device
    width = samples["dur_ns"].fillna(0).to_numpy(np.float64)
    when, offset, doubt = [], [], []
    segment = ((device - device.min()) // SEGMENT_NS).astype(np.int64)
    for number in np.unique(segment):
        mine = np.flatnonzero(segment == number)
        best = mine[np.argsort(width[mine], kind="stable")][: max(1, int(len(mine) * TIGHTEST))]
        # No sample of these can be contradicted by another one, but for the drift in between.
        low, high = early[best].max(), (early[best] + width[best]).min()
        when.append(float(np.median(device[best])))
        offset.append((low + high) / 2 if low <= high else float(np.median(early[best] + width[best] / 2)))
        doubt.append(abs(high - low) / 2)
    return np.array(when), np.array(offset), float(np.median(doubt))


def stream_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of streams (phases, as kernels, and waits), with what the waits were for and those for DDP's reducer."""
    of_streams = rows["device"].to_numpy(bool) & (texts(rows, "kind") != "comm")
    if not of_streams.any():
        return rows[:0]
    found = rows[of_streams].reset_index(drop=True)
    _name_waits(found, rows[~of_streams])
    communications = rows[rows["device"] & (rows["kind"] == "comm")]
    # On its stream a communication is issued when the stream gets to it.
    communications = communications.assign(issue_ns=communications["start_ns"].astype("Int64"), host_ns=pd.NA)
    communications["host_ns"] = communications["host_ns"].astype("Int64")
    there = pd.concat([found, communications], ignore_index=True).assign(device=False)
    kernel = there["kind"] == "kernel"
    there.loc[kernel, "kind"] = "phase"
    there.loc[kernel & (there["name"] == BACKWARD_DONE), "kind"] = "mark"
    found = found[found["name"] != BACKWARD_DONE]
    return pd.concat([found, backward_waits(there)], ignore_index=True)


def _name_waits(found: pd.DataFrame, host: pd.DataFrame) -> None:
    """In place: a wait of a stream bears the moment of the host's wait, or of the communication it runs itself."""
    waits = found.index[found["kind"] == "wait"]
    named = host[host["kind"].isin(["wait", "comm"]) & host["group"].notna()]
    moment: Int = named["start_ns"].where(named["kind"] == "wait", named["issue_ns"]).to_numpy(np.int64, na_value=-1)
    of = {key: at for at, key in enumerate(zip(named["thread"].tolist(), moment.tolist(), strict=True))}
    keys = zip(found["thread"][waits].tolist(), found["issue_ns"][waits].tolist(), strict=True)
    at = np.array([of.get(key, -1) for key in keys], np.int64)
    known = at >= 0
    for column in NAMED_BY:
        found.loc[waits[known], column] = named[column].array[at[known]]
