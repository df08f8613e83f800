"""The chain of a device of which phases, communications and waits of its streams were timed by events on them.

What the device does in a phase is taken as work, but for the waits in it. It begins a phase at the latest of: the end
of what was before on its stream, and its launch; it ends one no earlier than the host has launched the last of it. How
long it stands idle inside a phase is not seen: of one that ends as soon as the host has launched it to the end, what it
takes longer than usual is taken to be so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.run import RunInfo
from dsprof.schema import HOST_SYNC

from ..align.match import Matches, asked_ns
from ..arrays import Int
from ..budget.intervals import Intervals
from ..budget.lanes import MAIN
from ..budget.step_budget import RankTime
from ..budget.stream_waits import AT_ONCE_NS, ended_together
from .chains import LAUNCH, STEP, SYNC, Chain, Flows, RankChains, StreamTime, ThreadTime
from .device_phases import DevicePhases, device_phases, host_steps, step_ends
from .events import BACKWARD, ISSUE, WAIT, WAIT_GRADIENTS, Program
from .gathers import (
    Gathers,
    awaited,
    ended_before,
    find_gathers,
    issued_from,
    places,
    reductions_awaited,
)

MOST_LATENCY_NS: Final = 1_000_000
"""From a launch to its operation, where the device has nothing else to do: no more is taken to be that."""
BOUND_NS: Final = 1_000_000
"""A phase that ends so soon after the host has launched its end is taken to have waited for that."""
USUAL: Final = 25
"""Percentile of a phase's lengths that it takes when the host does not hold it up."""
NONE: Final = -1
ANCHOR: Final = -1
"""No event, but a moment between which and its neighbours others lie."""


def phase_chain(
    time: RankTime, program: Program, rows: pd.DataFrame, collectives: pd.DataFrame, matches: Matches,
    run: RunInfo | None,
) -> RankChains | None:  # fmt: skip
    """The chains of a rank, its device's first; None where its phases were not timed on a device.

    program: what the training thread issued and waited for
    """
    phases = device_phases(rows)
    if phases is None:
        return None
    numbers, begin, end = host_steps(rows)
    ended = step_ends(rows)
    numbers, at = np.intersect1d(numbers, ended.index.to_numpy(np.int64), return_indices=True)[:2]
    begin, end = begin[at], end[at]
    if not len(numbers):
        return None
    made = _PhaseStream(phases, rows, time, collectives, matches, run)
    made.phases_begin_and_end()
    made.communicate()
    made.synchronize()
    made.end_steps(numbers, end, ended[numbers].to_numpy(np.int64))
    stream, host, flows = made.finish()
    count = len(time.lane_tasks)
    of_thread = time.of_thread
    program = _without_early_waits(program, collectives)
    merged = tuple(np.concatenate(pair) for pair in zip(program, _own(host, count), strict=True))
    return RankChains(
        (
            Chain(phases.lane, _own(stream, count), made.time()),
            Chain("host", merged, ThreadTime(of_thread, made.stood), numbers, begin, end),
        ),
        time,
        time.lane_tasks,
        flows,
        made.launching,
        made.behind,
    )


def _own(program: Program, count: int) -> Program:
    """`program`, whose own tasks are flows, which follow so many others."""
    what, target, when, ended, action, own = program
    return what, np.where(own == 1, target + count, target), when, ended, action, own


def _without_early_waits(program: Program, collectives: pd.DataFrame) -> Program:
    """Of what the training thread waited for, what had ended by then: for a device's communication it is its stream
    that waits."""
    what, target, when, _, _, own = program
    end = np.append(collectives["end_ns"].to_numpy(np.int64), 0)
    early = (what == WAIT) & (own == 0) & (end[target] > when + BOUND_NS)
    return tuple(column[~early] for column in program)


class _PhaseStream:
    """The program of the stream, as it is put together in the order in which the host launched it."""

    def __init__(
        self, phases: DevicePhases, rows: pd.DataFrame, time: RankTime, collectives: pd.DataFrame, matches: Matches,
        run: RunInfo | None,
    ) -> None:  # fmt: skip
        self._phases, self._rows = phases, rows
        self._collectives, self._matches, self._run = collectives, matches, run
        self._idle: list[tuple[Int, Int]] = []
        self._unknown = Intervals.empty()
        self.stood = Intervals.empty()
        self.launching = self.behind = Intervals.empty()
        # Order of launch, and among what is launched at one moment; what, when (NaN: not known), target, flow or not.
        self._key: list[Int] = []
        self._turn: list[Int] = []
        self._what: list[Int] = []
        self._when: list[npt.NDArray[np.float64]] = []
        self._target: list[Int] = []
        self._flow: list[Int] = []
        self._flows: list[tuple[str, Int, Int]] = []
        self._host: list[tuple[int, Int, Int]] = []
        self._reducing: list[tuple[int, int, int]] = []  # of backwards: issue, end of the host's, the stream's wait
        self._count = 0
        self._limits: tuple[Int, Int] = np.empty(0, np.int64), np.empty(0, np.int64)
        self._gathers = Gathers.none()

    def _put(self, key: Int, turn: int, what: int, when: npt.NDArray[np.float64] | Int, target: Int | None) -> None:
        count = len(key)
        self._key.append(key)
        self._turn.append(np.full(count, turn))
        self._what.append(np.full(count, what))
        self._when.append(np.asarray(when, np.float64))
        self._target.append(np.full(count, NONE) if target is None else target)
        self._flow.append(np.zeros(count, np.int64))

    def _flow_to_stream(self, kind: str, key: Int, turn: int, issue: Int, end: Int, when: Int) -> None:
        """The host issues it at `issue`; the stream waits for it at `when`."""
        target = self._new(kind, issue, end)
        self._put(key, turn, WAIT, when, target)
        self._flow[-1][:] = 1
        self._host.append((ISSUE, target, issue))

    def _new(self, kind: str, issue: Int, end: Int) -> Int:
        self._flows.append((kind, issue, np.maximum(issue, end)))
        first, self._count = self._count, self._count + len(issue)
        return first + np.arange(len(issue))

    # --- what is on the stream

    def phases_begin_and_end(self) -> None:
        of = self._phases
        before = np.append(np.iinfo(np.int64).min, np.maximum.accumulate(of.end)[:-1])
        idle = of.start > before + AT_ONCE_NS
        took = (of.start - of.issue)[idle & (of.start - of.issue < MOST_LATENCY_NS)]
        self.latency = max(int(np.percentile(took, USUAL)), 0) if len(took) else 0
        there = np.clip(of.issue + self.latency, np.minimum(before, of.start), of.start)
        self._idle.append((before[1:], there[1:]))
        self._flow_to_stream(LAUNCH, of.issue, 0, of.issue, np.minimum(of.issue + self.latency, there), there)
        backward = of.name == "backward"
        self._put(of.issue[backward], 1, BACKWARD, of.start[backward], None)
        self._put(of.issue[~backward], 1, ANCHOR, of.start[~backward], None)
        # Its end: of one that had to wait for the host, what it takes longer than usual it stood idle.
        length = of.end - of.start
        bound = of.end - (of.host_end + self.latency) < BOUND_NS
        usual = np.zeros(len(length))
        for name in np.unique(of.name.astype(str)).tolist():
            mine = of.name == name
            usual[mine] = np.percentile(length[mine], USUAL)
        longer = np.where(bound, np.maximum(length - usual, 0), 0).astype(np.int64)
        self._idle.append((of.end - longer, of.end))
        # Until the host has launched the last of it the device may stand idle inside, which is not seen.
        reached = np.minimum(of.host_end + self.latency, of.end)
        self.launching = Intervals.union(of.start, reached)
        late = np.clip(of.start - (of.issue + self.latency), 0, None)
        self.behind = Intervals.union(of.start, np.minimum(of.start + late, reached))
        self._flow_to_stream(LAUNCH, of.host_end, 0, of.host_end, reached, of.end)

    def communicate(self) -> None:
        rows = self._rows
        comm = rows[(rows["kind"] == "comm") & rows["seq"].notna() & rows["arrival_ns"].notna()]
        comm = comm[comm["issue_ns"].notna() & comm["dur_ns"].notna()]
        target = self._matches.find(comm, self._run) if self._matches.unique and len(comm) else np.empty(0, np.int64)
        comm, target = comm[target >= 0], target[target >= 0]
        if comm.empty:
            self._waits()
            return
        arrival = comm["arrival_ns"].to_numpy(np.int64)
        end = arrival + comm["dur_ns"].to_numpy(np.int64)
        issue = asked_ns(comm).to_numpy(np.int64)
        # One that began as soon as the one before on its own stream had ended: when the stream that computes had got
        # to it is not seen, unless another stream issued it, which tells when it had got to it.
        issued_at, issuer = issued_from(rows, comm, self._phases.lane)
        by_another = ~np.isnan(issued_at)
        at = np.where(by_another, issued_at, arrival)
        lane = comm["lane"].astype(str).to_numpy(object)
        queued = np.abs(arrival - ended_before(lane, arrival, end)) < AT_ONCE_NS
        reached = np.where(queued & ~by_another, np.nan, at)
        gathers = by_another & (comm["purpose"] == "parameter").to_numpy(bool)

        moment = np.rint(at).astype(np.int64)

        def gathered(taken: Int) -> Gathers:
            return find_gathers(gathers, issuer, lane, issue, moment, end, target, taken)

        reduces = (comm["purpose"] == "gradient").to_numpy(bool)

        def reduced(key: Int, over: Int, known: Int) -> Int:
            return reductions_awaited(issue, reduces, end, target, key, over, known)

        taken = self._waits(gathered(np.empty(0, np.int64)), reduced if gathers.any() else None)
        self._gathers = gathered(taken)
        # The last that a backward reduces is issued with its last gradient.
        for begin, end_of_host, first in self._reducing:
            inside = np.flatnonzero((issue >= begin) & (issue <= end_of_host))
            if len(inside):
                last = inside[issue[inside].argmax()]
                reached[last] = min(first, arrival[last])
        self._put(issue[~gathers], 2, ISSUE, reached[~gathers], target[~gathers])

    def _waits(self, gathers: Gathers | None = None, reduced: Callable[[Int, Int, Int], Int] | None = None) -> Int:
        """Of the stream, for communications. Of those that do not say for which, one that took time was for what ended
        as it did, and one that took none for what was gathered. Returns when the stream went on, ascending."""
        rows, of = self._rows, self._phases
        waits = rows[(rows["kind"] == "wait") & (rows["lane"] == of.lane) & rows["dur_ns"].notna()]
        waits = waits[waits["issue_ns"].notna()].sort_values(["issue_ns", "start_ns"], kind="stable")
        if waits.empty:
            return np.empty(0, np.int64)
        start = waits["start_ns"].to_numpy(np.int64)
        end = start + waits["dur_ns"].to_numpy(np.int64)
        key = waits["issue_ns"].to_numpy(np.int64).copy()
        target = np.full(len(waits), NONE)
        named = waits["seq"].notna().to_numpy(bool)
        if named.any() and self._matches.unique:
            target[named] = self._matches.find(waits[named], self._run)
        target[~named] = ended_together(start[~named], end[~named], rows, self._matches, self._run)
        if reduced is not None:
            target = reduced(key, end, target)
        if gathers is not None:
            target = awaited(gathers, key, start, target)
        bound = target != NONE
        self._unknown = Intervals.union(start[~bound], end[~bound])
        self._idle.append((start[bound], end[bound]))
        derived = bound & (waits["source"] == "derived").to_numpy(bool)
        own = bound & ~derived
        self._put(key[own], 3, ANCHOR, start[own], None)
        self._put(key[own], 4, WAIT, end[own], target[own])
        self._reduced(key[derived], start[derived], end[derived])
        return np.sort(end[own])

    def _reduced(self, issue: Int, start: Int, end: Int) -> None:
        """DDP's reducer has the stream wait for all gradients at the end of a backward, which was issued then: for as
        many as are still under way, one after the other."""
        of = self._phases
        which = np.flatnonzero((of.name == "backward") & np.isin(of.issue, issue))
        at = np.searchsorted(of.issue[which], issue)
        known = np.isin(issue, of.issue[which])
        at, start, end = at[known], start[known], end[known]
        first, last = np.full(len(which), np.iinfo(np.int64).max), np.zeros(len(which), np.int64)
        np.minimum.at(first, at, start)
        np.maximum.at(last, at, end)
        self._reducing = list(zip(of.issue[which].tolist(), of.host_end[which].tolist(), first.tolist(), strict=True))
        key = of.host_end[which] - 1
        self._put(key, 3, ANCHOR, first, None)
        self._put(key, 4, WAIT_GRADIENTS, last, None)

    def synchronize(self) -> None:
        """Where the training thread waits for the device: until what it had launched by then is over. A call that came
        back before waited for nothing, such as a copy from memory that is not pinned; it may have wanted a core."""
        rows = self._rows
        chosen = (
            (rows["kind"] == "mark") & (rows["name"] == HOST_SYNC) & (rows["lane"] == MAIN) & rows["dur_ns"].notna()
        )
        marks = rows[["start_ns", "dur_ns"]][chosen].sort_values("start_ns", kind="stable")
        if marks.empty:
            return
        begin = marks["start_ns"].to_numpy(np.int64)
        end = begin + marks["dur_ns"].to_numpy(np.int64)
        stood = (end - begin > AT_ONCE_NS) & (self._reached(begin) <= end + AT_ONCE_NS)
        begin, end = begin[stood], end[stood]
        target = self._new(SYNC, begin, end)
        self._put(begin, 5, ISSUE, end - self.latency, target)
        self._flow[-1][:] = 1
        self._host.append((WAIT, target, end))
        self.stood = Intervals.union(begin, end)

    def _reached(self, launched: Int) -> Int:
        """When the device had got to the last beginning or end of a phase that was launched before each moment."""
        of = self._phases
        begun = np.searchsorted(of.issue, launched, "left") - 1
        over = np.searchsorted(of.host_end, launched, "left") - 1
        start, end = np.append(of.start, 0)[begun], np.append(np.maximum.accumulate(of.end), 0)[over]
        found: Int = np.where(begun >= 0, np.maximum(start, end), 0)
        return found

    def end_steps(self, numbers: Int, host: Int, ended: Int) -> None:
        """A step is over when both chains are through with it: host, ended: when the host was, and when both were."""
        self._flow_to_stream(STEP, host, 9, host, np.minimum(host, ended), ended)
        self._idle.append((self._last_before(ended), ended))
        self._limits = host, ended

    def _last_before(self, when: Int) -> Int:
        """The end of the last phase that had begun before each moment."""
        of = self._phases
        at = np.searchsorted(of.start, when, "left") - 1
        last: Int = np.where(at >= 0, np.maximum.accumulate(of.end)[np.maximum(at, 0)], when)
        return np.minimum(last, when)

    # --- all together

    def finish(self) -> tuple[Program, Program, Flows]:
        """The programs of the stream and of the host, and the flows between them."""
        key, turn, what, target, flow = (
            np.concatenate(part) for part in (self._key, self._turn, self._what, self._target, self._flow)
        )
        when = np.concatenate(self._when)
        order = np.lexsort((turn, key))
        what, target, flow, when, key = what[order], target[order], flow[order], when[order], key[order]
        moments = self._in_order(when, key)
        what, target, flow, moments = self._with_gathers(key, what, target, flow, moments)
        kept = what != ANCHOR
        what, target, flow, moments = what[kept], target[kept], flow[kept], moments[kept]
        zero = np.zeros(len(what), np.int64)
        stream = what, target, moments, np.where(what == ISSUE, -1, moments), zero, flow
        issue, end, kind = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, object))
        for name, issued, ended in self._flows:
            issue, end = np.append(issue, issued), np.append(end, ended)
            kind = np.append(kind, np.full(len(issued), name, object))
        # A sync is issued where the stream has got to it.
        sent = (what == ISSUE) & (flow == 1)
        issue[target[sent]] = moments[sent]
        end = np.maximum(end, np.minimum(issue, end))
        host_what = np.concatenate([np.full(len(at), what) for what, _, at in self._host])
        host_target = np.concatenate([of for _, of, _ in self._host])
        host_when = np.concatenate([at for _, _, at in self._host])
        # What the host does last in a step is of that step.
        host_when = host_when - ((host_what == ISSUE) & np.isin(host_when, self._limits[0]))
        none = np.zeros(len(host_what), np.int64)
        host = host_what, host_target, host_when, host_when, none, none + 1
        return stream, host, Flows(kind, issue, end)

    def _with_gathers(self, key: Int, what: Int, target: Int, flow: Int, moments: Int) -> tuple[Int, Int, Int, Int]:
        """The stream's program with gathers that another one issues, each where the stream was when it did."""
        if not len(self._gathers):
            return what, target, flow, moments
        place, at, gathered = places(self._gathers, moments, key, *self._limits)
        what, target, flow = (np.insert(of, place, new) for of, new in ((what, ISSUE), (target, gathered), (flow, 0)))
        return what, target, flow, np.maximum.accumulate(np.insert(moments, place, at))

    def _in_order(self, when: npt.NDArray[np.float64], key: Int) -> Int:
        """The moments of what was launched in this order: in order too, each in the step in which it was launched. What
        is not known lies evenly between its neighbours."""
        index = np.arange(len(when))
        known = np.isfinite(when)
        base = when[known].min()
        filled = np.interp(index, index[known], when[known] - base)
        moments = np.rint(filled).astype(np.int64) + int(base)
        host, ended = self._limits
        at = np.searchsorted(host, key, "left")
        limit = np.append(ended, np.iinfo(np.int64).max // 2)[at] - 1
        moments = np.minimum(moments, limit)
        moments = np.maximum.accumulate(moments - index) + index
        latest = np.minimum(moments, limit) - index
        ordered: Int = np.minimum.accumulate(latest[::-1])[::-1] + index
        return ordered

    def time(self) -> StreamTime:
        of = self._phases
        idle = Intervals.empty()
        for start, end in self._idle:
            idle = idle | Intervals.union(start, end)
        optimizer = of.name == "optimizer"
        steps = Intervals.union(of.start[optimizer], of.end[optimizer])
        return StreamTime(idle, {"optimizer": steps, "other": self._unknown - steps})
