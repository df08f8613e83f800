"""Where each rank's step went. Every moment belongs to one part, so the parts sum to the step.

A step is followed along its critical lane, the one that ends it: the training thread, or the stream that computes where
the device goes on after the thread. Where that lane waits for another one of its rank, what that one does is labelled;
where a stream waits for nothing that is known, what the training thread does.

A moment of the training thread that several claim goes to the first of: a pause of the interpreter; a wait (for a peer,
then for the bytes); a wait for another stage of the pipeline, which is a bubble; evaluation, checkpoints and
compilation; the innermost phase or copy; a pipeline's schedule, between its actions.
What nothing explains is `other`, and so is what is not training at all (`outside_training`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np
import pandas as pd

from dsprof.run import RunInfo
from dsprof.schema import BUDGET_PARTS, SHARDING

from ..align.match import Matches
from ..arrays import Float, Int
from ..columns import is_one_of
from .intervals import Intervals
from .label import NOTHING, PHASE_PART, Parts, add, innermost, labelled, spans_of
from .lane_tasks import LaneTasks
from .lanes import MAIN, OWN_LANES, Lanes, bind_waits

LAYERS: Final = (
    "pause", "peer_wait", "comm_exposed", "bubble", "outside_training", "offload", "data", "optimizer", "compute",
)  # fmt: skip
"""In order of precedence. `outside_training` is no part of the budget: it counts as `other`."""
WORK: Final = ("compute", "data", "optimizer", "offload", "pause", "other")
"""Parts that are a rank's own doing; the rest is waiting for others."""
THREAD_WORK: Final = ("phase", "pipe", "module", "copy", "launch", "pause")
"""Kinds of rows that say that the training thread does something."""

COPY: Final = "copy"
BEHIND: Final = ("offload", "data", "optimizer", "compute")
"""What a wait for another lane is labelled with; a pause within it, or a checkpoint, is labelled over that."""


@dataclass(frozen=True)
class RankTime:
    """One rank's time, labelled: `layers[k]` is all that LAYERS[: k + 1] claim together."""

    rank: int
    layers: tuple[Intervals, ...]
    waits: pd.DataFrame
    """Of the training thread: start_ns, end_ns, arrival_ns (of the last peer, within the wait), collective (row of the
    matched table, NOTHING: none or unknown), derived, bubble; lane, part and lane_task, of a wait for what another lane
    does (see `lanes.Lanes.name`)."""
    outside_training: Mapping[str, Intervals] = field(default_factory=dict)
    """Kind of schema.TIME_KINDS -> when it was under way."""
    device: Intervals = field(default_factory=Intervals.empty)
    """The steps that a device's stream ends."""
    sharding: Intervals = field(default_factory=Intervals.empty)
    """The part of compute in which parameters are gathered or sharded anew."""
    lane_tasks: LaneTasks = field(default_factory=LaneTasks.none)
    """What was issued to lanes of this rank alone."""
    thread_layers: tuple[Intervals, ...] = ()
    """Where a device ends steps, `layers` of the training thread alone; else empty, as `layers` are."""

    @cached_property
    def of_thread(self) -> RankTime:
        """The training thread's time, whatever the device does meanwhile."""
        if not self.thread_layers:
            return self
        layers, nothing = self.thread_layers, Intervals.empty()
        sharding = self.sharding & (layers[-1] - layers[-2])
        return replace(self, layers=layers, device=nothing, sharding=sharding, thread_layers=())

    @cached_property
    def unbound(self) -> Intervals:
        """The waits of which it is not known what for."""
        waits = self.waits
        waits = waits[(waits["collective"] == NOTHING) & ~waits["derived"] & (waits["lane"] == NOTHING)]
        return self._spans(waits)

    @cached_property
    def for_lane_tasks(self) -> Intervals:
        """The waits for those."""
        return self._spans(self.waits[self.waits["lane_task"] != NOTHING])

    def _spans(self, waits: pd.DataFrame) -> Intervals:
        every = Intervals.union(waits["start_ns"].to_numpy(np.int64), waits["end_ns"].to_numpy(np.int64))
        return every - self.device

    def before(self, when: Int, within: Intervals | None = None) -> dict[str, Int]:
        """Layer -> time of that layer before each moment, ns; `other` not among them. `within`: only that in it."""
        covered = [(layer if within is None else layer & within).before(when) for layer in self.layers]
        below = [np.zeros_like(when), *covered[:-1]]
        return {part: upper - lower for part, upper, lower in zip(LAYERS, covered, below, strict=True)}

    def of_part(self, part: str, when: Int) -> Int:
        """The time of one of LAYERS before each moment, ns."""
        place = LAYERS.index(part)
        upto = self.layers[place].before(when)
        return upto if not place else upto - self.layers[place - 1].before(when)


def label_time(
    rows: pd.DataFrame,
    collectives: pd.DataFrame,
    rank: int,
    run: RunInfo | None = None,
    outside_training: Mapping[str, Intervals] | None = None,
    matches: Matches | None = None,
) -> RankTime:
    """Assign every moment of `rank` to a part. `rows` are that rank's; `matches` are of `collectives`, and made here if
    they are not given."""
    ended = is_one_of(rows["lane"], MAIN) & rows["dur_ns"].notna().to_numpy(bool)
    main = rows[["kind", "name", "step", "start_ns", "dur_ns"]].take(np.flatnonzero(ended))
    phases = innermost(_phases_and_copies(main, rows), {**PHASE_PART, COPY: "offload"})
    phases["outside_training"] = labelled(outside_training or {})
    lanes = Lanes(rows, collectives, run, matches, phases)
    waits = bind_waits(rows, collectives, run, matches, lanes)
    own = _of_thread(main, waits, phases, lanes)
    device = _device_steps(main, lanes)
    thread: tuple[Intervals, ...] = ()
    if len(device.start):
        thread = _layers(own)
        theirs = dict(lanes.does(lanes.compute_stream()))
        add(theirs, own)
        own = {part: (own[part] - device) | (theirs.get(part, Intervals.empty()) & device) for part in LAYERS}
    layers = _layers(own)
    sharding = spans_of(
        main.take(np.flatnonzero(is_one_of(main["kind"], "module") & is_one_of(main["name"], SHARDING)))
    )
    compute = layers[-1] - layers[-2]
    return RankTime(rank, layers, waits, dict(outside_training or {}), device, sharding & compute, lanes.tasks, thread)


def _of_thread(main: pd.DataFrame, waits: pd.DataFrame, phases: Parts, lanes: Lanes) -> Parts:
    """LAYERS -> what of the training thread's time goes to each alone."""
    start, end = waits["start_ns"].to_numpy(np.int64), waits["end_ns"].to_numpy(np.int64)
    arrival, bubble = waits["arrival_ns"].to_numpy(np.int64), waits["bubble"].to_numpy(bool)
    for_lane = (waits["lane"] != NOTHING).to_numpy(bool) & ~bubble
    sends = ~bubble & ~for_lane
    own = {
        "pause": spans_of(main.take(np.flatnonzero(is_one_of(main["kind"], "pause")))),
        "peer_wait": Intervals.union(start[sends], arrival[sends]),
        "comm_exposed": Intervals.union(arrival[sends], end[sends]),
        "bubble": Intervals.union(start[bubble], end[bubble]),
        **phases,
    }
    own["compute"] = own["compute"] | _scheduled(main)
    if for_lane.any():
        behind = lanes.behind(waits[for_lane])
        within = labelled(behind)
        for part in BEHIND:
            own[part] = own[part] - within
        for part, spans in behind.items():
            own[part] = own[part] | spans
    return own


def _layers(own: Mapping[str, Intervals]) -> tuple[Intervals, ...]:
    layers, so_far = [], Intervals.empty()
    for name in LAYERS:
        so_far = so_far | own[name]
        layers.append(so_far)
    return tuple(layers)


def _phases_and_copies(main: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """The phases of the training thread, and what it copies, under the name COPY."""
    phases = main.take(np.flatnonzero(is_one_of(main["kind"], "phase")))
    copied = is_one_of(rows["kind"], COPY)
    if not copied.any():
        return phases
    copied &= is_one_of(rows["lane"], *OWN_LANES) & rows["dur_ns"].notna().to_numpy(bool)
    return pd.concat([phases.astype({"name": object}), rows.loc[copied, list(phases.columns)].assign(name=COPY)])


def _device_steps(main: pd.DataFrame, lanes: Lanes) -> Intervals:
    """The steps in which the device still works when the training thread has done all of its own."""
    if lanes.compute_stream() == NOTHING:
        return Intervals.empty()
    end = main["start_ns"] + main["dur_ns"].astype("int64")
    works = main["kind"].isin(THREAD_WORK)
    thread = end[works].groupby(main["step"][works]).max()
    numbers, ended = lanes.ends()
    later = numbers[ended > thread.reindex(numbers, fill_value=np.iinfo(np.int64).min).to_numpy(np.int64)]
    return spans_of(main[(main["kind"] == "step") & main["step"].isin(later)])


def _scheduled(main: pd.DataFrame) -> Intervals:
    """From the first to the last action of a pipeline in each step: what the schedule itself does in between."""
    acted = main.take(np.flatnonzero(is_one_of(main["kind"], "pipe")))
    if acted.empty:
        return Intervals.empty()
    end = acted["start_ns"] + acted["dur_ns"].astype("int64")
    first, last = acted.groupby("step")["start_ns"].min(), end.groupby(acted["step"]).max()
    return Intervals.union(first.to_numpy(np.int64), last.to_numpy(np.int64))


def step_budget(times: dict[int, RankTime], steps: pd.DataFrame) -> pd.DataFrame:
    """`steps` (rank, step, start_ns, dur_ns) with a column in ms for each budget part; they sum to dur_ns / 1e6.

    Beside them `apart_ms`, which is part of `other`, and `<kind>_ms` for each kind of time in it.
    """
    names = {kind for time in times.values() for kind in time.outside_training}
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
            if part == "outside_training":
                columns["apart_ms"][chosen] = spent
                continue
            columns[part][chosen] = spent
            explained += spent
        columns["other"][chosen] = (end - start) / 1e6 - explained
        for kind, spans in time.outside_training.items():
            columns[f"{kind}_ms"][chosen] = (spans.before(end) - spans.before(start)) / 1e6
    return steps.assign(**columns)
