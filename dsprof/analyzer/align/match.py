"""Join each communication across ranks: who came first, who last, and how long the bytes took once all were there.

A send and its receive are a communication of two ranks: it has the group `<group> <src>><dst>` (or with ` #tag`), and
the number of the pair.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from dsprof.run import RunInfo

from ..arrays import Bool, Int
from ..columns import RankRows, Words, as_rows, codes_of
from .backends import by_backend
from .broadcast_tree import TreeArrivals, members_of
from .link_shares import link_shares
from .participants import NOT_ENDED, NOT_TOLD, in_order, is_issued, is_numbered
from .senders import handed_over, taken_without_receiver

COLLECTIVE_COLUMNS: Final = (
    "group", "seq", "name", "purpose", "step", "bytes", "ranks", "first_ns", "last_ns", "late_rank", "end_ns",
    "transfer_ns", "alone_ns", "needs", "root_rank", "root_ns",
)  # fmt: skip

PAIRED: Final = ("rank", "name", "group", "seq", "peer", "tag")
ISSUED: Final = (*PAIRED, "step", "purpose", "root", "bytes", "start_ns", "dur_ns", "issue_ns", "arrival_ns")
"""Columns of the trace that say who communicates with whom, and that make a match."""

SEND_RECV: Final = "send_recv"
"""Name of a matched send and receive."""
PAIR: Final = r" (\d+)>(\d+)(?: #\d+)?$"
"""How the group of a message ends."""

SENDER_GOES_ON: Final = ("handed", "eager")
"""What `needs` says where the sender of a message goes on before it is there."""
BOTH_SIDES: Final = ("all", *SENDER_GOES_ON)
"""What `needs` says where nothing arrives anywhere before all have come."""

NEEDS: Final = ("all", "tree", "root", "to-root", "none")
"""What `needs` says of a collective."""

NEVER: Final = np.iinfo(np.int64).max
INFORMATIVE_NS: Final = 200_000
"""A wait for a message that took less says that the message was there already, not when it came."""


def match_collectives(rows: pd.DataFrame | RankRows, run: RunInfo | None = None) -> pd.DataFrame:
    """One row per communication that ended on some captured rank (COLLECTIVE_COLUMNS), ordered by last arrival.

    A rank arrives when its chain that runs the communication is ready for it (`arrival_ns`). Where that is not told of
    every rank that takes part, the issue stands for it: true starts on gloo are bounds. `ranks` is how many captured
    ranks issued it.
    `transfer_ns` runs from the last arrival, or from when the group had a worker free, to the last end known. Where a
    group has several workers, those under way at once share its link: `alone_ns` is each one's part of the time
    (`link_shares`).
    `needs` says whose arrival a participant depends on: `all`, `tree` (see `broadcast_tree`), `root` (the root
    on all, the others on it), `to-root` (the root on all), `handed` (all on all, but the root, which sends, goes on
    once it has handed the message over), `eager` (all on the root, which sends, and goes on once a copy was taken:
    `transfer_ns` then runs from its arrival), `none` (unknown); `root_rank` and `root_ns` are the root's global rank
    and arrival (-1: unknown or none).
    `run` has the members of the groups; without it only groups whose ranks are the global ones are understood.
    """
    rows = as_rows(rows)
    chosen, message = is_numbered(rows) & is_issued(rows), rows.known("peer")
    found = [_collectives(rows.take(ISSUED, np.flatnonzero(chosen & ~message)), run)]
    if (chosen & message).any():
        found.append(_messages(rows.take(ISSUED, np.flatnonzero(chosen & message)), rows.table, run))
    found = [table for table in found if len(table)]
    if not found:
        return pd.DataFrame({name: pd.Series(dtype="int64") for name in COLLECTIVE_COLUMNS})
    every = found[0] if len(found) == 1 else pd.concat(found, ignore_index=True)
    return every.sort_values("last_ns", ignore_index=True)[list(COLLECTIVE_COLUMNS)]


def asked_ns(rows: pd.DataFrame) -> pd.Series[int]:
    """When the host asked for each; of one whose launch was not seen, when its chain was ready for it."""
    return rows["issue_ns"].fillna(rows["arrival_ns"])


def when_asked(rows: RankRows) -> Int:
    """`asked_ns` of all rows of a rank; NOT_TOLD where it is not told."""
    issue, arrival = rows.whole("issue_ns", NOT_TOLD), rows.whole("arrival_ns", NOT_TOLD)
    found: Int = np.where(issue != NOT_TOLD, issue, arrival)
    return found


def numbers(rows: RankRows, place: Int) -> Int:
    """The group and the number in it of the rows at these places, which have both, as one number; in order of group and
    number."""
    codes, _ = rows.codes("group")
    found: Int = (codes[place] << 32) | rows.whole("seq")[place]
    return found


def _collectives(comm: pd.DataFrame, run: RunInfo | None) -> pd.DataFrame:
    if comm.empty:
        return comm
    codes, names = codes_of(comm["group"])
    of = in_order(comm, codes, names)
    root = _global_ranks(codes, names, comm["root"].fillna(-1).to_numpy(np.int64), run)[of.order]
    here = (root == of.rank) & (root >= 0)
    known_root = np.where(root >= 0, np.arange(len(root)), len(root))
    matched = pd.DataFrame(
        {
            **of.table(comm),
            "name": of.first(comm["name"]),
            "ranks": np.diff(np.append(of.begins, len(of.seq))),
            "root_rank": np.append(root, -1)[np.minimum.reduceat(known_root, of.begins)],
            "root_ns": np.maximum.reduceat(np.where(here, of.came, -1), of.begins),
        }
    )
    matched = matched[matched["end_ns"] != NOT_ENDED].reset_index(drop=True)
    known = (matched["root_ns"] >= 0).to_numpy(bool)
    in_tree = _in_tree(matched, run)
    words = np.array(NEEDS, object)  # and not a string of its own for each
    needs = np.full(len(matched), len(NEEDS) - 1)
    for backend, mine in by_backend(matched["group"].to_numpy(object), run):
        name = matched["name"][mine]
        needs[mine] = np.select(
            [
                name.isin(backend.synchronizing),
                name.isin(backend.along_tree) & known[mine] & in_tree[mine],
                name.isin(backend.others_wait_for_root | backend.along_tree) & known[mine],
                name.isin(backend.root_receives) & known[mine],
            ],
            range(len(NEEDS) - 1),
            len(NEEDS) - 1,
        )
    matched["needs"] = words[needs]
    matched["transfer_ns"], matched["alone_ns"] = _transfer(matched, run)
    return matched


def _in_tree(matched: pd.DataFrame, run: RunInfo | None) -> Bool:
    """Which of the collectives are of a group that is large enough for a tree, with a root among its members."""
    members = {str(group): members_of(str(group), run) for group in matched["group"].unique()}
    pairs = zip(matched["group"].tolist(), matched["root_rank"].tolist(), strict=True)
    return np.array([root in members[str(group)] for group, root in pairs], bool)


def global_ranks(group: pd.Series[str], rank: pd.Series[int], run: RunInfo | None) -> pd.Series[int]:
    """Ranks in a group as ranks of the job, Int64; of a group whose members are unknown they stand as they are."""
    codes, names = codes_of(group)
    found = pd.array(_global_ranks(codes, names, rank.fillna(-1).to_numpy(np.int64), run), "Int64")
    found[rank.isna().to_numpy(bool)] = pd.NA
    return pd.Series(found, rank.index)


def _global_ranks(codes: Int, names: Words, rank: Int, run: RunInfo | None) -> Int:
    """The same in arrays; -1 stays."""
    known = rank >= 0
    members: list[Int] = [np.empty(0, np.int64)] * len(names)
    if run is not None:
        for code in np.unique(codes[known]).tolist():
            members[code] = np.array(run.group(names[code]).get("ranks") or [], np.int64)
    sizes = np.array([len(ranks) for ranks in members] or [0])
    if not sizes.any():
        return rank
    begin = np.concatenate([[0], np.cumsum(sizes)])[:-1]
    mapped = known & (rank < sizes[codes])
    result = rank.copy()
    result[mapped] = np.concatenate(members)[begin[codes[mapped]] + rank[mapped]]
    return result


def matched_group(rows: pd.DataFrame, run: RunInfo | None) -> pd.Series[str]:
    """The group in the matched table of what each row communicates or waits for: its own, or of a message the pair."""
    codes, names = matched_codes(rows, run)
    return pd.Series(np.append(names, np.nan)[codes], rows.index, dtype=str)


def matched_codes(rows: pd.DataFrame, run: RunInfo | None) -> tuple[Int, Words]:
    """The same as numbers, and the groups that they are of."""
    codes, names = codes_of(rows["group"])
    message = rows["peer"].notna().to_numpy(bool)
    if not message.any():
        return codes, names
    of_pair, pairs = _pair(rows[message], run)
    codes[message] = len(names) + of_pair
    return codes, np.concatenate([names, pairs])


def _pair(rows: pd.DataFrame, run: RunInfo | None) -> tuple[Int, Words]:
    """The pair that each send, receive, or wait for one belongs to, as the group of a matched message."""
    codes, names = codes_of(rows["group"])
    peer = _global_ranks(codes, names, rows["peer"].to_numpy(np.int64), run)
    mine = rows["rank"].to_numpy(np.int64)
    sends = (rows["name"] == "send").to_numpy(bool)
    tag = rows["tag"].fillna(0).to_numpy(np.int64)
    pairs = np.stack([codes, np.where(sends, mine, peer), np.where(sends, peer, mine), tag], axis=1)
    different, which = np.unique(pairs, axis=0, return_inverse=True)
    text = [
        f"{names[group] if group >= 0 else 'nan'} {source}>{target}" + (f" #{tagged}" if tagged else "")
        for group, source, target, tagged in different.tolist()
    ]
    order = np.argsort(np.array(text, object), kind="stable")
    return np.argsort(order)[which.reshape(-1)], np.array(text, object)[order]


def _messages(comm: pd.DataFrame, rows: pd.DataFrame, run: RunInfo | None) -> pd.DataFrame:
    """Sends joined with their receives. The engine's own have no tag and are matched just so."""
    codes, names = matched_codes(comm, run)
    of = in_order(comm, codes, names)
    # gloo ends a send or a receive in its wait: where nobody stood still, that says nothing of when the bytes came.
    waited = (rows["kind"] == "wait") & rows["peer"].notna() & rows["seq"].notna()
    waits = rows[[*PAIRED, "dur_ns"]][waited & (rows["dur_ns"] > INFORMATIVE_NS)]
    long = pd.DataFrame({"group": matched_group(waits, run), "seq": waits["seq"], "rank": waits["rank"]})
    mine = pd.DataFrame({"group": matched_group(comm, run), "seq": comm["seq"], "rank": comm["rank"]})
    informative = pd.MultiIndex.from_frame(mine).isin(pd.MultiIndex.from_frame(long))[of.order]
    told = np.where(informative & (of.end != NOT_ENDED), of.end, NEVER)
    sends = (comm["name"] == "send").to_numpy(bool)[of.order]
    handed = handed_over(of, sends, informative)
    eager = taken_without_receiver(of, sends, comm, run)
    handed |= eager
    of_message = np.repeat(handed, np.diff(np.append(of.begins, len(of.seq))))
    told = np.where(of_message & sends, NEVER, told)
    by_rank = np.lexsort((of.rank, np.repeat(np.arange(len(of.begins)), np.diff(np.append(of.begins, len(of.seq))))))
    other = np.append(True, np.diff(of.rank[by_rank]) != 0)
    other[of.begins] = True
    matched = pd.DataFrame(
        {
            **of.table(comm),
            "ranks": np.add.reduceat(other.astype(np.int64), of.begins),
            "told_ns": np.minimum.reduceat(told, of.begins),
            "needs": np.select([eager, handed], ["eager", "handed"], "all"),
            "root_rank": np.where(handed, np.maximum.reduceat(np.where(sends, of.rank, -1), of.begins), -1),
            "root_ns": np.maximum.reduceat(np.where(sends, of.came, -1), of.begins),
        }
    )
    matched = matched[(matched["end_ns"] != NOT_ENDED) & (matched["ranks"] == 2)].reset_index(drop=True)
    if matched.empty:
        return matched
    eager = matched["needs"] == "eager"
    ended = matched["told_ns"].where(matched["told_ns"] != NEVER, matched["last_ns"])
    took = (ended - matched["last_ns"]).clip(lower=0)
    # A copy is under way from when it was taken. Where its receiver came later it was there then, at the latest.
    since_sent = matched["last_ns"].clip(lower=ended) - matched["root_ns"]
    waited_for = since_sent.where(matched["told_ns"] != NEVER).groupby(matched["group"]).transform("median")
    sent = since_sent.where(matched["told_ns"] != NEVER, np.minimum(since_sent, waited_for.fillna(0)))
    transfer = took.where(~eager, sent).astype(np.int64)
    root = matched["root_ns"].where(eager, -1)
    return matched.assign(name=SEND_RECV, root_ns=root, transfer_ns=transfer, alone_ns=transfer)


def _transfer(matched: pd.DataFrame, run: RunInfo | None) -> tuple[Int, Int]:
    """Time each collective took once all were there and its group had a worker free, first issued, first served; and
    its part of that where others of the group were under way. `matched` is in order of group and number."""
    last, end = matched["last_ns"].to_numpy(np.int64), matched["end_ns"].to_numpy(np.int64)
    size = matched["bytes"].to_numpy(np.float64, na_value=0)
    groups = matched["group"].to_numpy(object)
    group, _ = pd.factorize(groups)
    kind, _ = pd.factorize(matched["name"].to_numpy(object))
    taken: Int = np.maximum(end - last, 0)
    alone: Int = taken.copy()
    for backend, mine in by_backend(groups, run):
        if backend.workers is None:
            continue
        place = np.flatnonzero(mine)
        _serve(taken, last, end, group, place, backend.workers)
        if backend.workers > 1:
            took = taken[place]
            alone[place] = np.round(
                took * link_shares(group[place], end[place] - took, end[place], size[place], kind[place])
            )
        else:
            alone[place] = taken[place]
    return taken, alone


def _serve(taken: Int, last: Int, end: Int, group: Int, mine: Int, workers: int) -> None:
    """Set what those of `mine` took that had to wait for one of their group's workers."""
    order = mine[np.lexsort((last[mine], group[mine]))]
    # Only those that are issued while another of the group is under way may have to wait for a worker.
    reach = pd.Series(end[order]).groupby(group[order]).cummax().to_numpy(np.int64)
    first = np.append(True, np.diff(group[order]) != 0)[: len(order)]
    begins = np.flatnonzero(first | (np.roll(reach, 1) <= last[order]))
    counts = np.diff(np.append(begins, len(order)))
    for begin, count in zip(begins[counts > 1].tolist(), counts[counts > 1].tolist(), strict=True):
        free = [0] * workers
        for row in order[begin : begin + count].tolist():
            worker = free.index(min(free))
            begun = max(int(last[row]), free[worker])
            taken[row] = max(int(end[row]) - begun, 0)
            free[worker] = max(int(end[row]), free[worker])


class Matches:
    """Finds what rows communicate or wait for in the matched table, by group and number."""

    def __init__(self, collectives: pd.DataFrame, trees: TreeArrivals | None = None) -> None:
        self._trees = trees
        codes, names = codes_of(collectives["group"])
        self._code = {name: code for code, name in enumerate(names.tolist())}
        key = (codes << 32) | collectives["seq"].to_numpy(np.int64)
        self._row = np.argsort(key, kind="stable")
        self._key = key[self._row]
        self.unique = bool((np.diff(self._key) > 0).all())
        """Whether each is there once, as it should be: else none can be told from the other."""
        needs = collectives["needs"].to_numpy(object)
        self._everyone = np.isin(needs, BOTH_SIDES)
        self._tree = needs == "tree"
        self._rooted, self._of_root = np.isin(needs, ["root", "to-root"]), needs == "root"
        self._root, self._last, self._first = (
            collectives[name].to_numpy(np.int64) for name in ("root_rank", "last_ns", "root_ns")
        )

    def find(self, rows: pd.DataFrame, run: RunInfo | None = None) -> Int:
        """Row of the matched table for each of `rows` (with a number), -1: not matched."""
        return self._find(*matched_codes(rows, run), rows["seq"].to_numpy(np.int64))

    def find_at(self, rows: RankRows, place: Int, run: RunInfo | None = None) -> Int:
        """The same of the rows at these places, which have a number."""
        if rows.known("peer")[place].any():
            return self.find(rows.take((*PAIRED,), place), run)
        codes, names = rows.codes("group")
        return self._find(codes[place], names, rows.whole("seq")[place])

    def _find(self, codes: Int, names: Words, seq: Int) -> Int:
        known = np.array([*(self._code.get(name, -1) for name in names.tolist()), -1], np.int64)[codes]
        if not len(self._key):
            return np.full(len(codes), -1, np.int64)
        key = (known << 32) | seq
        at = np.minimum(np.searchsorted(self._key, key), len(self._key) - 1)
        found: Int = np.where((known >= 0) & (self._key[at] == key), self._row[at], -1)
        return found

    def arrivals(self, row: Int, rank: Int) -> Int:
        """When whoever each `rank` depends on in the communication of each row of the matched table was there, ns; -1:
        it depends on nobody, or that is unknown."""
        root = self._root[row]
        everyone = self._everyone[row] | (self._rooted[row] & (rank == root))
        of_root = self._of_root[row] & (rank != root)
        result: Int = np.where(everyone, self._last[row], np.where(of_root, self._first[row], -1))
        along = self._tree[row]
        if self._trees is not None and along.any():
            result[along] = self._trees.of(row[along], rank[along])
        return result
