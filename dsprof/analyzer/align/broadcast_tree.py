"""Who waits for whom in a broadcast that is handed on from rank to rank, along a binomial tree.

So gloo has it (gloo/broadcast.cc): in round i each rank that has the data sends it to the one 2 ** i places behind it.
A rank gets it when all from the root down to it have come, and goes on when those have come that it sends to: a send
waits for its receive. So with four ranks the root waits for two of the others, and who comes late at the end of a
branch holds up one rank only. Of two or three ranks the root waits for all, and the others for the root.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import pandas as pd

from dsprof.run import RunInfo

from ..arrays import Int
from ..columns import RankRows
from .participants import in_order

FEWEST: Final = 4
"""Ranks of a group from which on the root does not wait for all."""
MOST_RANKS: Final = 1 << 24


@lru_cache(maxsize=64)
def awaited_by(size: int, root: int) -> tuple[tuple[int, ...], ...]:
    """Of each member of a group of `size`, by its place, whose arrivals it waits for, its own among them."""
    found = []
    for member in range(size):
        place = (member - root) % size
        before = [place]  # from it back to the root: each sends to the one in which its highest bit is set
        while before[-1]:
            before.append(before[-1] - (1 << before[-1].bit_length() - 1))
        behind = [place + (1 << i) for i in range(place.bit_length(), size.bit_length()) if place + (1 << i) < size]
        found.append(tuple(sorted((one + root) % size for one in (*before, *behind))))
    return tuple(found)


def holds_up(members: tuple[int, ...], root: int) -> dict[int, tuple[int, ...]]:
    """Rank -> the ranks that its arrival holds up, itself among them. root: which of `members` sends."""
    awaited = awaited_by(len(members), members.index(root))
    return {
        rank: tuple(other for other, of in zip(members, awaited, strict=True) if place in of)
        for place, rank in enumerate(members)
    }


def members_of(group: str, run: RunInfo | None) -> tuple[int, ...]:
    """The ranks of a process group that is large enough for a tree; else, or where they are not known, none."""
    ranks = (run.group(group).get("ranks") or ()) if run is not None else ()
    return tuple(map(int, ranks)) if len(ranks) >= FEWEST else ()


@dataclass(frozen=True)
class TreeArrivals:
    """When whoever a rank waits for in a broadcast along a tree was there. key: row of the matched table times
    MOST_RANKS plus the rank, ascending; `arrival`: ns."""

    key: Int
    arrival: Int

    def of(self, row: Int, rank: Int) -> Int:
        """Of these broadcasts and ranks, ns; -1: not known."""
        wanted = row * MOST_RANKS + rank
        if not len(self.key):
            return np.full(len(wanted), -1, np.int64)
        at = np.minimum(np.searchsorted(self.key, wanted), len(self.key) - 1)
        found: Int = np.where(self.key[at] == wanted, self.arrival[at], -1)
        return found


def tree_arrivals(rows: RankRows, collectives: pd.DataFrame, run: RunInfo | None) -> TreeArrivals:
    """Of all broadcasts of the matched table that are handed on along a tree.

    rows: as `match.match_collectives` takes them; collectives: what it made of them
    """
    along = np.flatnonzero((collectives["needs"] == "tree").to_numpy(bool))
    if not len(along):
        return TreeArrivals(np.empty(0, np.int64), np.empty(0, np.int64))
    chosen = rows.are("kind", "comm") & rows.are("name", "broadcast") & rows.known("group") & rows.known("seq")
    chosen &= rows.known("issue_ns") | rows.known("arrival_ns")
    comm = rows.take(("rank", "group", "seq", "start_ns", "dur_ns", "issue_ns", "arrival_ns"), np.flatnonzero(chosen))
    codes, names = RankRows(comm).codes("group")
    of = in_order(comm, codes, names)
    numbered = {key: i for i, key in enumerate(zip(of.group.tolist(), of.seq[of.begins].tolist(), strict=True))}
    ends = np.append(of.begins, len(of.seq))
    key, arrival = [], []
    table = (collectives[name].to_numpy()[along].tolist() for name in ("group", "seq", "root_rank"))
    for row, group, seq, root in zip(along.tolist(), *table, strict=True):
        place = numbered.get((str(group), seq))
        if place is None:
            continue
        mine = slice(int(ends[place]), int(ends[place + 1]))
        came = dict(zip(of.rank[mine].tolist(), of.came[mine].tolist(), strict=True))
        for rank, when in _depends(members_of(str(group), run), root, came).items():
            key.append(row * MOST_RANKS + rank)
            arrival.append(when)
    order = np.argsort(key)
    return TreeArrivals(np.array(key, np.int64)[order], np.array(arrival, np.int64)[order])


def _depends(members: tuple[int, ...], root: int, came: Mapping[int, int]) -> dict[int, int]:
    """Rank -> when the last of those came that it waits for. Of those whose arrival was captured."""
    awaited = awaited_by(len(members), members.index(root))
    found = {}
    for rank, of in zip(members, awaited, strict=True):
        known = [came[members[place]] for place in of if members[place] in came]
        if rank in came:
            found[rank] = max(known)
    return found
