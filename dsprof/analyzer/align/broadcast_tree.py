"""Who waits for whom in a broadcast that is handed on from rank to rank, along a binomial tree.

gloo does it so (gloo/broadcast.cc): in round i each rank that has the data sends it to the one 2 ** i places behind it.
A rank has the data when all have arrived from the root down to it, and it leaves when those have arrived to which it
sends, since a send waits for its receive. With four ranks the root therefore waits for two of the others, and a rank
that arrives late at the end of a branch delays one other rank only. With two or three ranks the root waits for all, and
the others wait for the root.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import pandas as pd

from dsprof.run import RunInfo

from ..arrays import Int
from ..columns import RankRows
from .participants import in_order, is_issued, is_numbered

FEWEST_OF_TREE: Final = 4
"""Ranks of a group from which on the root does not wait for all."""
RANKS: Final = 1 << 24
"""More than there are: a row of the matched table times this, plus a rank, is one number."""


@lru_cache(maxsize=64)
def awaited_from_first(size: int) -> tuple[tuple[int, ...], ...]:
    """Of each member of a group of `size` whose first one sends, by its place, whose arrivals it waits for, its own
    among them."""
    found = []
    for place in range(size):
        before = [place]  # from it back to the root: each receives from the one without its highest bit
        while before[-1]:
            before.append(before[-1] - (1 << before[-1].bit_length() - 1))
        behind = [place + (1 << i) for i in range(place.bit_length(), size.bit_length()) if place + (1 << i) < size]
        found.append((*before, *behind))
    return tuple(found)


def awaited_by(members: tuple[int, ...], root: int) -> dict[int, tuple[int, ...]]:
    """Rank -> the ranks whose arrivals it waits for, its own among them. root: which of `members` sends."""
    ordered = [*members[members.index(root) :], *members[: members.index(root)]]
    awaited = awaited_from_first(len(members))
    return {rank: tuple(ordered[place] for place in of) for rank, of in zip(ordered, awaited, strict=True)}


def holds_up(members: tuple[int, ...], root: int) -> dict[int, tuple[int, ...]]:
    """Rank -> the ranks that wait for its arrival, itself among them. root: which of `members` sends."""
    found: dict[int, list[int]] = {rank: [] for rank in members}
    for rank, awaited in awaited_by(members, root).items():
        for other in awaited:
            found[other].append(rank)
    return {rank: tuple(sorted(of)) for rank, of in found.items()}


def members_of(group: str, run: RunInfo | None) -> tuple[int, ...]:
    """The ranks of a process group that is large enough for a tree; else, or where they are not known, none."""
    ranks = (run.group(group).get("ranks") or ()) if run is not None else ()
    return tuple(map(int, ranks)) if len(ranks) >= FEWEST_OF_TREE else ()


@dataclass(frozen=True)
class TreeArrivals:
    """When whoever a rank waits for in a broadcast along a tree was there. key: row of the matched table times
    RANKS plus the rank, ascending; `arrival`: ns."""

    key: Int
    arrival: Int

    def of(self, row: Int, rank: Int) -> Int:
        """Of these broadcasts and ranks, ns; -1: not known."""
        wanted = row * RANKS + rank
        if not len(self.key):
            return np.full(len(wanted), -1, np.int64)
        at = np.minimum(np.searchsorted(self.key, wanted), len(self.key) - 1)
        found: Int = np.where(self.key[at] == wanted, self.arrival[at], -1)
        return found


def tree_arrivals(rows: RankRows, collectives: pd.DataFrame, run: RunInfo | None) -> TreeArrivals:
    """Of all broadcasts of the matched table that are handed on along a tree; of ranks whose arrivals were captured.

    rows: as `match.match_collectives` takes them; collectives: what it made of them
    """
    along = np.flatnonzero((collectives["needs"] == "tree").to_numpy(bool))
    if not len(along):
        return TreeArrivals(np.empty(0, np.int64), np.empty(0, np.int64))
    names = [str(name) for name in collectives["name"].iloc[along].unique()]
    chosen = is_numbered(rows) & is_issued(rows) & rows.are("name", *names)
    comm = rows.take(("rank", "group", "seq", "start_ns", "dur_ns", "issue_ns", "arrival_ns"), np.flatnonzero(chosen))
    of = in_order(comm, *RankRows(comm).codes("group"))
    numbered = {key: i for i, key in enumerate(zip(of.group.tolist(), of.seq[of.begins].tolist(), strict=True))}
    ends = np.append(of.begins, len(of.seq))
    key, arrival = [], []
    table = (collectives[name].to_numpy()[along].tolist() for name in ("group", "seq", "root_rank"))
    members: dict[str, tuple[int, ...]] = {}
    for row, group, seq, root in zip(along.tolist(), *table, strict=True):
        place = numbered.get((str(group), seq))
        if place is None:
            continue
        if group not in members:
            members[group] = members_of(str(group), run)
        mine = slice(int(ends[place]), int(ends[place + 1]))
        came = dict(zip(of.rank[mine].tolist(), of.came[mine].tolist(), strict=True))
        for rank, awaited in awaited_by(members[group], root).items():
            if rank in came:
                key.append(row * RANKS + rank)
                arrival.append(max(came[other] for other in awaited if other in came))
    order = np.argsort(key)
    return TreeArrivals(np.array(key, np.int64)[order], np.array(arrival, np.int64)[order])
