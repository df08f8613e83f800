"""What ranks were waiting for when their captures ended (`dsprof.live.waiting`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pandas as pd

from dsprof.live.waiting import RankState, Stall, find_stall
from dsprof.run import RunInfo
from dsprof.trace import Trace

from ..align.match import global_ranks
from ..align.progress import Progress, operation_of

OPEN: Final = ("kind", "name", "ended", "group", "seq", "peer", "tag")


def stall_at_end(progress: Progress, phases: pd.DataFrame, trace: Trace, run: RunInfo) -> Stall | None:
    """What ranks were waiting for when their captures ended; None where none waits. `phases`: of all ranks."""
    if progress.opened.empty:
        return None

    def members(group: str) -> list[int] | None:
        return run.group(group).get("ranks") or None

    return find_stall(_states(progress, phases, trace, run), members)


def _states(progress: Progress, phases: pd.DataFrame, trace: Trace, run: RunInfo) -> Mapping[int, RankState]:
    under_way = phases[~phases["ended"].fillna(True).astype(bool)].sort_values("start_ns")
    states = {}
    whole = {item.rank: not (item.dropped or item.damaged) for item in run.ranks}
    for rank in sorted({*whole, *progress.ranks}):
        mine = progress.opened[progress.opened["rank"] == rank]
        waits = _waits(trace, rank, run) if len(mine) else set()
        names = tuple(under_way.loc[under_way["rank"] == rank, "name"].astype(str))
        operations = []
        for row, peer in zip(mine.to_dict("records"), global_ranks(mine["group"], mine["peer"], run), strict=True):
            to = None if pd.isna(peer) else int(peer)
            place = (str(row["group"]), int(row["seq"]), to, -1 if pd.isna(row["tag"]) else int(row["tag"]))
            operations.append(operation_of(row, to, place in waits))
        waiting = bool(waits) or (bool(operations) and ("backward" in names or progress.imported))
        states[rank] = RankState(
            rank, tuple(operations), {**progress.issued.get(rank, {})}, {**progress.messages.get(rank, {})}, {},
            whole=whole.get(rank, True), waiting=waiting, phases=names,
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
