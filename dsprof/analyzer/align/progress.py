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

from ..columns import codes_of
from .match import asked_ns, global_ranks, numbers

COMM: Final = (
    "rank", "name", "group", "seq", "peer", "tag", "root", "start_ns", "dur_ns", "ended", "issue_ns", "arrival_ns",
    "bytes", "dtype", "stage", "source",
)  # fmt: skip


def communications(rows: pd.DataFrame) -> pd.DataFrame:
    """Those that have a number, with the columns COMM."""
    numbered = (rows["kind"] == "comm") & rows["group"].notna() & rows["seq"].notna()
    return rows.loc[numbered, list(COMM)]


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


def find_progress(comm: pd.DataFrame, ranks: tuple[int, ...], run: RunInfo) -> Progress:
    """Of the `communications` of all ranks; ranks: of which anything was seen."""
    opened = comm[~comm["ended"].fillna(True).astype(bool)]
    issued: dict[int, dict[str, int]] = defaultdict(dict)
    messages: dict[int, dict[tuple[str, int, int, str], int]] = defaultdict(dict)
    if len(opened):
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
    return Progress(ranks, opened, dict(issued), dict(messages), bool((comm["source"] == "imported").any()))


def first_disagreement(comm: pd.DataFrame) -> Stall | None:
    """The first collective, of the `communications` of all ranks, that is not the same on all of them: its name, its
    type, or its size where that must be."""
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
