"""What the lanes of a rank did when, whichever runs them: threads, the engine's lanes, a device's streams.

A lane's time is its rows': a copy is `offload`, a kernel `compute`, a phase what phases are, and a communication
`peer_wait` until the last rank has come, then `comm_exposed`; of a stream whose phases are timed as a whole, its waits
come before them. What a device does for the optimizer, for loading or for
an evaluation is told by when it was launched. A lane that stands still does what it waits for: a wait row says what
that is, and a stream's gap is for what of another stream ended last before it was over, unless the next operation had
not been launched by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

import numpy as np
import pandas as pd

from dsprof.run import RunInfo

from ..align.match import PAIRED, Matches, when_asked
from ..align.participants import NOT_TOLD
from ..align.topology import PIPELINE
from ..arrays import Bool, Int
from ..columns import RankRows, codes_of, is_one_of
from .intervals import Intervals
from .label import NOTHING, PHASE_PART, Parts, add, innermost_of, labels
from .lane_tasks import LANE_TASK_COLUMNS, LaneTasks, find_lane_tasks
from .stream_waits import ended_together

KIND_PART: Final = {"copy": "offload", "kernel": "compute"}
LAUNCHED_FOR: Final = ("optimizer", "data", "outside_training")
"""What a launched operation takes over from where it was launched."""
DOES: Final = ("compute", "offload", "comm_exposed", "optimizer", "data", "outside_training", "other")
"""What a row of a lane can be; `other` paints nothing."""

MAIN: Final = "main"
OWN_LANES: Final = (MAIN, "autograd")
"""The training thread, and what works while it is inside backward."""
STREAM: Final = "cuda."
"""How a device's streams begin; all other lanes are threads."""

BINDING_SLACK_NS: Final = 2_000_000
"""A thread is woken this much after its collective ended, at most, to count as having waited for it."""
STREAM_SLACK_NS: Final = 100_000
"""A stream goes on this much after another, at most, to count as having waited for it, where no launch is known."""
MOST_UNDER_WAY: Final = 64
"""Collectives that are looked at, of those that ended last, for what an unnamed wait waited for."""
WAITING: Final = (*PAIRED, "purpose", "source", "corr", "start_ns", "dur_ns")
WORKING: Final = tuple(dict.fromkeys((*PAIRED, *LANE_TASK_COLUMNS, "lane", "step", "corr", "start_ns", "dur_ns")))
NO_WORK: Final = pd.DataFrame(columns=list(WORKING))


class Lanes:
    """The lanes beside the training thread of one rank, as far as they do more than to communicate for it.

    launched: `innermost` phases of the training thread, and `outside_training`, when it was not training
    tasks:    what was issued to those of them that take it in order
    """

    def __init__(
        self,
        rows: RankRows,
        collectives: pd.DataFrame,
        run: RunInfo | None,
        matches: Matches | None,
        launched: Mapping[str, Intervals],
    ) -> None:
        self._rows, self._collectives, self._run, self._matches = rows, collectives, run, matches
        works = rows.are("kind", "copy", "kernel", "phase") & ~rows.are("lane", MAIN)
        told = on_stream(rows.table["lane"]) | rows.known("corr")
        chosen = (works | (rows.are("kind", "comm") & told)) & rows.known("dur_ns")
        beside = np.flatnonzero(chosen & ~rows.are("lane", *OWN_LANES))
        self.tasks = LaneTasks.none()
        self._work = work = rows.take(WORKING, beside) if len(beside) else NO_WORK
        if not len(work):  # so it is where only the training thread matters
            return
        self._lane, names = codes_of(work["lane"])
        self.names = names.tolist()
        self._stream = on_stream(work["lane"])
        self._comm = (work["kind"] == "comm").to_numpy(bool)
        self._start = work["start_ns"].to_numpy(np.int64)
        self._end = self._start + work["dur_ns"].to_numpy(np.int64)
        self.busy = cache(self._busy)
        self.does = cache(self._does)
        self._corr = work["corr"].to_numpy(np.int64, na_value=NOTHING)
        self._launch = self._launches()
        self._label = self._tell(launched)
        # A device's streams wait for one another, which is no order of issue.
        threads = ~self._stream
        self._task = np.full(len(work), NOTHING)
        self.tasks, self._task[threads] = find_lane_tasks(
            work[threads], names[self._lane[threads]], self._start[threads], self._end[threads]
        )

    def __bool__(self) -> bool:
        return bool(len(self._work))

    def _launches(self) -> Int:
        """When each operation was launched, NOTHING: unknown; by the call that launched it, else as it says itself."""
        rows = self._rows
        calls = rows.are("kind", "launch") & rows.known("corr")
        found = _look_up(rows.whole("corr")[calls], rows.whole("start_ns")[calls], self._corr)
        return np.where(found != NOTHING, found, self._work["issue_ns"].to_numpy(np.int64, na_value=NOTHING))

    def _tell(self, launched: Mapping[str, Intervals]) -> Int:
        kind = self._work["kind"]
        label = labels(kind, KIND_PART, DOES)
        of_phase = (kind == "phase").to_numpy(bool)
        label[of_phase] = labels(self._work["name"], PHASE_PART, DOES)[of_phase]
        for part in LAUNCHED_FOR:
            inside = launched.get(part, Intervals.empty()).holds(self._launch)
            if part == "optimizer":  # a thread that reads its states from a disk copies, whoever asked for it
                inside = inside & self._stream
            label[(label >= 0) & ~of_phase & (self._launch != NOTHING) & inside] = DOES.index(part)
        label[self._comm] = DOES.index("comm_exposed")
        return label

    # --- what a lane does

    def _busy(self, lane: int) -> Parts:
        """What a lane did itself."""
        mine = (self._lane == lane) & ~self._comm
        sends = (self._lane == lane) & self._comm
        found: Parts = {}
        if sends.any():
            start, end = self._start[sends], self._end[sends]
            arrival = self._arrivals(self._work[sends], start, end)
            add(found, {"peer_wait": Intervals.union(start, arrival)})
            add(found, {"comm_exposed": Intervals.union(arrival, end)})
        add(found, innermost_of(self._start[mine], self._end[mine], self._label[mine], DOES))
        return found

    def _arrivals(self, comm: pd.DataFrame, start: Int, end: Int) -> Int:
        """When the last of whoever each communication depends on had come, within it; its start where that is not
        known."""
        arrival = start.copy()
        numbered = comm["seq"].notna().to_numpy(bool)
        if self._matches is None or not self._matches.unique or not numbered.any():
            return arrival
        target = self._matches.find(comm[numbered], self._run)
        known = np.flatnonzero(numbered)[target != NOTHING]
        ranks = comm["rank"].to_numpy(np.int64)[known]
        arrival[known] = self._matches.arrivals(target[target != NOTHING], ranks)
        return np.clip(arrival, start, end)

    def _does(self, lane: int) -> Parts:
        """What a lane did, itself or in others that it waited for."""
        if not self.names[lane].startswith(STREAM):
            return dict(self.busy(lane))
        waits = bind_waits(self._rows, self._collectives, self._run, self._matches, self, self.names[lane])
        told = waits[waits["collective"] != NOTHING]
        purpose = self._collectives["purpose"].iloc[told["collective"].to_numpy(np.int64)]
        bubble = told["bubble"].to_numpy(bool) | (purpose == PIPELINE).to_numpy(bool)
        start, arrival, end = (told[f"{name}_ns"].to_numpy(np.int64) for name in ("start", "arrival", "end"))
        found = {"bubble": Intervals.union(start[bubble], end[bubble])}
        add(found, {"peer_wait": Intervals.union(start[~bubble], arrival[~bubble])})
        add(found, {"comm_exposed": Intervals.union(arrival[~bubble], end[~bubble])})
        add(found, self.behind(waits, deep=False))
        add(found, self.busy(lane))  # a phase that is timed as a whole holds its waits
        begin, finish, others = self._gaps(lane)
        for other in np.unique(others).tolist():
            within = Intervals.union(begin[others == other], finish[others == other])
            add(found, {part: spans & within for part, spans in self.busy(other).items()})
        return found

    def _gaps(self, lane: int) -> tuple[Int, Int, Int]:
        """Begin and end of each gap of a stream that another one is the cause of, and which."""
        mine = np.flatnonzero(self._lane == lane)
        mine = mine[np.argsort(self._start[mine], kind="stable")]
        over = int(self._end[self._stream].max())
        begin = np.maximum.accumulate(self._end[mine])
        finish = np.append(self._start[mine][1:], over)
        launch = np.append(self._launch[mine][1:], NOTHING)
        others = np.flatnonzero(self._stream & (self._lane != lane))
        others = others[np.argsort(self._end[others], kind="stable")]
        at = np.searchsorted(self._end[others], finish, "right") - 1
        ended = np.append(self._end[others], NOTHING)[at]
        since = np.where(launch != NOTHING, launch, finish - STREAM_SLACK_NS)
        chosen = (at >= 0) & (ended > begin) & (ended >= since)
        return begin[chosen], finish[chosen], self._lane[others[at[chosen]]]

    # --- what waits for a lane

    def name(self, waits: RankRows) -> tuple[RankRows, Int, Int, Int]:
        """What `waits` (WAITING) were for: as they are, but those for a communication of a lane with its number; the
        lane that ran it, NOTHING: none of these; which part that is, place in DOES; and which of the lanes'
        tasks.

        A wait is for the row with its `corr`; without one, and without a number, for what has its name: of several,
        issued before it, the one that ended last by the end of the wait.
        """
        lane, part, task = (np.full(len(waits), NOTHING) for _ in range(3))
        if not self or not len(waits):
            return waits, lane, part, task
        every = np.arange(len(self._corr))[self._corr != NOTHING]
        row = _look_up(self._corr[every], every, waits.whole("corr", NOTHING))
        unnamed = ~waits.known("corr") & ~waits.known("seq")
        start = waits.whole("start_ns")
        end = start + waits.whole("dur_ns") + BINDING_SLACK_NS
        issue = self._work["issue_ns"].to_numpy(np.int64, na_value=0)
        names = waits.table["name"].astype(str)
        own = self._work["kind"].isin(["copy", "phase"]).to_numpy(bool)
        for name in sorted(set(names[unnamed]) & set(self._work["name"][own].astype(str))):
            there = np.flatnonzero(own & (self._work["name"] == name).to_numpy(bool))
            there = there[np.argsort(self._end[there], kind="stable")]
            mine = np.flatnonzero(unnamed & (names == name).to_numpy(bool))
            issued = np.searchsorted(np.maximum.accumulate(issue[there]), start[mine], "right")
            at = np.minimum(np.searchsorted(self._end[there], end[mine], "right"), issued) - 1
            row[mine] = np.where(at >= 0, there[at], NOTHING)
        numbered = np.append(self._comm & self._work["seq"].notna().to_numpy(bool), False)[row]
        known = (row != NOTHING) & ~numbered
        lane[known], part[known], task[known] = (of[row[known]] for of in (self._lane, self._label, self._task))
        if numbered.any():
            told = waits.table.copy()
            columns = [name for name in PAIRED if name != "rank"]
            for column in columns:
                values = told[column].astype(object)
                values[numbered] = self._work[column].astype(object).to_numpy()[row[numbered]]
                told[column] = values.astype(self._work[column].dtype)
            waits = RankRows(told)
        return waits, lane, part, task

    def behind(self, waits: pd.DataFrame, *, deep: bool = True) -> Parts:
        """What was done in the waits for a lane: what that lane did then, else what it was that they were for. `deep`:
        so also what that lane itself waited for."""
        found: Parts = {}
        start, end = waits["start_ns"].to_numpy(np.int64), waits["end_ns"].to_numpy(np.int64)
        lane, part = waits["lane"].to_numpy(np.int64), waits["part"].to_numpy(np.int64)
        for one in np.unique(lane[lane != NOTHING]).tolist():
            within = Intervals.union(start[lane == one], end[lane == one])
            does = self.does(one) if deep else self.busy(one)
            add(found, {name: spans & within for name, spans in does.items()})
        for place, name in enumerate(DOES[:-1]):
            mine = (lane != NOTHING) & (part == place)
            if mine.any():
                add(found, {name: Intervals.union(start[mine], end[mine])})
        return found

    # --- which lane ends a step

    def compute_stream(self) -> int:
        """The stream that computes: the one whose kernels take longest, NOTHING: none was seen."""
        if not self:
            return NOTHING
        kernel = (self._work["kind"] == "kernel").to_numpy(bool) & self._stream
        if not kernel.any():
            return NOTHING
        spent = np.bincount(self._lane[kernel], (self._end - self._start)[kernel])
        return int(spent.argmax())

    def ends(self) -> tuple[Int, Int]:
        """Number of each step that the device works for, and when it had done that."""
        step = self._work["step"].to_numpy(np.int64)[self._stream]
        steps, of = np.unique(step, return_inverse=True)
        last = np.full(len(steps), np.iinfo(np.int64).min)
        np.maximum.at(last, of, self._end[self._stream])
        return steps, last


def on_stream(lane: pd.Series[str]) -> Bool:
    """Which rows are a device's."""
    if not isinstance(lane.dtype, pd.CategoricalDtype):
        lane = lane.astype("category")
    names = lane.dtype.categories.tolist()
    return is_one_of(lane, *(name for name in names if str(name).startswith(STREAM)))


def _look_up(keys: Int, values: Int, wanted: Int) -> Int:
    """The value of each wanted key, NOTHING: there is none."""
    order = np.argsort(keys, kind="stable")
    if not len(order):
        return np.full(len(wanted), NOTHING)
    at = np.minimum(np.searchsorted(keys[order], wanted), len(order) - 1)
    found: Int = np.where((keys[order[at]] == wanted) & (wanted != NOTHING), values[order[at]], NOTHING)
    return found


def bind_waits(
    rows: RankRows,
    collectives: pd.DataFrame,
    run: RunInfo | None,
    matches: Matches | None,
    lanes: Lanes,
    lane: str = MAIN,
) -> pd.DataFrame:
    """What each wait on a lane waited for (columns of `RankTime.waits`). `rows` and `lanes` are of one rank.

    A wait that names it is taken at its word. Another of the training thread, of an older capture or inside C++, is
    taken to have waited for that collective, of those this rank had issued, that ended last by the end of the wait;
    one of a device's stream for that which ended as it did.
    """
    there = np.flatnonzero(rows.are("kind", "wait") & rows.are("lane", lane) & rows.known("dur_ns"))
    there = there[np.argsort(rows.whole("start_ns")[there], kind="stable")]
    waits, for_lane, part, task = lanes.name(RankRows(rows.take(WAITING, there)))
    start = waits.whole("start_ns")
    end = start + waits.whole("dur_ns")
    bubble, named = waits.are("purpose", PIPELINE), waits.known("seq")
    arrival, bound = start.copy(), np.full(len(waits), NOTHING, np.int64)
    if len(collectives) and len(waits):
        matches = matches or Matches(collectives)
        if matches.unique:  # else a rank was captured twice, and none can be told from the other
            bound[named] = matches.find_at(waits, np.flatnonzero(named), run)
        if lane == MAIN:
            # One for a copy whose record is missing is no wait for a collective.
            guessed = ~named & ~bubble & (for_lane == NOTHING) & ~waits.known("corr")
            bound[guessed] = _guess(start[guessed], end[guessed], rows, matches)
        elif lane.startswith(STREAM):
            untold = ~named & (for_lane == NOTHING) & ~waits.known("corr")
            bound[untold] = ended_together(start[untold], end[untold], rows.table, matches, run)
        known = bound != NOTHING
        rank = np.full(int(known.sum()), rows.whole("rank")[0], np.int64)
        arrival[known] = np.maximum(matches.arrivals(bound[known], rank), start[known])
    return pd.DataFrame(
        {
            "start_ns": start,
            "end_ns": end,
            "arrival_ns": np.clip(arrival, start, end),
            "collective": bound.astype(np.int32),
            "derived": waits.are("source", "derived"),
            "bubble": bubble,
            "named": named,
            "lane": for_lane.astype(np.int32),
            "part": part.astype(np.int8),
            "lane_task": task.astype(np.int32),
        },
        copy=False,
    )


def _guess(start: Int, end: Int, rows: RankRows, matches: Matches) -> Int:
    bound = np.full(len(start), NOTHING, np.int64)
    if not len(start):
        return bound
    asked = when_asked(rows)
    own = rows.are("kind", "comm") & (asked != NOT_TOLD) & rows.known("dur_ns")
    own = np.flatnonzero(own & ~rows.known("peer") & rows.known("seq"))
    index = matches.find_at(rows, own)
    # This rank's own end: the ranks' ends of one collective lie milliseconds apart on a busy host.
    done = rows.whole("start_ns")[own] + rows.whole("dur_ns")[own]
    order = np.lexsort((index, done))
    order = order[index[order] != NOTHING]
    if not len(order):
        return bound
    done, issue, index = done[order], asked[own[order]], index[order]
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
