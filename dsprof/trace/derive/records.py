"""Records as rows of the table: ids turned to names, and the fields that do not apply to null."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.schema import DTYPES, NO_SEQ, Flag, Kind, State

from ..capture import Capture

WAITS_NAMED: Final = 3
"""The first format in which a wait names what it waited for, a forward says whether gradients were on, and a
collective with a root names it."""
ROOTED: Final = ("broadcast", "reduce", "gather", "scatter")
"""Collectives with a root."""


def measured_rows(capture: Capture) -> pd.DataFrame:
    """A row a record, with the columns of `rows.GIVEN`."""
    records = capture.records
    kind, flags = records["kind"], records["flags"]
    names = np.array([None] * (max(capture.names, default=0) + 1), dtype=object)
    for number, text in capture.names.items():
        names[number] = text
    name = names[records["name"]]
    kinds = np.array([None, *(item.name.lower() for item in Kind)], dtype=object)
    comm, wait = kind == Kind.COMM, kind == Kind.WAIT
    engine, p2p = (flags & Flag.ENGINE) != 0, (flags & Flag.P2P) != 0
    recent = capture.format_version >= WAITS_NAMED
    of_group = comm | wait | ~engine
    known = (records["seq"] != NO_SEQ) & (comm | (wait & (engine | (recent & (records["group"] != 0)))))
    rooted = comm & ~engine & ~p2p & recent & (records["peer"] >= 0) & np.isin(name, ROOTED)
    forward = (kind == Kind.PHASE) & (name == "forward") & recent
    place = np.where(engine, records["peer"], 0)
    ended = records["end_ns"] > 0
    value = records["aux"].copy().view(np.float64)

    def column(values: npt.NDArray[np.generic], applies: npt.NDArray[np.bool_]) -> pd.Series[int]:
        return pd.Series(pd.array(values.astype(np.int64), "Int64")).where(applies)

    # A finished record without an end (a GPU collective) took a time nobody measured: null, like one never ended.
    return pd.DataFrame(
        {
            "kind": kinds[kind],
            "name": name,
            "lane": names[np.where(of_group, 0, records["group"])],
            "thread": records["thread"].astype(np.int64),
            "start_ns": records["start_ns"],
            "dur_ns": column(records["end_ns"] - records["start_ns"], ended),
            "issue_ns": column(records["aux"], comm),
            "host_ns": column(records["host_ns"], comm & ~engine),
            "group": names[np.where(of_group, records["group"], 0)],
            "engine": engine,
            "stage": column(place >> 16, engine),
            "microbatch": column(place & 0xFFFF, engine),
            "module": names[np.where(engine & ~p2p, records["tag"], 0)],
            "purpose": names[np.where(engine, records["host_ns"], 0)],
            "seq": column(records["seq"], known),
            "peer": column(np.where(engine, records["tag"], records["peer"]), p2p),
            "tag": column(records["tag"], p2p & ~engine),
            "root": column(records["peer"], rooted),
            "bytes": column(records["bytes"], records["bytes"] >= 0),
            "dtype": np.array([None, *DTYPES[1:]], dtype=object)[records["dtype"]],
            "value": np.where(comm | (records["aux"] == 0), np.nan, value + 0.0),
            "grad": pd.Series(pd.array((flags & Flag.GRAD) != 0, "boolean")).where(forward),
            "source": "measured",
            "ended": records["state"] == State.DONE,
        }
    )
