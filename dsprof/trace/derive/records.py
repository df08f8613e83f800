"""Records as rows of the table: ids turned to names, and the fields that do not apply to null."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd
from pandas.arrays import BooleanArray, IntegerArray

from dsprof.ondisk import Flag, State
from dsprof.schema import CAPTURE_GAP, DTYPES, SHARDING, Kind

from ..capture import Capture

ROOTED: Final = ("broadcast", "reduce", "gather", "scatter")
"""Collectives with a root."""
NAMED_APART: Final = 4
"""The first format in which what FSDP2 does for a unit cannot be taken for a module."""


def measured_rows(capture: Capture) -> pd.DataFrame:
    """A row a record, with the columns of `rows.GIVEN`, and one for each gap between them."""
    rows = _rows(capture)
    gaps = _gap_rows(capture) if capture.gaps else ()
    return pd.concat([rows, gaps], ignore_index=True) if len(gaps) else rows


def _gap_rows(capture: Capture) -> pd.DataFrame:
    start = capture.records["start_ns"]
    found = []
    for gap in capture.gaps:
        if not 0 < gap.before < len(start):
            continue
        end = int(start[gap.before])
        begin = min(int(start[gap.before - 1]), end)
        found.append((begin, end - begin, float(gap.steps)))
    rows = pd.DataFrame(found, columns=["start_ns", "dur_ns", "value"])
    marks = {"kind": "mark", "name": CAPTURE_GAP, "lane": CAPTURE_GAP, "thread": 0, "source": "derived", "ended": True}
    return rows.astype({"start_ns": "int64", "dur_ns": "Int64", "value": "float64"}).assign(
        engine=False, device=False, taken=False, **marks
    )


def _rows(capture: Capture) -> pd.DataFrame:
    records = capture.records
    names = np.array([None] * (max(capture.names, default=0) + 1), dtype=object)
    for number, text in capture.names.items():
        names[number] = text
    name = names[records["name"]]
    if capture.format_version < NAMED_APART:
        name[(records["kind"] == Kind.MODULE) & (name == "sharding")] = SHARDING
    kinds = np.array([None, *(item.name.lower() for item in Kind)], dtype=object)
    comm = records["kind"] == Kind.COMM
    forward = name == "forward"

    def column(field: str, applies: npt.NDArray[np.bool_] | None = None) -> IntegerArray:
        values = records[field].astype(np.int64)
        return IntegerArray(values, values < 0 if applies is None else ~applies)

    # A finished record without an end (a GPU collective) took a time nobody measured: null, like one never ended.
    took = IntegerArray((records["end_ns"] - records["start_ns"]).astype(np.int64), records["end_ns"] <= 0)
    return pd.DataFrame(
        {
            "kind": kinds[records["kind"]],
            "name": name,
            "lane": names[records["lane"]],
            "thread": records["thread"],
            "start_ns": records["start_ns"],
            "dur_ns": took,
            "issue_ns": column("issue_ns"),
            "host_ns": column("host_ns"),
            "group": names[records["group"]],
            "engine": (records["flags"] & Flag.ENGINE) != 0,
            "device": (records["flags"] & Flag.DEVICE) != 0,
            "taken": (records["flags"] & Flag.START_MEASURED) != 0,
            "stage": column("stage"),
            "microbatch": column("microbatch"),
            "module": names[records["module"]],
            "purpose": names[records["purpose"]],
            "seq": column("seq"),
            "peer": column("peer"),
            "tag": column("tag"),
            "root": column("root", (records["root"] >= 0) & comm & np.isin(name, ROOTED)),
            "bytes": column("bytes"),
            "dtype": np.array([None, *DTYPES[1:]], dtype=object)[records["dtype"]],
            "value": records["value"],
            "corr": column("corr"),
            "site": names[records["site"]],
            "grad": BooleanArray(records["grad"] > 0, ~forward | (records["grad"] < 0)),
            "source": "measured",
            "ended": records["state"] == State.DONE,
        }
    )
