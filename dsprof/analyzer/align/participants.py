"""Who takes part in each communication, in order of arrival."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from ..arrays import Bool, Int
from ..columns import RankRows, Words, codes_of

NOT_ENDED: Final = np.iinfo(np.int64).min
NOT_TOLD: Final = NOT_ENDED


def is_numbered(rows: RankRows) -> Bool:
    """Which rows are communications that have a number in their group."""
    return rows.are("kind", "comm") & rows.known("group") & rows.known("seq")


def is_issued(rows: RankRows) -> Bool:
    """Of which communications it is told when the host asked for them, or when their chain was ready for them."""
    return rows.known("issue_ns") | rows.known("arrival_ns")


@dataclass(frozen=True)
class Participants:
    """They are in order of group, number and arrival, and where each communication begins.

    group: [C] of each communication. The others are [N], of each participant; `end`: NOT_ENDED where unknown.
    """

    begins: Int
    group: Words
    order: Int
    seq: Int
    came: Int
    rank: Int
    end: Int

    def table(self, comm: pd.DataFrame) -> dict[str, Any]:
        """The columns of a match that are the same of all kinds of communication; `end_ns` may be NOT_ENDED."""
        last = np.append(self.begins[1:], len(self.seq)) - 1
        steps = comm["step"].to_numpy(np.int64)[self.order]
        sizes = comm["bytes"].fillna(0).to_numpy(np.int64)[self.order]
        return {
            "group": pd.Series(self.group, dtype=str),
            "seq": self.seq[self.begins],
            "purpose": self.first(comm["purpose"]),
            "step": np.maximum.reduceat(steps, self.begins).astype(comm["step"].dtype),
            "bytes": np.maximum.reduceat(sizes, self.begins),
            "first_ns": self.came[self.begins],
            "last_ns": self.came[last],
            "late_rank": self.rank[last].astype(comm["rank"].dtype),
            "end_ns": np.maximum.reduceat(self.end, self.begins),
        }

    def first(self, column: pd.Series[Any]) -> pd.Series[str]:
        """What is known of each communication, from the first that knows it."""
        codes, names = codes_of(column)
        codes = codes[self.order]
        at = np.where(codes >= 0, np.arange(len(codes)), len(codes))
        at = np.minimum.reduceat(at, self.begins)
        return pd.Series(np.append(names, np.nan)[np.append(codes, -1)[at]], dtype=str)


def in_order(comm: pd.DataFrame, codes: Int, names: Words) -> Participants:
    """`codes`, `names`: the group in the matched table of each row."""
    seq = comm["seq"].to_numpy(np.int64)
    came = _arrived(comm, (seq, codes))
    end = comm["start_ns"].to_numpy(np.int64) + comm["dur_ns"].fillna(0).to_numpy(np.int64)
    end = np.where(comm["dur_ns"].notna().to_numpy(bool), end, NOT_ENDED)
    order = np.lexsort((came, seq, codes))
    key = codes[order], seq[order]
    begins = np.flatnonzero(np.append(True, (np.diff(key[0]) != 0) | (np.diff(key[1]) != 0)))
    rank = comm["rank"].to_numpy(np.int64)
    return Participants(begins, names[key[0][begins]], order, seq[order], came[order], rank[order], end[order])


def _arrived(comm: pd.DataFrame, key: tuple[Int, Int]) -> Int:
    """When each rank came. Within one communication the times are of one kind, as far as they are told: a stream's
    arrival beside another rank's issue would make the rank late whose device was behind its host.

    key: number and group of each row; equal ones are one communication.
    """
    arrival = comm["arrival_ns"].to_numpy(np.int64, na_value=NOT_TOLD)
    issue: Int = comm["issue_ns"].to_numpy(np.int64, na_value=NOT_TOLD)
    if not (arrival != NOT_TOLD).any():
        return issue
    order = np.lexsort(key)
    begins = np.flatnonzero(np.append(True, np.any([np.diff(part[order]) != 0 for part in key], axis=0)))
    counts = np.diff(np.append(begins, len(order)))
    every = {}
    for name, when in (("arrival", arrival), ("issue", issue)):
        every[name] = np.empty(len(order), bool)
        every[name][order] = np.repeat(np.logical_and.reduceat((when != NOT_TOLD)[order], begins), counts)
    either = np.where(arrival != NOT_TOLD, arrival, issue)
    found: Int = np.where(every["arrival"], arrival, np.where(every["issue"], issue, either))
    return found
