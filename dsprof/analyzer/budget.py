"""Where each rank's step went. Every moment of the training thread belongs to one part, so the parts sum to the step.

A moment that several claim goes to the first of: a pause of the interpreter; a wait (for a peer, then for the bytes); a
wait for another stage of the pipeline, which is a bubble; evaluation, checkpoints and compilation; the innermost phase;
a pipeline's schedule, between its actions.
What nothing explains is `other`, and so is what is not training at all (`apart`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.run import RunInfo
from dsprof.schema import BUDGET_PARTS

from .intervals import Int, Intervals, nest
from .match import PAIRED, Matches, arrivals, codes_of
from .topology import PIPELINE

Float = npt.NDArray[np.float64]

LAYERS: Final = ("pause", "peer_wait", "comm_exposed", "bubble", "apart", "data", "optimizer", "compute")
"""In order of precedence. `apart` is no part of the budget: it counts as `other`."""
PHASE_PART: Final = {
    "data": "data",
    "loader_start": "data",
    "optimizer": "optimizer",
    "clip": "optimizer",
    "forward": "compute",
    "loss": "compute",
    "backward": "compute",
    "between": "other",
}
"""Phases that are not named belong to the one around them."""
WORK: Final = ("compute", "data", "optimizer", "pause", "other")
"""Parts that are a rank's own doing; the rest is waiting for others."""

BINDING_SLACK_NS: Final = 2_000_000
"""A thread is woken this much after its collective ended, at most, to count as having waited for it."""
MOST_UNDER_WAY: Final = 64
"""Collectives that are looked at, of those that ended last, for what an unnamed wait waited for."""
WAITING: Final = (*PAIRED, "purpose", "source", "start_ns", "dur_ns")
NOTHING: Final = -1
"""Row of the matched table, of a wait for something unknown."""


@dataclass(frozen=True)
class RankTime:
    """One rank's training thread, painted: `layers[k]` is all that LAYERS[: k + 1] claim together."""

    rank: int
    layers: tuple[Intervals, ...]
    waits: pd.DataFrame
    """start_ns, end_ns, arrival_ns (of the last peer, within the wait), collective (row of the matched table, NOTHING:
    unknown), derived, bubble."""
    apart: Mapping[str, Intervals] = field(default_factory=dict)
    """Kind of schema.TIME_KINDS -> when it was under way."""

    @cached_property
    def unbound(self) -> Intervals:
        """The waits of which it is not known what for."""
        waits = self.waits[(self.waits["collective"] == NOTHING) & ~self.waits["derived"]]
        return Intervals.union(waits["start_ns"].to_numpy(np.int64), waits["end_ns"].to_numpy(np.int64))

    def before(self, when: Int) -> dict[str, Int]:
        """Layer -> time of that layer before each moment, ns; `other` not among them."""
        covered = [layer.before(when) for layer in self.layers]
        below = [np.zeros_like(when), *covered[:-1]]
        return {part: upper - lower for part, upper, lower in zip(LAYERS, covered, below, strict=True)}


def paint(
    rows: pd.DataFrame,
    collectives: pd.DataFrame,
    rank: int,
    run: RunInfo | None = None,
    apart: Mapping[str, Intervals] | None = None,
    matches: Matches | None = None,
) -> RankTime:
    """Assign every moment of `rank`'s training thread to a part. `rows` are that rank's; `matches` are of
    `collectives`, and made here if they are not given."""
    main = rows[["kind", "name", "step", "start_ns", "dur_ns"]][(rows["lane"] == "main") & rows["dur_ns"].notna()]
    waits = bind_waits(rows, collectives, run, matches)
    start, end = waits["start_ns"].to_numpy(np.int64), waits["end_ns"].to_numpy(np.int64)
    arrival, bubble = waits["arrival_ns"].to_numpy(np.int64), waits["bubble"].to_numpy(bool)
    stalled = main[main["kind"] == "pause"]
    own = {
        "pause": spans_of(stalled),
        "peer_wait": Intervals.union(start[~bubble], arrival[~bubble]),
        "comm_exposed": Intervals.union(arrival[~bubble], end[~bubble]),
        "bubble": Intervals.union(start[bubble], end[bubble]),
        "apart": Intervals.empty(),
        **innermost(main[main["kind"] == "phase"]),
    }
    own["compute"] = own["compute"] | _scheduled(main)
    for spans in (apart or {}).values():
        own["apart"] = own["apart"] | spans
    layers, so_far = [], Intervals.empty()
    for name in LAYERS:
        so_far = so_far | own[name]
        layers.append(so_far)
    return RankTime(rank, tuple(layers), waits, dict(apart or {}))


def _scheduled(main: pd.DataFrame) -> Intervals:
    """From the first to the last action of a pipeline in each step: what the schedule itself does in between."""
    acted = main[main["kind"] == "pipe"]
    end = acted["start_ns"] + acted["dur_ns"].astype("int64")
    first, last = acted.groupby("step")["start_ns"].min(), end.groupby(acted["step"]).max()
    return Intervals.union(first.to_numpy(np.int64), last.to_numpy(np.int64))


def spans_of(rows: pd.DataFrame) -> Intervals:
    """When any of `rows`, which have ended, was under way."""
    start = rows["start_ns"].to_numpy(np.int64)
    return Intervals.union(start, start + rows["dur_ns"].to_numpy(np.int64))


def innermost(phases: pd.DataFrame, parts: Mapping[str, str] = PHASE_PART) -> dict[str, Intervals]:
    """Part -> when a phase of that part was the innermost one under way on the thread. `parts`: of each name."""
    codes, words = codes_of(phases["name"])
    of_part = list(parts.values())
    place = np.array([of_part.index(parts[word]) if word in parts else NOTHING for word in words.tolist()] + [NOTHING])
    label = place[codes]
    start = phases["start_ns"].to_numpy(np.int64)[label >= 0]
    end = start + phases["dur_ns"].to_numpy(np.int64)[label >= 0]
    label = label[label >= 0]
    order = np.lexsort((-end, start))
    start, end, label = start[order], end[order], label[order]
    end, parent = nest(start, end)
    # At each moment of a begin or an end, from then on: what begins, or what it was inside of; of several that end or
    # begin at once the outermost that ends and the innermost that begins, which is what comes last here.
    there = np.flatnonzero(end > start)
    when = np.concatenate([start[there], end[there]])
    turn = np.concatenate([there, -there - 1])
    then = np.concatenate([label[there], np.append(label, NOTHING)[parent[there]]])
    order = np.lexsort((turn, when))
    when, then = when[order], then[order]
    found = {}
    for name in set(of_part) - {"other"}:
        mine = np.flatnonzero(then[:-1] == of_part.index(name)) if len(then) else np.empty(0, np.int64)
        found[name] = Intervals.union(when[mine], when[mine + 1])
    return found


def bind_waits(
    rows: pd.DataFrame, collectives: pd.DataFrame, run: RunInfo | None = None, matches: Matches | None = None
) -> pd.DataFrame:
    """What each wait on the training thread waited for (columns of `RankTime.waits`). `rows` are of one rank.

    A wait that names it is taken at its word. Another, of an older capture or inside C++, is taken to have waited for
    that collective, of those this rank had issued, that ended last by the end of the wait.
    """
    chosen = (rows["kind"] == "wait") & (rows["lane"] == "main") & rows["dur_ns"].notna()
    waits = rows[list(WAITING)][chosen].sort_values("start_ns")
    start = waits["start_ns"].to_numpy(np.int64)
    end = start + waits["dur_ns"].to_numpy(np.int64)
    bubble = waits["purpose"].eq(PIPELINE).fillna(False).to_numpy(bool)
    named = waits["seq"].notna().to_numpy(bool)
    bound = np.full(len(waits), NOTHING, np.int64)
    if len(collectives) and len(waits):
        matches = matches or Matches(collectives)
        if matches.unique:  # else a rank was captured twice, and none can be told from the other
            bound[named] = matches.find(waits[named], run)
        guessed = ~named & ~bubble
        bound[guessed] = _guess(start[guessed], end[guessed], rows, matches)
    arrival = start.copy()
    known = bound != NOTHING
    if known.any():
        target = collectives.iloc[bound[known]]
        rank = np.full(len(target), int(rows["rank"].iloc[0]), np.int64)
        arrival[known] = np.maximum(arrivals(target, rank), start[known])
    return pd.DataFrame(
        {
            "start_ns": start,
            "end_ns": end,
            "arrival_ns": np.clip(arrival, start, end),
            "collective": bound,
            "derived": (waits["source"] == "derived").to_numpy(),
            "bubble": bubble,
        }
    )


def _guess(start: Int, end: Int, rows: pd.DataFrame, matches: Matches) -> Int:
    bound = np.full(len(start), NOTHING, np.int64)
    if not len(start):
        return bound
    issued = (rows["kind"] == "comm") & rows["issue_ns"].notna() & rows["dur_ns"].notna() & rows["peer"].isna()
    own = rows[[*PAIRED, "issue_ns", "start_ns", "dur_ns"]][issued & rows["seq"].notna()]
    index = matches.find(own)
    # This rank's own end: the ranks' ends of one collective lie milliseconds apart on a busy host.
    done = own["start_ns"].to_numpy(np.int64) + own["dur_ns"].to_numpy(np.int64)
    order = np.lexsort((index, done))
    order = order[index[order] != NOTHING]
    if not len(order):
        return bound
    done, issue, index = done[order], own["issue_ns"].to_numpy(np.int64)[order], index[order]
    last = np.searchsorted(done, end + BINDING_SLACK_NS, side="right")
    open_ = np.arange(len(start))  # the waits that have not found theirs
    for back in range(1, MOST_UNDER_WAY + 1):
        open_ = open_[last[open_] >= back]
        open_ = open_[done[last[open_] - back] > start[open_]]
        at = last[open_] - back
        hit = issue[at] <= start[open_]
        bound[open_[hit]] = index[at[hit]]
        open_ = open_[~hit]
        if not len(open_):
            break
    return bound


def step_budget(times: dict[int, RankTime], steps: pd.DataFrame) -> pd.DataFrame:
    """`steps` (rank, step, start_ns, dur_ns) with a column in ms for each budget part; they sum to dur_ns / 1e6.

    Beside them `apart_ms`, which is part of `other`, and `<kind>_ms` for each kind of time in it.
    """
    names = {kind for time in times.values() for kind in time.apart}
    columns: dict[str, Float] = {part: np.zeros(len(steps)) for part in BUDGET_PARTS}
    columns |= {f"{name}_ms": np.zeros(len(steps)) for name in ("apart", *sorted(names))}
    starts, lengths = steps["start_ns"].to_numpy(np.int64), steps["dur_ns"].to_numpy(np.int64)
    of_rank = steps.groupby("rank").indices
    for rank, time in times.items():
        chosen = of_rank.get(rank, np.empty(0, np.int64))
        start = starts[chosen]
        end = start + lengths[chosen]
        upto_start, upto_end = time.before(start), time.before(end)
        explained = np.zeros(len(start))
        for part in LAYERS:
            spent = (upto_end[part] - upto_start[part]) / 1e6
            if part == "apart":
                columns["apart_ms"][chosen] = spent
                continue
            columns[part][chosen] = spent
            explained += spent
        columns["other"][chosen] = (end - start) / 1e6 - explained
        for kind, spans in time.apart.items():
            columns[f"{kind}_ms"][chosen] = (spans.before(end) - spans.before(start)) / 1e6
    return steps.assign(**columns)
