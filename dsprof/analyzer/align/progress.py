"""How far each rank was when its capture ended, and collectives that ranks disagree about."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from dsprof.live.waiting import SAME_BYTES, Communication, Stall, mismatch
from dsprof.run import RunInfo

from ..columns import RankRows, as_rows
from .match import asked_ns, global_ranks, numbers
from .participants import is_numbered

COMM: Final = (
    "rank", "name", "group", "seq", "peer", "tag", "root", "start_ns", "dur_ns", "ended", "issue_ns", "arrival_ns",
    "bytes", "dtype", "stage", "source",
)  # fmt: skip


@dataclass(frozen=True)
class Progress:
    """How far ranks were when their captures ended.

    ranks:    of which anything was seen
    opened:   communications that had not ended, columns COMM
    issued:   rank -> group -> how many collectives it has issued; of a job in which some are open, as is
    messages: rank -> (group, peer, tag, name) -> how many sends or receives
    imported: whether another tool traced them
    """

    ranks: tuple[int, ...]
    opened: pd.DataFrame
    issued: Mapping[int, Mapping[str, int]]
    messages: Mapping[int, Mapping[tuple[str, int, int, str], int]]
    imported: bool


def find_progress(rows: pd.DataFrame | RankRows, run: RunInfo) -> Progress:
    """Of the arrivals of all ranks."""
    rows = as_rows(rows)
    numbered = is_numbered(rows)
    opened = rows.take(COMM, np.flatnonzero(numbered & ~rows.true("ended", True)))
    ranks = tuple(pd.unique(rows.whole("rank")).tolist())
    issued: dict[int, dict[str, int]] = defaultdict(dict)
    messages: dict[int, dict[tuple[str, int, int, str], int]] = defaultdict(dict)
    if len(opened):
        comm = rows.take(COMM, np.flatnonzero(numbered))
        collective = comm["peer"].isna()
        last = comm[collective].groupby(["rank", "group"], observed=True)["seq"].max()
        for (rank, group), seq in last.items():
            issued[int(rank)][str(group)] = int(seq) + 1
        sent = comm[~collective]
        peers = global_ranks(sent["group"], sent["peer"], run)
        keys = [sent["rank"], sent["group"].astype(str), peers, sent["tag"].fillna(-1), sent["name"].astype(str)]
        for (rank, group, peer, tag, name), seq in sent["seq"].groupby(keys).max().items():
            messages[int(rank)][group, int(peer), int(tag), name] = int(seq) + 1
    # Of other tools' traces there are no waits.
    imported = bool((numbered & rows.are("source", "imported")).any())
    return Progress(ranks, opened, dict(issued), dict(messages), imported)


def first_disagreement(rows: pd.DataFrame | RankRows) -> Stall | None:
    """The first collective, of the arrivals of all ranks, that is not the same on all of them: its name, its type, or
    its size where that must be."""
    rows = as_rows(rows)
    # The engine numbers what its lanes do, and tells what the contents differ by itself.
    place = np.flatnonzero(is_numbered(rows) & ~rows.known("peer") & ~rows.known("stage"))
    rank = rows.whole("rank")[place]
    if not len(rank) or rank.min() == rank.max():
        return None
    key = numbers(rows, place)
    differ = np.zeros(len(place), bool)
    order = np.argsort(key, kind="stable")
    begins = np.flatnonzero(np.append(True, np.diff(key[order]) != 0)) if len(order) else np.empty(0, np.int64)
    bytes_ = np.where(rows.are("name", *SAME_BYTES), rows.whole("bytes", -1), -1)[place]
    for codes in (rows.codes("name")[0][place], rows.codes("dtype")[0][place], bytes_):
        values = codes[order]
        known = values >= 0
        low = np.minimum.reduceat(np.where(known, values, np.iinfo(np.int64).max), begins)
        high = np.maximum.reduceat(np.where(known, values, -1), begins)
        differ[order] |= np.repeat(low < high, np.diff(np.append(begins, len(order))))
    if not differ.any():
        return None
    comm = rows.take(COMM, place)
    found = comm[differ]
    # Of each, when the last rank was there: that is the moment at which they disagreed.
    first = key[differ][np.argmin(asked_ns(found).fillna(np.iinfo(np.int64).max).to_numpy(np.int64))]
    chosen = comm[key == first]
    return mismatch({int(row["rank"]): operation_of(row) for row in chosen.to_dict("records")})


def operation_of(row: Mapping[Any, Any], peer: int | None = None, waited: bool = False) -> Communication:
    """The communication of a row."""

    def number(name: str) -> int | None:
        return None if pd.isna(row[name]) else int(row[name])

    dtype, tag = row["dtype"], number("tag")
    return Communication(
        str(row["name"]), str(row["group"]), int(row["seq"]), int(row["start_ns"]), number("bytes"),
        None if pd.isna(dtype) else str(dtype), number("root"), peer, -1 if tag is None else tag, waited,
    )  # fmt: skip
