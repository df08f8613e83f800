"""Every wait of the training threads as a table, for the reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd
from pandas.arrays import IntegerArray

from ..arrays import Int
from .label import NOTHING
from .step_budget import RankTime

WAIT_COLUMNS: Final = ("rank", "start_ns", "end_ns", "arrival_ns", "group", "seq", "issued_step")


@dataclass(frozen=True)
class CollectiveColumns:
    """What the table tells of collectives, and the last one of each, of none. number, seq: [C + 1] of the step, and
    within its group; group: [C + 1] its place in `groups`."""

    number: Int
    seq: Int
    group: Int
    groups: pd.Index[str]

    @staticmethod
    def of(collectives: pd.DataFrame) -> CollectiveColumns:
        number, seq = (np.append(collectives[name].to_numpy(np.int32), 0) for name in ("step", "seq"))
        codes, names = pd.factorize(collectives["group"].to_numpy(object))
        return CollectiveColumns(number, seq, np.append(codes, NOTHING).astype(np.int32), pd.Index(names, dtype=object))


def no_waits() -> pd.DataFrame:
    return pd.DataFrame(columns=list(WAIT_COLUMNS))


def waits_table(times: Mapping[int, RankTime], told: CollectiveColumns, steps: pd.DataFrame) -> pd.DataFrame:
    """WAIT_COLUMNS, as `Analysis.waits` says, of some ranks, in order. steps: theirs. Numbers are as narrow as in the
    trace."""
    ends = np.cumsum([len(time.waits) for time in times.values()]).tolist()
    start, end, arrival = (np.empty(ends[-1], np.int64) for _ in range(3))
    rank, seq, step, group = (np.empty(ends[-1], np.int32) for _ in range(4))
    untold, unknown, elsewhere = (np.empty(ends[-1], bool) for _ in range(3))
    number, of_group, codes = told.number, told.seq, told.group
    at, begun = steps.groupby("rank").indices, steps["start_ns"].to_numpy(np.int64)
    counted = steps["step"].to_numpy(np.int64)
    for (one, time), first, last in zip(times.items(), [0, *ends], ends, strict=False):
        mine, waits = slice(first, last), time.waits
        bound = waits["collective"].to_numpy(np.int64)
        rank[mine], start[mine], end[mine] = one, waits["start_ns"], waits["end_ns"]
        arrival[mine], untold[mine] = waits["arrival_ns"], waits["lane"].to_numpy() != NOTHING
        step[mine], seq[mine], group[mine], unknown[mine] = number[bound], of_group[bound], codes[bound], bound < 0
        of_rank = at.get(one, np.empty(0, np.int64))
        reached = _begun_last(start[mine], begun[of_rank], counted[of_rank])
        elsewhere[mine] = unknown[mine] | (number[bound] >= reached)
    return pd.DataFrame(
        {
            "rank": rank,
            "start_ns": start,
            "end_ns": end,
            "arrival_ns": IntegerArray(arrival, untold),
            "group": pd.Categorical.from_codes(group, told.groups),
            "seq": IntegerArray(seq, unknown),
            "issued_step": IntegerArray(step, elsewhere),
        },
        copy=False,
    )


def _begun_last(when: Int, begun_ns: Int, number: Int) -> Int:
    """The step that a rank had begun last at each moment, of those that begin at `begun_ns`; the least number: none."""
    order = np.argsort(begun_ns, kind="stable")
    found: Int = np.append(np.iinfo(np.int64).min, number[order])[np.searchsorted(begun_ns[order], when, "right")]
    return found
