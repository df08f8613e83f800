"""Communications without a number, numbered in the order of their issue, and those that ranks disagree about."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.run import RunInfo

from ..arrays import Int
from ..columns import RankRows, as_rows, codes_of
from .match import ISSUED, PAIR, SEND_RECV, asked_ns, matched_codes, numbers
from .participants import is_issued, is_numbered

MOST_MISMATCHES: Final = 3
"""Collectives that are named, of those that ranks disagree about."""


def mismatches(rows: pd.DataFrame | RankRows, run: RunInfo | None = None) -> list[str]:
    """Warnings of collectives that have one number and are not the same on all ranks, and of those that have none."""
    rows = as_rows(rows)
    numbered = np.flatnonzero(is_numbered(rows) & ~rows.known("peer"))
    key, names = numbers(rows, numbered), rows.codes("name")[0][numbered]
    order = np.lexsort((names, key))
    change = (np.diff(key[order]) == 0) & (np.diff(names[order]) != 0)
    differ = np.unique(key[order][1:][change])
    found = []
    for one in differ[:MOST_MISMATCHES]:
        chosen = rows.take(("rank", "group", "seq", "name"), numbered[key == one]).sort_values("rank", kind="stable")
        group, seq = chosen["group"].iloc[0], chosen["seq"].iloc[0]
        who = ", ".join(f"{name} on rank {rank}" for rank, name in zip(chosen["rank"], chosen["name"], strict=True))
        found.append(f"collective {seq} of group {group} is not the same on all ranks: {who}")
    if len(differ) > MOST_MISMATCHES:
        found.append(f"and {len(differ) - MOST_MISMATCHES} more collectives that differ between ranks")
    left = _without_number(rows, run)
    uneven = [counts for counts in left.counts if len(counts.of_rank) > 1] if left else []
    for counts in uneven[:MOST_MISMATCHES]:
        least, most = (pick(counts.of_rank, key=lambda rank: counts.of_rank[rank]) for pick in (min, max))
        found.append(
            f"{counts.name} of group {counts.group} has no number, and there are {counts.of_rank[least]} on rank "
            f"{least} and {counts.of_rank[most]} on rank {most}: they were not matched"
        )
    if len(uneven) > MOST_MISMATCHES:
        found.append(f"and {len(uneven) - MOST_MISMATCHES} more kinds of communication without a number")
    return found


def number_by_order(rows: pd.DataFrame | RankRows, run: RunInfo | None = None) -> pd.DataFrame:
    """Rows in which communications that the capture gave no number have one: the order in which they were issued.

    Of one name in a group (or of one pair, tag and direction) the first on one rank is the first on the others, if all
    that take part have issued equally many; what is uneven stays as it is, and `mismatches` tells of it. The numbers of
    a group go on after those that it has, in the order of its lowest rank.
    """
    rows = as_rows(rows)
    left = _without_number(rows, run)
    if left is None or not left.even.any():
        return rows.table
    # Of each kind, rank by rank, the first rank's come first: the others' are counted from there.
    reference = left.begin + left.turn
    first = np.flatnonzero(reference == np.arange(len(reference)))
    first = first[left.even[first]]
    first = first[np.lexsort((left.issue[first], left.group[first]))]
    of_group = left.group[first]
    place = np.arange(len(first)) - np.searchsorted(of_group, of_group)
    number = np.full(len(reference), -1)
    number[first] = place + left.free[of_group]
    chosen = left.even
    seq = rows.table["seq"].copy()
    seq.iloc[left.row[chosen]] = number[reference[chosen]]
    return rows.table.assign(seq=seq)


@dataclass(frozen=True)
class _Counts:
    """Communications of one kind without a number: how many each rank that takes part has issued."""

    group: str
    name: str
    of_rank: dict[int, int]


@dataclass(frozen=True)
class _WithoutNumber:
    """Communications without a number, [N], in order of kind (a name in a group, or a pair), rank and issue.

    row: in the table. group: a number for it. turn: how many of the kind the rank has issued before. begin: where the
    kind begins. even: whether all that take part have issued equally many. free: by group, the first number not taken.
    """

    row: Int
    group: Int
    turn: Int
    begin: Int
    issue: Int
    even: npt.NDArray[np.bool_]
    free: Int
    counts: list[_Counts]


def _without_number(rows: RankRows, run: RunInfo | None) -> _WithoutNumber | None:
    issued = rows.are("kind", "comm") & rows.known("group") & is_issued(rows)
    lacking = issued & ~rows.known("seq")
    if not lacking.any():
        return None
    comm = rows.take(ISSUED, np.flatnonzero(issued))
    lacks = comm["seq"].isna().to_numpy(bool)
    group, groups = matched_codes(comm, run)
    word, words = codes_of(comm["name"])
    message, rank = comm["peer"].notna().to_numpy(bool), comm["rank"].to_numpy(np.int64)
    takes_part = np.unique(np.stack([group, rank], axis=1), axis=0)
    free = np.zeros(len(groups), np.int64)
    np.maximum.at(free, group[~lacks], comm["seq"].to_numpy(np.int64, na_value=-1)[~lacks] + 1)
    row, group, word, rank = np.flatnonzero(lacking), group[lacks], np.where(message, 0, word)[lacks], rank[lacks]
    issue, message = _order_of_issue(comm[lacks], group), message[lacks]
    kind = group * len(words) + word
    order = np.lexsort((issue, rank, kind))
    row, group, kind, rank, issue = row[order], group[order], kind[order], rank[order], issue[order]
    message, word = message[order], word[order]
    begins = np.flatnonzero(np.append(True, np.diff(kind) != 0))
    of_rank = np.flatnonzero(np.append(True, (np.diff(kind) != 0) | (np.diff(rank) != 0)))
    turn = np.arange(len(row)) - np.repeat(of_rank, np.diff(np.append(of_rank, len(row))))
    even, counts = np.zeros(len(row), bool), []
    captured = set(np.unique(rows.whole("rank")).tolist())
    for begin, end in zip(begins.tolist(), np.append(begins[1:], len(row)).tolist(), strict=True):
        name = groups[group[begin]]
        if message[begin]:
            ends = re.search(PAIR, name)
            expected = captured & ({int(ends[1]), int(ends[2])} if ends else set())
            whole = len(expected) == 2
        else:
            known = run.group(name).get("ranks") if run is not None else None
            expected = captured & set(known or takes_part[takes_part[:, 0] == group[begin], 1].tolist())
            whole = words[word[begin]] not in ("send", "recv")  # of one that takes from anyone, nobody knows from whom
        ranks, many = np.unique(rank[begin:end], return_counts=True)
        found = dict.fromkeys(sorted(expected), 0) | dict(zip(ranks.tolist(), many.tolist(), strict=True))
        even[begin:end] = whole and len(set(found.values())) == 1
        counts.append(_Counts(name, SEND_RECV if message[begin] else words[word[begin]], found))
    begin_of = np.repeat(begins, np.diff(np.append(begins, len(row))))
    return _WithoutNumber(row, group, turn, begin_of, issue, even, free, counts)


def _order_of_issue(comm: pd.DataFrame, group: Int) -> Int:
    """What puts those of a group in the order in which they were issued: when the host asked, or, in a group of which
    a launch was not seen, when their stream reached them. A mixture of both would be no order."""
    asked = asked_ns(comm).to_numpy(np.int64)
    unseen = np.isin(group, group[comm["issue_ns"].isna().to_numpy(bool)])
    reached = comm["arrival_ns"].to_numpy(np.int64, na_value=-1)
    found: Int = np.where(unseen & (reached >= 0), reached, asked)
    return found
