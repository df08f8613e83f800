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
from typing import Any, Final

import numpy as np
import pandas as pd

from dsprof.run import RunInfo
from dsprof.schema import BUDGET_PARTS, SHARDING

from ..align.match import Matches
from ..arrays import Bool, Int
from ..columns import RankRows, as_rows
from .intervals import Intervals
from .label import NOTHING, PHASE_PART, Parts, add, innermost_of, labelled, labels_of
from .labelled_time import LabelledTime
from .lane_tasks import LaneTasks
from .lanes import MAIN, OWN_LANES, Lanes, bind_waits

LAYERS: Final = (
    "pause", "peer_wait", "comm_exposed", "bubble", "outside_training", "offload", "data", "optimizer", "compute",
)  # fmt: skip
"""In order of precedence. `outside_training` is no part of the budget: it counts as `other`."""
COMPUTE: Final = LAYERS.index("compute")
OF_STEP: Final = ("rank", "step", "start_ns", "dur_ns")
KNOWN: Final = ("evaluation", "checkpointing", "compilation")
"""Kinds of time that are not training."""
WORK: Final = ("compute", "data", "optimizer", "offload", "pause", "other")
"""Parts that are a rank's own doing; the rest is waiting for others."""
THREAD_WORK: Final = ("phase", "pipe", "module", "copy", "launch", "pause")
"""Kinds of rows that say that the training thread does something."""

NO_TABLE: Final = pd.DataFrame()
COPY: Final = "copy"
BEHIND: Final = ("offload", "data", "optimizer", "compute")
"""What a wait for another lane is labelled with; a pause within it, or a checkpoint, is labelled over that."""


@dataclass(frozen=True)
class RankTime:
    """One rank's time, labelled: label `k` is LAYERS[k]."""

    rank: int
    labelled: LabelledTime
    waits: pd.DataFrame
    """Of the training thread: start_ns, end_ns, arrival_ns (of the last peer, within the wait), collective (row of the
    matched table, NOTHING: none or unknown), derived, bubble, named (whether it says what for); lane, part and
    lane_task, of a wait for what another lane does (see `lanes.Lanes.name`)."""
    outside_training: Mapping[str, Intervals] = field(default_factory=dict)
    """Kind of schema.TIME_KINDS -> when it was under way."""
    device: Intervals = field(default_factory=Intervals.empty)
    """The steps that a device's stream ends."""
    sharding: Intervals = field(default_factory=Intervals.empty)
    """The part of compute that is the framework's own work for shards and buckets: rows named schema.SHARDING."""
    lane_tasks: LaneTasks = field(default_factory=LaneTasks.none)
    """What was issued to lanes of this rank alone."""
    thread: LabelledTime | None = None
    """Where a device ends steps, `labelled` of the training thread alone; else none, as `labelled` is."""
    unbound: Intervals = field(default_factory=Intervals.empty)
    """The waits of which it is not known what for."""
    unseen_messages: Intervals = field(default_factory=Intervals.empty)
    """Those of them that name a message of a pipeline, of which nothing is known: as where the rank that it is from was
    not captured."""
    for_lane_tasks: Intervals = field(default_factory=Intervals.empty)
    """The waits for `lane_tasks`."""

    @property
    def of_thread(self) -> RankTime:
        """The training thread's time, whatever the device does meanwhile."""
        # Not kept where it is this one: what refers to itself stays until Python's garbage collector comes by.
        return self if self.thread is None else self._beside_device

    @cached_property
    def _beside_device(self) -> RankTime:
        assert self.thread is not None
        sharding, device = self.sharding & self.thread.spans(COMPUTE), Intervals.empty()
        unbound, unseen_messages, for_lane_tasks = _waited(self.waits, device)
        return replace(
            self, labelled=self.thread, device=device, sharding=sharding, thread=None, unbound=unbound,
            unseen_messages=unseen_messages, for_lane_tasks=for_lane_tasks,
        )  # fmt: skip

    def without_waits(self) -> RankTime:
        """All but the table of waits, which is large."""
        return replace(self, waits=NO_TABLE)

    def without_unseen_messages(self) -> RankTime:
        """The same, where waits for these messages are no time of the thread's own."""
        return replace(self, unbound=self.unbound - self.unseen_messages, unseen_messages=Intervals.empty())

    def before(self, when: Int, within: Intervals | None = None) -> dict[str, Int]:
        """Layer -> time of that layer before each moment, ns; `other` not among them. `within`: only that in it."""
        labelled = self.labelled
        found = labelled.before(when) if within is None else labelled.before_within(when, within)
        return dict(zip(LAYERS, found, strict=True))

    def of_part(self, part: str, when: Int) -> Int:
        """The time of one of LAYERS before each moment, ns."""
        return self.labelled.of_label(LAYERS.index(part), when)


def label_time(
    rows: pd.DataFrame | RankRows,
    collectives: pd.DataFrame,
    rank: int,
    run: RunInfo | None = None,
    outside_training: Mapping[str, Intervals] | None = None,
    matches: Matches | None = None,
) -> RankTime:
    """Assign every moment of `rank` to a part. `rows` are that rank's; `matches` are of `collectives`, and made here if
    they are not given."""
    rows = as_rows(rows)
    matches = matches or (Matches(collectives) if len(collectives) else None)
    main = rows.are("lane", MAIN) & rows.known("dur_ns")
    phases = _phases_and_copies(rows, main)
    phases["outside_training"] = labelled(outside_training or {})
    lanes = Lanes(rows, collectives, run, matches, phases)
    waits = bind_waits(rows, collectives, run, matches, lanes)
    own = _of_thread(rows, main, waits, phases, lanes)
    device = _device_steps(rows, main, lanes)
    thread: LabelledTime | None = None
    if len(device.start):
        thread = _labelled(own)
        theirs = dict(lanes.does(lanes.compute_stream()))
        add(theirs, own)
        own = {part: (own[part] - device) | (theirs.get(part, Intervals.empty()) & device) for part in LAYERS}
    time = _labelled(own)
    sharding = _when(rows, main & rows.are("kind", "module") & rows.are("name", SHARDING)) & time.spans(COMPUTE)
    return RankTime(
        rank, time, waits, dict(outside_training or {}), device, sharding, lanes.tasks, thread, *_waited(waits, device)
    )


def _waited(waits: pd.DataFrame, device: Intervals) -> tuple[Intervals, Intervals, Intervals]:
    """When the thread waited and the device did not end the step: for what is not known, of that for messages, and for
    its own lanes."""
    start, end, collective, lane, task, bubble, named = (
        waits[name].to_numpy() for name in ("start_ns", "end_ns", "collective", "lane", "lane_task", "bubble", "named")
    )
    unknown = (collective == NOTHING) & (lane == NOTHING) & ~waits["derived"].to_numpy(bool)
    unbound, unseen_messages, own = (
        Intervals.union(start[chosen].astype(np.int64), end[chosen].astype(np.int64)) - device
        for chosen in (unknown, unknown & bubble & named, task != NOTHING)
    )
    return unbound, unseen_messages, own


def _when(rows: RankRows, chosen: Bool) -> Intervals:
    """When any of the chosen rows, which have ended, was under way."""
    start = rows.whole("start_ns")[chosen]
    return Intervals.union(start, start + rows.whole("dur_ns")[chosen])


def _of_thread(rows: RankRows, main: Bool, waits: pd.DataFrame, phases: Parts, lanes: Lanes) -> Parts:
    """LAYERS -> what of the training thread's time goes to each alone. `main`: which rows are that thread's, and have
    ended."""
    start, end = waits["start_ns"].to_numpy(np.int64), waits["end_ns"].to_numpy(np.int64)
    arrival, bubble = waits["arrival_ns"].to_numpy(np.int64), waits["bubble"].to_numpy(bool)
    for_lane = (waits["lane"] != NOTHING).to_numpy(bool) & ~bubble
    sends = ~bubble & ~for_lane
    own = {
        "pause": _when(rows, main & rows.are("kind", "pause")),
        "peer_wait": Intervals.union(start[sends], arrival[sends]),
        "comm_exposed": Intervals.union(arrival[sends], end[sends]),
        "bubble": Intervals.union(start[bubble], end[bubble]),
        **phases,
    }
    own["compute"] = own["compute"] | _scheduled(rows, main)
    if for_lane.any():
        behind = lanes.behind(waits[for_lane])
        within = labelled(behind)
        for part in BEHIND:
            own[part] = own[part] - within
        for part, spans in behind.items():
            own[part] = own[part] | spans
    return own


def _labelled(own: Mapping[str, Intervals]) -> LabelledTime:
    return LabelledTime.of([own[part] for part in LAYERS])


def _phases_and_copies(rows: RankRows, main: Bool) -> Parts:
    """Part -> when a phase of the training thread, or a copy of its own, was the innermost one under way."""
    parts = tuple(dict.fromkeys((*PHASE_PART.values(), "offload")))
    there = np.flatnonzero(main & rows.are("kind", "phase"))
    label = labels_of(*rows.codes("name"), {**PHASE_PART, COPY: "offload"}, parts)[there]
    copied = rows.are("kind", COPY)
    if copied.any():
        copies = np.flatnonzero(copied & rows.are("lane", *OWN_LANES) & rows.known("dur_ns"))
        there = np.concatenate([there, copies])
        label = np.concatenate([label, np.full(len(copies), parts.index("offload"))])
    start = rows.whole("start_ns")[there]
    return innermost_of(start, start + rows.whole("dur_ns")[there], label, parts)


def _device_steps(rows: RankRows, main: Bool, lanes: Lanes) -> Intervals:
    """The steps in which the device still works when the training thread has done all of its own."""
    if lanes.compute_stream() == NOTHING:
        return Intervals.empty()
    step = rows.whole("step")
    works = main & rows.are("kind", *THREAD_WORK)
    end = pd.Series((rows.whole("start_ns") + rows.whole("dur_ns"))[works])
    thread = end.groupby(step[works]).max()
    numbers, ended = lanes.ends()
    later = numbers[ended > thread.reindex(numbers, fill_value=np.iinfo(np.int64).min).to_numpy(np.int64)]
    return _when(rows, main & rows.are("kind", "step") & np.isin(step, later))


def _scheduled(rows: RankRows, main: Bool) -> Intervals:
    """From the first to the last action of a pipeline in each step: what the schedule itself does in between."""
    acted = np.flatnonzero(main & rows.are("kind", "pipe"))
    if not len(acted):
        return Intervals.empty()
    start, step = rows.whole("start_ns")[acted], rows.whole("step")[acted]
    end = start + rows.whole("dur_ns")[acted]
    order = np.argsort(step, kind="stable")
    begins = np.flatnonzero(np.append(True, np.diff(step[order]) != 0))
    return Intervals.union(np.minimum.reduceat(start[order], begins), np.maximum.reduceat(end[order], begins))


def step_budget(times: Mapping[int, RankTime], steps: pd.DataFrame) -> pd.DataFrame:
    """`steps` (rank, step, start_ns, dur_ns) with a column in ms for each budget part; they sum to dur_ns / 1e6.

    Beside them `apart_ms`, which is part of `other`, and `<kind>_ms` for each kind of time in it.
    """
    return in_ms(time_of_parts(times, steps))


def time_of_parts(times: Mapping[int, RankTime], steps: pd.DataFrame) -> pd.DataFrame:
    """`steps` with a column in ns for each of LAYERS and each kind of time outside training: as tasks send them."""
    columns: dict[str, Int] = {name: np.zeros(len(steps), np.int64) for name in (*LAYERS, *KNOWN)}
    starts, lengths = steps["start_ns"].to_numpy(np.int64), steps["dur_ns"].to_numpy(np.int64)
    of = steps["rank"].to_numpy(np.int64)
    by_rank = np.argsort(of, kind="stable")
    for rank, time in times.items():
        chosen = by_rank[slice(*np.searchsorted(of[by_rank], [rank, rank + 1]))]
        start = starts[chosen]
        end = start + lengths[chosen]
        upto_start, upto_end = time.before(start), time.before(end)
        for part in LAYERS:
            columns[part][chosen] = upto_end[part] - upto_start[part]
        for kind, spans in time.outside_training.items():
            columns[kind][chosen] = spans.before(end) - spans.before(start)
    return steps.assign(**columns)


def in_ms(steps: pd.DataFrame) -> pd.DataFrame:
    """`step_budget` of the steps that `time_of_parts` was told."""
    spent = {name: steps[name].to_numpy(np.int64) for name in (*LAYERS, *KNOWN)}
    labelled = sum((spent[part] for part in LAYERS if part != "outside_training"), np.zeros(len(steps), np.int64))
    spent["other"] = steps["dur_ns"].to_numpy(np.int64) - labelled
    names = {part: part for part in BUDGET_PARTS}
    names |= {"apart_ms": "outside_training", **{f"{kind}_ms": kind for kind in sorted(KNOWN)}}
    columns: dict[str, Any] = {name: steps[name].array for name in OF_STEP}
    for name, part in names.items():
        ns = spent.pop(part)
        columns[name] = ns / 1e6 if ns.any() else np.zeros(len(ns))  # of large ones, pages that nobody writes to
    return pd.DataFrame(columns, copy=False)
