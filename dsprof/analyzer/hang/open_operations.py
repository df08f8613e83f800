"""How far each rank was when its capture ended, and collectives that ranks disagree about (`dsprof.live.waiting`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pandas as pd

from dsprof.live.waiting import SAME_BYTES, Communication, RankState, Stall, find_stall, mismatch
from dsprof.run import RunInfo
from dsprof.trace import Trace

from ..align.match import asked_ns, global_ranks, numbers
from ..columns import codes_of

COMM: Final = (
    "rank", "name", "group", "seq", "peer", "tag", "root", "start_ns", "dur_ns", "ended", "issue_ns", "arrival_ns",
    "bytes", "dtype", "stage", "source",
)  # fmt: skip
OPEN: Final = ("kind", "name", "ended", "group", "seq", "peer", "tag")


def communications(rows: pd.DataFrame) -> pd.DataFrame:
    """Those that have a number, with the columns COMM."""
    numbered = (rows["kind"] == "comm") & rows["group"].notna() & rows["seq"].notna()
    return rows.reindex(columns=list(COMM))[numbered]


def stall_at_end(rows: pd.DataFrame, trace: Trace, run: RunInfo) -> Stall | None:
    """What ranks were waiting for when their captures ended; None where none waits."""
    comm = communications(rows)
    opened = _under_way(comm)
    if opened.empty:
        return None
    states = _states(comm, opened, rows, trace, run)

    def members(group: str) -> list[int] | None:
        return run.group(group).get("ranks") or None

    return find_stall(states, members)


def first_disagreement(rows: pd.DataFrame) -> Stall | None:
    """The first collective that is not the same on all ranks: its name, its type, or its size where that must be."""
    comm = communications(rows)
    # The engine numbers what its lanes do, and tells what the contents differ by itself.
    comm = comm[comm["peer"].isna() & comm["stage"].isna()]
    if comm["rank"].nunique() < 2:
        return None
    key = numbers(comm)
    differ = np.zeros(len(comm), bool)
    order = np.argsort(key, kind="stable")
    begins = np.flatnonzero(np.append(True, np.diff(key[order]) != 0)) if len(order) else np.empty(0, np.int64)
    bytes_ = comm["bytes"].fillna(-1).to_numpy(np.int64).copy()
    bytes_[~comm["name"].isin(SAME_BYTES).to_numpy(bool)] = -1
    for codes in (codes_of(comm["name"])[0], codes_of(comm["dtype"])[0], bytes_):
        values = codes[order]
        known = values >= 0
        low = np.minimum.reduceat(np.where(known, values, np.iinfo(np.int64).max), begins)
        high = np.maximum.reduceat(np.where(known, values, -1), begins)
        differ[order] |= np.repeat(low < high, np.diff(np.append(begins, len(order))))
    if not differ.any():
        return None
    found = comm[differ]
    # Of each, when the last rank was there: that is the moment at which they disagreed.
    first = key[differ][np.argmin(asked_ns(found).fillna(np.iinfo(np.int64).max).to_numpy(np.int64))]
    chosen = comm[key == first]
    return mismatch({int(row["rank"]): _operation(row) for row in chosen.to_dict("records")})


def _under_way(comm: pd.DataFrame) -> pd.DataFrame:
    return comm[~comm["ended"].fillna(True).astype(bool)]


def _states(
    comm: pd.DataFrame, opened: pd.DataFrame, rows: pd.DataFrame, trace: Trace, run: RunInfo
) -> Mapping[int, RankState]:
    collective = comm["peer"].isna()
    issued: dict[int, dict[str, int]] = defaultdict(dict)
    last = comm[collective].groupby(["rank", "group"], observed=True)["seq"].max()
    for (rank, group), seq in last.items():
        issued[int(rank)][str(group)] = int(seq) + 1
    sent = comm[~collective]
    peers = global_ranks(sent["group"], sent["peer"], run)
    messages: dict[int, dict[tuple[str, int, int, str], int]] = defaultdict(dict)
    keys = [sent["rank"], sent["group"].astype(str), peers, sent["tag"].fillna(-1), sent["name"].astype(str)]
    for (rank, group, peer, tag, name), seq in sent["seq"].groupby(keys).max().items():
        messages[int(rank)][group, int(peer), int(tag), name] = int(seq) + 1
    phases = rows[(rows["kind"] == "phase") & ~rows["ended"].fillna(True).astype(bool)].sort_values("start_ns")
    imported = bool((comm["source"] == "imported").any())  # of other tools' traces there are no waits
    states = {}
    whole = {item.rank: not (item.dropped or item.damaged) for item in run.ranks}
    for rank in sorted({*whole, *(int(one) for one in rows["rank"].unique())}):
        mine = opened[opened["rank"] == rank]
        waits = _waits(trace, rank, run) if len(mine) else set()
        names = tuple(phases.loc[phases["rank"] == rank, "name"].astype(str))
        operations = []
        for row, peer in zip(mine.to_dict("records"), global_ranks(mine["group"], mine["peer"], run), strict=True):
            to = None if pd.isna(peer) else int(peer)
            place = (str(row["group"]), int(row["seq"]), to, -1 if pd.isna(row["tag"]) else int(row["tag"]))
            operations.append(_operation(row, to, place in waits))
        states[rank] = RankState(
            rank, tuple(operations), issued[rank], messages[rank], {}, whole=whole.get(rank, True),
            waiting=bool(waits) or (bool(operations) and ("backward" in names or imported)), phases=names,
        )  # fmt: skip
    return states


def _waits(trace: Trace, rank: int, run: RunInfo) -> set[tuple[Any, ...]]:
    """What a rank was waiting for; of a wait that does not say so, nothing but that there is one."""
    rows = trace.read(rank, OPEN)
    waits = rows[(rows["kind"] == "wait") & ~rows["ended"].fillna(True).astype(bool)]
    found: set[tuple[Any, ...]] = set()
    for row, peer in zip(waits.to_dict("records"), global_ranks(waits["group"], waits["peer"], run), strict=True):
        seq, tag = row["seq"], row["tag"]
        place = (str(row["group"]), -1 if pd.isna(seq) else int(seq), None if pd.isna(peer) else int(peer))
        found.add((*place, -1 if pd.isna(tag) else int(tag)))
    return found


def _operation(row: Mapping[Any, Any], peer: int | None = None, waited: bool = False) -> Communication:
    def number(name: str) -> int | None:
        return None if pd.isna(row[name]) else int(row[name])

    dtype, tag = row["dtype"], number("tag")
    return Communication(
        str(row["name"]), str(row["group"]), int(row["seq"]), int(row["start_ns"]), number("bytes"),
        None if pd.isna(dtype) else str(dtype), number("root"), peer, -1 if tag is None else tag, waited,
    )  # fmt: skip
