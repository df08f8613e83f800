"""Join each communication across ranks: who came first, who last, and how long the bytes took once all were there.

A send and its receive are a communication of two ranks: it has the group `<group> <src>><dst>` (or with ` #tag`), and
the number of the pair.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.run import RunInfo
from dsprof.schema import SYNCHRONIZING

COLLECTIVE_COLUMNS: Final = (
    "group", "seq", "name", "purpose", "step", "bytes", "ranks", "first_ns", "last_ns", "late_rank", "end_ns",
    "transfer_ns", "needs", "root_rank", "root_ns",
)  # fmt: skip

GLOO_WORKERS: Final = 2
"""Collectives of one group that run at once: gloo has two worker threads a group."""

SEND_RECV: Final = "send_recv"
"""Name of a matched send and receive."""
ROOT_SENDS: Final = frozenset({"broadcast", "scatter"})
"""Nobody gets anything before the root has come, which waits for all: a send of gloo's waits for its receive."""
ROOT_RECEIVES: Final = frozenset({"reduce", "gather"})
"""The root waits for everybody; nobody else for anyone."""

INFORMATIVE_NS: Final = 200_000
"""A wait for a message that took less says that the message was there already, not when it came."""


def match_collectives(rows: pd.DataFrame, run: RunInfo | None = None) -> pd.DataFrame:
    """One row per communication that ended on some captured rank (COLLECTIVE_COLUMNS), ordered by last arrival.

    An arrival is the issue: true starts on gloo are bounds. `ranks` is how many captured ranks issued it.
    `transfer_ns` runs from the last arrival, or from when the group had a worker free, to the last end known.
    `needs` says whose arrival a participant depends on: `all`, `root` (the root on all, the others on it), `to-root`
    (the root on all),
    `none` (unknown); `root_rank` and `root_ns` are the root's global rank and arrival (-1: unknown or none).
    `run` has the members of the groups; without it only groups whose ranks are the global ones are understood.
    """
    comm = rows[(rows["kind"] == "comm") & rows["seq"].notna() & rows["issue_ns"].notna()]
    found = [_collectives(comm[comm["peer"].isna()], run), _messages(comm[comm["peer"].notna()], rows, run)]
    found = [table for table in found if len(table)]
    if not found:
        return pd.DataFrame({name: pd.Series(dtype="int64") for name in COLLECTIVE_COLUMNS})
    return pd.concat(found, ignore_index=True).sort_values("last_ns", ignore_index=True)[list(COLLECTIVE_COLUMNS)]


MOST_MISMATCHES: Final = 3
"""Collectives that are named, of those that ranks disagree about."""


def mismatches(rows: pd.DataFrame) -> list[str]:
    """Warnings of collectives that have one number and are not the same on all ranks."""
    comm = rows[(rows["kind"] == "comm") & rows["peer"].isna() & rows["seq"].notna()]
    table = pd.DataFrame({"group": comm["group"].astype(str), "seq": comm["seq"], "name": comm["name"].astype(str)})
    differ = table.groupby(["group", "seq"])["name"].nunique()
    differ = differ[differ > 1]
    found = []
    for group, seq in differ.index[:MOST_MISMATCHES]:
        chosen = comm[(comm["group"] == group) & (comm["seq"] == seq)].sort_values("rank")
        names = ", ".join(f"{name} on rank {rank}" for rank, name in zip(chosen["rank"], chosen["name"], strict=True))
        found.append(f"collective {seq} of group {group} is not the same on all ranks: {names}")
    if len(differ) > MOST_MISMATCHES:
        found.append(f"and {len(differ) - MOST_MISMATCHES} more collectives that differ between ranks")
    return found


OF_PARTICIPANTS: Final = {
    "purpose": ("purpose", "first"),
    "step": ("step", "max"),
    "bytes": ("bytes", "max"),
    "first_ns": ("issue", "first"),
    "last_ns": ("issue", "last"),
    "late_rank": ("rank", "last"),
    "end_ns": ("end", "max"),
}
"""Column of a match -> what it is of the participants, in order of issue."""


def _participants(comm: pd.DataFrame, run: RunInfo | None) -> pd.DataFrame:
    """Who issued what, and when: group, seq, purpose, step, bytes, rank, issue, end."""
    return pd.DataFrame(
        {
            "group": matched_group(comm, run),
            "seq": comm["seq"].astype("int64"),
            "purpose": comm["purpose"].astype(str),
            "step": comm["step"],
            "bytes": comm["bytes"].fillna(0).astype("int64"),
            "rank": comm["rank"],
            "issue": comm["issue_ns"].astype("int64"),
            "end": comm["start_ns"] + comm["dur_ns"],
        }
    )


def _collectives(comm: pd.DataFrame, run: RunInfo | None) -> pd.DataFrame:
    if comm.empty:
        return comm
    table = _participants(comm, run).assign(name=comm["name"].astype(str), root=comm["root"].astype("Int64"))
    table = table.sort_values(["group", "seq", "issue"], ignore_index=True)
    table["root"] = global_ranks(table["group"], table["root"], run)
    table["root_issue"] = table["issue"].where(table["rank"] == table["root"]).astype("Int64")
    by = table.groupby(["group", "seq"], sort=False)
    matched = by.agg(
        **OF_PARTICIPANTS,
        name=("name", "first"),
        ranks=("rank", "size"),
        root_rank=("root", "first"),
        root_ns=("root_issue", "max"),
    ).reset_index()
    matched = matched[matched["end_ns"].notna()].astype({"end_ns": "int64"}).reset_index(drop=True)
    matched["root_rank"] = matched["root_rank"].fillna(-1).astype("int64")
    matched["root_ns"] = matched["root_ns"].fillna(-1).astype("int64")
    known = matched["root_ns"] >= 0
    matched["needs"] = np.select(
        [
            matched["name"].isin(SYNCHRONIZING),
            matched["name"].isin(ROOT_SENDS) & known,
            matched["name"].isin(ROOT_RECEIVES) & known,
        ],
        ["all", "root", "to-root"],
        "none",
    )
    matched["transfer_ns"] = _transfer(matched)
    return matched


def global_ranks(group: pd.Series[str], rank: pd.Series[int], run: RunInfo | None) -> pd.Series[int]:
    """Ranks in a group as ranks of the job, Int64; of a group whose members are unknown they stand as they are."""
    result = rank.astype("Int64").copy()
    for name in group[rank.notna()].unique():
        members = (run.groups.get(name) or run.groups.get(name.partition("#")[0]) or {}) if run is not None else {}
        ranks = members.get("ranks") or []
        if not ranks or ranks == list(range(len(ranks))):
            continue
        chosen = (group == name) & rank.notna() & (rank < len(ranks))
        result[chosen] = np.array(ranks)[rank[chosen].to_numpy(np.int64)]
    return result


def matched_group(rows: pd.DataFrame, run: RunInfo | None) -> pd.Series[str]:
    """The group in the matched table of what each row communicates or waits for: its own, or of a message the pair."""
    group = rows["group"].astype(object).astype(str)
    messages = rows["peer"].notna().to_numpy(bool)
    if messages.any():
        group[messages] = _pair(rows[messages], run)
    return group


def _pair(rows: pd.DataFrame, run: RunInfo | None) -> pd.Series[str]:
    """The pair that each send, receive, or wait for one belongs to, as the group of a matched message."""
    peer = global_ranks(rows["group"].astype(str), rows["peer"], run).astype("int64")
    mine = rows["rank"].astype("int64")
    sends = rows["name"].astype(str) == "send"
    source, target = mine.where(sends, peer), peer.where(sends, mine)
    tag = rows["tag"].fillna(0).astype("int64")
    tagged = (" #" + tag.astype(str)).where(tag != 0, "")
    return rows["group"].astype(str) + " " + source.astype(str) + ">" + target.astype(str) + tagged


def _messages(comm: pd.DataFrame, rows: pd.DataFrame, run: RunInfo | None) -> pd.DataFrame:
    """Sends joined with their receives. The engine's own have no tag and are matched just so."""
    if comm.empty:
        return comm
    table = _participants(comm, run)
    # gloo ends a send or a receive in its wait: where nobody stood still, that says nothing of when the bytes came.
    waits = rows[(rows["kind"] == "wait") & rows["peer"].notna() & rows["seq"].notna() & rows["dur_ns"].notna()]
    if len(waits):
        waited = pd.DataFrame(
            {"group": matched_group(waits, run), "seq": waits["seq"].astype("int64"), "rank": waits["rank"],
             "waited": waits["dur_ns"].astype("int64")}
        ).groupby(["group", "seq", "rank"], as_index=False)["waited"].max()  # fmt: skip
        table = table.merge(waited, on=["group", "seq", "rank"], how="left")
    else:
        table["waited"] = np.nan
    table["informative_end"] = table["end"].where(table["waited"].fillna(0) > INFORMATIVE_NS)
    table = table.sort_values(["group", "seq", "issue"], ignore_index=True)
    by = table.groupby(["group", "seq"], sort=False)
    matched = by.agg(
        **OF_PARTICIPANTS,
        ranks=("rank", "nunique"),
        informative_end_ns=("informative_end", "min"),
    ).reset_index()
    matched = matched[matched["end_ns"].notna() & (matched["ranks"] == 2)].reset_index(drop=True)
    if matched.empty:
        return matched
    matched = matched.astype({"end_ns": "int64"})
    ended = matched["informative_end_ns"].fillna(matched["last_ns"]).astype("int64")
    return matched.assign(
        name=SEND_RECV, needs="all", root_rank=-1, root_ns=-1, transfer_ns=(ended - matched["last_ns"]).clip(lower=0)
    )


def _transfer(matched: pd.DataFrame) -> pd.Series[int]:
    """Time each collective took once all were there and its group had a worker free: first issued, first served."""
    transfer = pd.Series(0, index=matched.index, dtype="int64")
    for _, group in matched.groupby("group", sort=False):
        group = group.sort_values("last_ns")
        free = [0] * GLOO_WORKERS
        taken = []
        for last, end in zip(group["last_ns"].tolist(), group["end_ns"].tolist(), strict=True):
            worker = free.index(min(free))
            taken.append(max(end - max(last, free[worker]), 0))
            free[worker] = max(end, free[worker])
        transfer[group.index] = np.array(taken, np.int64)
    return transfer


def arrivals(table: pd.DataFrame, rank: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """When whoever each `rank` depends on in each matched communication was there, ns; -1: it depends on nobody, or
    that is unknown. `table` has the columns of a match, a row for each of `rank`."""
    needs = table["needs"].to_numpy(object)
    root = table["root_rank"].to_numpy(np.int64)
    last, first = table["last_ns"].to_numpy(np.int64), table["root_ns"].to_numpy(np.int64)
    everyone = (needs == "all") | (np.isin(needs, ["root", "to-root"]) & (rank == root))
    of_root = (needs == "root") & (rank != root)
    result: npt.NDArray[np.int64] = np.where(everyone, last, np.where(of_root, first, -1))
    return result
