"""Which ranks are stages of a pipeline, and which sends and receives are its.

A schedule that was seen (`pipe` rows) says it itself. Else it is told by who sends to whom: what is sent after forwards
forms a chain that what is sent after backwards runs in reverse. Where the sends after forwards form a cycle, it is a
ring, whose ranks all do the same work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from dsprof.run import RunInfo

from ..columns import RankRows, as_rows
from .match import asked_ns, global_ranks
from .participants import is_issued

PIPELINE = "pipeline"

Edge = tuple[int, int]


@dataclass(frozen=True)
class Topology:
    """stage_of: rank -> the stages it holds, ascending; empty without a pipeline. `pipelines`: process groups whose
    messages are a pipeline's."""

    stage_of: dict[int, tuple[int, ...]] = field(default_factory=dict)
    pipelines: frozenset[str] = frozenset()


def find_topology(rows: pd.DataFrame | RankRows, run: RunInfo) -> Topology:
    """The pipelines of the run. `rows` of all ranks; their `pipe` rows, forwards, backwards, sends and receives."""
    rows = as_rows(rows)
    acted = np.flatnonzero(rows.are("kind", "pipe") & rows.known("stage"))
    held = np.unique(np.stack([rows.whole("rank")[acted], rows.whole("stage")[acted]], axis=1), axis=0)
    stages: dict[int, list[int]] = {}
    for rank, stage in held.tolist():
        stages.setdefault(rank, []).append(stage)
    stage_of = {rank: tuple(of_rank) for rank, of_rank in stages.items()}
    sent = rows.are("kind", "comm") & rows.known("peer") & rows.are("name", "send") & is_issued(rows)
    if not sent.any():
        return Topology(stage_of)
    sends = rows.take(("rank", "group", "peer", "issue_ns", "arrival_ns"), np.flatnonzero(sent))
    table = pd.DataFrame(
        {
            "group": sends["group"].astype(str),
            "source": sends["rank"].astype("int64"),
            "target": global_ranks(sends["group"], sends["peer"], run).astype("int64"),
            "after": _phase_before(sends, rows.table),
        }
    ).drop_duplicates()
    pipelines = set()
    for group, edges in table.groupby("group"):
        forward, backward = (_edges(edges[edges["after"] == name]) for name in ("forward", "backward"))
        if stage_of:
            apart = {stage_of.get(a) != stage_of.get(b) for a, b in forward | backward}
            if apart == {True}:
                pipelines.add(str(group))
        elif (depth := _depths(forward)) and backward and backward <= {(b, a) for a, b in forward}:
            pipelines.add(str(group))
            stage_of |= {rank: (stage,) for rank, stage in depth.items()}
    return Topology(stage_of, frozenset(pipelines))


def name_pipeline_messages(rows: pd.DataFrame, topology: Topology) -> pd.DataFrame:
    """Rows with the purpose `pipeline` on the sends, receives and waits of pipelines."""
    if not topology.pipelines:
        return rows
    chosen = rows["peer"].notna() & rows["kind"].isin(["comm", "wait"]) & rows["group"].isin(topology.pipelines)
    if not chosen.any():
        return rows
    purpose = rows["purpose"].astype("category")
    if PIPELINE not in purpose.cat.categories:
        purpose = purpose.cat.add_categories([PIPELINE])
    purpose[chosen] = PIPELINE
    return rows.assign(purpose=purpose)


def _edges(table: pd.DataFrame) -> set[Edge]:
    return set(zip(table["source"].tolist(), table["target"].tolist(), strict=True))


def _phase_before(sends: pd.DataFrame, rows: pd.DataFrame) -> pd.Series[str]:
    """The forward or backward of its rank that began last before each send; empty before the first."""
    names = np.array(["forward", "backward", ""], dtype=object)
    begun = (rows["kind"] == "phase") & rows["name"].isin(names[:2])
    phases = rows[["rank", "name", "start_ns"]][begun]
    rank = np.concatenate([sends["rank"].to_numpy(np.int64), phases["rank"].to_numpy(np.int64)])
    when = np.concatenate([asked_ns(sends).to_numpy(np.int64), phases["start_ns"].to_numpy(np.int64)])
    what = np.concatenate([np.full(len(sends), -1), (phases["name"] == "backward").to_numpy(np.int64)])
    order = np.lexsort((what, when, rank))
    at = np.where(what[order] >= 0, np.arange(len(order)), -1)
    last = np.maximum.accumulate(at)
    same = (last >= 0) & (rank[order][last] == rank[order])
    found = np.empty(len(order), np.int64)
    found[order] = np.where(same, what[order][last], -1)
    return pd.Series(names[found[: len(sends)]], sends.index)


def _depths(edges: Iterable[Edge]) -> dict[int, int]:
    """Node -> length of the longest way to it; empty for edges that form a cycle, or none."""
    targets: dict[int, set[int]] = {}
    missing: dict[int, int] = {}
    for source, target in edges:
        targets.setdefault(source, set()).add(target)
        missing.setdefault(source, 0)
        missing[target] = missing.get(target, 0) + 1
    depth = {node: 0 for node, count in missing.items() if count == 0}
    ready = list(depth)
    while ready:
        node = ready.pop()
        for target in targets.get(node, ()):
            depth[target] = max(depth.get(target, 0), depth[node] + 1)
            missing[target] -= 1
            if missing[target] == 0:
                ready.append(target)
    return depth if len(depth) == len(missing) and all(count == 0 for count in missing.values()) else {}
