"""What a device's streams did, of events on them: what each of their waits was for, and where the stream waited for
DDP's reducer.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd
from pandas.arrays import IntegerArray

from dsprof.schema import BACKWARD_DONE

from .rows import Int, present, texts
from .waits import backward_waits

NAMED_BY: Final = ("name", "group", "seq", "peer", "tag", "module", "purpose", "stage", "microbatch")
"""What a wait of a stream takes over from the host's record of it."""


def with_arrivals(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with `arrival_ns`: a device's communication begins for its rank when its stream has got to it, a host's
    when what runs it has taken it: until then its workers were busy with others."""
    device = rows["device"].to_numpy(bool)
    begins = np.where(device, present(rows, "dur_ns"), rows["taken"].to_numpy(bool)) & (texts(rows, "kind") == "comm")
    return rows.assign(arrival_ns=IntegerArray(rows["start_ns"].to_numpy(np.int64).copy(), ~begins))


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
