"""Where each rank's step went. Every moment of the training thread belongs to one part, so the parts sum to the step.

A moment that several claim goes to the first of: a pause of the interpreter; a wait (for a peer, then for the bytes); a
wait for another stage of the pipeline, which is a bubble; data; the optimizer; compute (forward, loss, backward). What
nothing explains is `other`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.schema import BUDGET_PARTS, SYNCHRONIZING

from .intervals import Int, Intervals

Float = npt.NDArray[np.float64]

LAYERS: Final = ("pause", "peer_wait", "comm_exposed", "bubble", "data", "optimizer", "compute")
"""In order of precedence."""
PHASE_PART: Final = {
    "data": "data",
    "optimizer": "optimizer",
    "clip": "optimizer",
    "forward": "compute",
    "loss": "compute",
    "backward": "compute",
}
WORK: Final = ("compute", "data", "optimizer", "pause", "other")
"""Parts that are a rank's own doing; the rest is waiting for others."""

BINDING_SLACK_NS: Final = 2_000_000
"""A thread is woken this much after its collective ended, at most, to count as having waited for it."""


@dataclass(frozen=True)
class RankTime:
    """One rank's training thread, painted: `layers[k]` is all that LAYERS[: k + 1] claim together."""

    rank: int
    layers: tuple[Intervals, ...]
    waits: pd.DataFrame
    """start_ns, end_ns, arrival_ns (of the last peer, within the wait), collective (row of the matched table, -1:
    unknown), derived."""

    def before(self, when: Int) -> dict[str, Int]:
        """Part -> time of that part before each moment, ns; `other` not among them."""
        covered = [layer.before(when) for layer in self.layers]
        below = [np.zeros_like(when), *covered[:-1]]
        return {part: upper - lower for part, upper, lower in zip(LAYERS, covered, below, strict=True)}


def paint(rows: pd.DataFrame, collectives: pd.DataFrame, rank: int) -> RankTime:
    """Assign every moment of `rank`'s training thread to a part. `rows` are that rank's."""
    main = rows[(rows["lane"] == "main") & rows["dur_ns"].notna()]
    start = main["start_ns"].to_numpy(np.int64)
    end = start + main["dur_ns"].to_numpy(np.int64)
    kind = main["kind"].astype(str).to_numpy(object)
    part = main["name"].astype(str).map(PHASE_PART).to_numpy(object)
    waits = _bind_waits(rows, collectives)
    wait_start, wait_end = waits["start_ns"].to_numpy(np.int64), waits["end_ns"].to_numpy(np.int64)
    arrival = waits["arrival_ns"].to_numpy(np.int64)

    stage_waits = (kind == "wait") & (main["purpose"] == "pipeline").to_numpy(bool)
    own: dict[str, Intervals] = {
        "pause": Intervals.union(start[kind == "pause"], end[kind == "pause"]),
        "peer_wait": Intervals.union(wait_start, arrival),
        "comm_exposed": Intervals.union(arrival, wait_end),
        "bubble": Intervals.union(start[stage_waits], end[stage_waits]),
    }
    for name in ("data", "optimizer", "compute"):
        chosen = (kind == "phase") & (part == name)
        own[name] = Intervals.union(start[chosen], end[chosen])
    layers, so_far = [], Intervals.empty()
    for name in LAYERS:
        so_far = so_far | own[name]
        layers.append(so_far)
    return RankTime(rank, tuple(layers), waits)


def _bind_waits(rows: pd.DataFrame, collectives: pd.DataFrame) -> pd.DataFrame:
    """What each wait waited for: of the collectives this rank had issued, the last to end by the end of the wait."""
    of_collectives = rows["purpose"].ne("pipeline").fillna(True)
    waits = rows[
        (rows["kind"] == "wait") & (rows["lane"] == "main") & rows["dur_ns"].notna() & of_collectives
    ].sort_values("start_ns")
    start = waits["start_ns"].to_numpy(np.int64)
    end = start + waits["dur_ns"].to_numpy(np.int64)
    arrival, bound = start.copy(), np.full(len(start), -1, np.int64)
    mine = rows[(rows["kind"] == "comm") & rows["issue_ns"].notna() & rows["dur_ns"].notna()]
    if len(mine) and len(collectives):
        own = pd.DataFrame(
            {
                "group": mine["group"].astype(str),
                "seq": mine["seq"].astype("int64"),
                "issue_ns": mine["issue_ns"],
                # This rank's own end: the ranks' ends of one collective lie milliseconds apart on a busy host.
                "own_end_ns": mine["start_ns"] + mine["dur_ns"].astype("int64"),
            }
        )
        table = collectives.reset_index(names="collective").merge(own, on=["group", "seq"]).sort_values("own_end_ns")
        done, issued = table["own_end_ns"].to_numpy(np.int64), table["issue_ns"].to_numpy(np.int64)
        last, index = table["last_ns"].to_numpy(np.int64), table["collective"].to_numpy(np.int64)
        synchronizes = table["name"].isin(SYNCHRONIZING).to_numpy()
        ended_before = np.searchsorted(done, end + BINDING_SLACK_NS, side="right")
        for i, upto in enumerate(ended_before):
            for k in range(upto - 1, max(upto - 65, -1), -1):
                if done[k] <= start[i]:
                    break
                if issued[k] <= start[i]:
                    bound[i] = index[k]
                    arrival[i] = last[k] if synchronizes[k] else start[i]
                    break
    derived = (waits["source"] == "derived").to_numpy()
    columns = {
        "start_ns": start,
        "end_ns": end,
        "arrival_ns": np.clip(arrival, start, end),
        "collective": bound,
        "derived": derived,
    }
    return pd.DataFrame(columns)


def step_budget(times: dict[int, RankTime], steps: pd.DataFrame) -> pd.DataFrame:
    """`steps` (rank, step, start_ns, dur_ns) with a column in ms for each budget part; they sum to dur_ns / 1e6."""
    parts: dict[str, Float] = {part: np.zeros(len(steps)) for part in BUDGET_PARTS}
    for rank, time in times.items():
        chosen = (steps["rank"] == rank).to_numpy()
        start = steps.loc[chosen, "start_ns"].to_numpy(np.int64)
        end = start + steps.loc[chosen, "dur_ns"].to_numpy(np.int64)
        upto_start, upto_end = time.before(start), time.before(end)
        explained = np.zeros(len(start))
        for part in LAYERS:
            spent = (upto_end[part] - upto_start[part]) / 1e6
            parts[part][chosen] = spent
            explained += spent
        parts["other"][chosen] = (end - start) / 1e6 - explained
    return steps.assign(**parts)
