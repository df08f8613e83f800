"""The chains of a device whose kernels were traced: its streams, one chain each.

An operation begins at the latest of: the end of the one before it on its stream, its launch, and what its stream was
told to wait for. Where the trace has the calls that tell (Kineto's `cuda_sync` events), the next operation of a stream
waits for the last one that was launched on the other stream before the event was recorded there. Where it has none, an
operation that had been launched, on a stream that was free, and that began as soon as one of another stream had ended,
is taken to have waited for that one. A host that synchronizes waits for what ended last by then of what it had
launched. A communication begins when all ranks' streams have got to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pandas as pd

from dsprof.run import RunInfo
from dsprof.schema import EVENT_RECORDED, STREAM_WAIT

from ..align.match import Matches
from ..arrays import Bool, Int
from ..budget.intervals import Intervals
from ..budget.lanes import MAIN, STREAM
from ..budget.step_budget import RankTime
from ..columns import Words, codes_of, may_hold
from .chains import DEPENDS, LAUNCH, STEP, SYNC, Chain, Flows, RankChains, StreamTime, ThreadTime
from .events import ISSUE, OWN, WAIT, Program

KINDS: Final = ("kernel", "copy", "comm")
"""What a device does."""
SYNCHRONIZES: Final = ("DeviceSynchronize", "StreamSynchronize", "EventSynchronize", "Memcpy")
"""How the names of calls end in which the host waits for the device."""
AT_ONCE_NS: Final = 20_000
"""What begins so soon after something has ended is taken to have waited for it."""
ALREADY_NS: Final = 2_000
"""A wait that is over as soon as this after what it waited for."""
USUAL: Final = 10
"""Percentile of the times from a launch to its operation, on a free stream, that it takes at least."""
NONE: Final = -1
EVER: Final = 1 << 62


@dataclass(frozen=True)
class _DeviceOperations:
    """K of a rank's device, by start. stream: place in `names`; launch: NONE: not known; target: row of the matched
    table, NONE: no communication of several ranks, or none that was matched."""

    names: Words
    stream: Int
    start: Int
    end: Int
    launch: Int
    target: Int
    step: Int
    optimizer: Bool

    def of_stream(self, stream: int) -> Int:
        return np.flatnonzero(self.stream == stream)


def kernel_chains(
    time: RankTime, program: Program, rows: pd.DataFrame, collectives: pd.DataFrame, matches: Matches,
    run: RunInfo | None,
) -> RankChains | None:  # fmt: skip
    """The chains of a rank, that of the stream that computes first, and its host's last; None where no kernel was
    traced, or not when kernels were launched."""
    operations = _operations(rows, matches, run)
    if operations is None or not (operations.launch != NONE).any():
        return None
    steps = _TracedSteps.find(rows, operations)
    if not len(steps.numbers):
        return None
    return _ChainMaker(operations, steps, time, program).chains(rows)


def _operations(rows: pd.DataFrame, matches: Matches, run: RunInfo | None) -> _DeviceOperations | None:
    if not may_hold(rows["kind"], lambda kind: kind == "kernel"):
        return None
    lane, names = codes_of(rows["lane"])
    of_stream = np.append([name.startswith(STREAM) for name in names.tolist()], False).astype(bool)[lane]
    kind = rows["kind"].isin(KINDS).to_numpy(bool) & rows["dur_ns"].notna().to_numpy(bool)
    chosen = np.flatnonzero(of_stream & kind & (rows["source"] != "measured").to_numpy(bool))
    table = rows.iloc[chosen]
    if not (table["kind"] == "kernel").any():
        return None
    start = table["start_ns"].to_numpy(np.int64)
    order = np.argsort(start, kind="stable")
    table, start, chosen = table.iloc[order], start[order], chosen[order]
    target = np.full(len(table), NONE)
    numbered = ((table["kind"] == "comm") & table["seq"].notna() & table["group"].notna()).to_numpy(bool)
    if numbered.any() and matches.unique:
        target[numbered] = matches.find(table[numbered], run)
    phases = rows[(rows["kind"] == "phase") & (rows["name"] == "optimizer") & rows["dur_ns"].notna()]
    begun = phases["start_ns"].to_numpy(np.int64)
    stepping = Intervals.union(begun, begun + phases["dur_ns"].to_numpy(np.int64))
    launch = table["issue_ns"].to_numpy(np.int64, na_value=NONE)
    return _DeviceOperations(
        names, lane[chosen], start, start + table["dur_ns"].to_numpy(np.int64), launch, target,
        table["step"].to_numpy(np.int64), stepping.holds(launch),
    )  # fmt: skip


@dataclass(frozen=True)
class _TracedSteps:
    """numbers: [N] ascending; begin, host_end: of the training thread; end: when the device was through with it too."""

    numbers: Int
    begin: Int
    host_end: Int
    end: Int

    @staticmethod
    def find(rows: pd.DataFrame, of: _DeviceOperations) -> _TracedSteps:
        steps = rows[["step", "start_ns", "dur_ns"]][(rows["kind"] == "step") & rows["dur_ns"].notna()]
        steps = steps.sort_values("step")
        numbers, begin = steps["step"].to_numpy(np.int64), steps["start_ns"].to_numpy(np.int64)
        host_end = begin + steps["dur_ns"].to_numpy(np.int64)
        end = host_end.copy()
        at = np.searchsorted(numbers, of.step)
        known = (at < len(numbers)) & (np.append(numbers, NONE)[at] == of.step)
        np.maximum.at(end, at[known], of.end[known])
        return _TracedSteps(numbers, begin, host_end, np.maximum.accumulate(end))

    @property
    def device_begin(self) -> Int:
        """When the device began each: where it had ended the one before, if that was traced too."""
        follows = np.append(False, np.diff(self.numbers) == 1)[: len(self.numbers)]
        before = np.append(0, self.end[:-1])[: len(self.end)]
        begin: Int = np.minimum(np.where(follows, before, self.begin), self.end - 1)
        return begin


@dataclass
class _ChainEvents:
    """Of one chain, lists of arrays: which operation each belongs to (its place, times four, and a turn), what, when,
    target, and whether that is a flow."""

    key: list[Int] = field(default_factory=list)
    what: list[Int] = field(default_factory=list)
    when: list[Int] = field(default_factory=list)
    target: list[Int] = field(default_factory=list)
    flow: list[Int] = field(default_factory=list)

    def put(self, key: Int, what: int, when: Int, target: Int, flow: bool) -> None:
        self.key.append(key)
        self.what.append(np.full(len(key), what))
        self.when.append(when)
        self.target.append(target)
        self.flow.append(np.full(len(key), int(flow)))


class _ChainMaker:
    """The chains, as they are put together."""

    def __init__(self, operations: _DeviceOperations, steps: _TracedSteps, time: RankTime, program: Program) -> None:
        self._of, self._steps, self._time, self._program = operations, steps, time, program
        self._streams = np.unique(operations.stream).tolist()
        self._events = {stream: _ChainEvents() for stream in self._streams}
        self._host = _ChainEvents()
        self._flows: list[tuple[str, Int, Int]] = []
        self._count = 0
        self.before = np.full(len(operations.start), -EVER)  # the end of the operation before on its stream
        for stream in self._streams:
            mine = operations.of_stream(stream)
            self.before[mine[1:]] = np.maximum.accumulate(operations.end[mine])[:-1]
        known = operations.launch != NONE
        free = known & (operations.launch > self.before) & (operations.start > operations.launch)
        took = (operations.start - operations.launch)[free]
        self.latency = int(np.percentile(took, USUAL)) if len(took) else 0

    def _new(self, kind: str, issue: Int, end: Int) -> Int:
        self._flows.append((kind, issue, np.maximum(issue, end)))
        first, self._count = self._count, self._count + len(issue)
        return first + np.arange(len(issue))

    def chains(self, rows: pd.DataFrame) -> RankChains:
        self._launches()
        self._communications()
        self._dependencies(rows)
        stood = self._synchronizations(rows)
        lead = self._lead()
        self._ends(lead)
        order = [lead, *(stream for stream in self._streams if stream != lead)]
        host, (what, *_) = self._host_program(), self._program
        kept = (what != WAIT) | (self._program[OWN] == 1)
        program = tuple(np.concatenate([of[kept], more]) for of, more in zip(self._program, host, strict=True))
        steps, begin = self._steps, self._steps.device_begin
        chains = [
            Chain(
                str(self._of.names[stream]), self._stream_program(stream), self._stream_time(stream), steps.numbers,
                begin, steps.end,
            )
            for stream in order
        ]  # fmt: skip
        thread = ThreadTime(self._time.of_thread, stood)
        chains.append(Chain("host", program, thread, steps.numbers, steps.begin, steps.host_end))
        kind, issue, end = np.empty(0, object), np.empty(0, np.int64), np.empty(0, np.int64)
        for name, issued, ended in self._flows:
            kind = np.append(kind, np.full(len(issued), name, object))
            issue, end = np.append(issue, issued), np.append(end, ended)
        return RankChains(tuple(chains), self._time, self._time.lane_tasks, Flows(kind, issue, end))

    # --- what waits for what

    def _launches(self) -> None:
        of = self._of
        known = np.flatnonzero(of.launch != NONE)
        launch, start = of.launch[known], of.start[known]
        there = np.clip(launch + self.latency, np.minimum(self.before[known], start), start)
        target = self._new(LAUNCH, launch, np.minimum(launch + self.latency, there))
        self._host.put(launch, ISSUE, launch, target, True)
        self._put_each(known, 0, WAIT, start, target)

    def _put_each(self, which: Int, turn: int, what: int, when: Int, target: Int, flow: bool = True) -> None:
        """On the stream of each of these operations: before it (0, 1), in it (2), after it (3)."""
        for stream in self._streams:
            mine = self._of.stream[which] == stream
            self._events[stream].put(4 * which[mine] + turn, what, when[mine], target[mine], flow)

    def _communications(self) -> None:
        shared = np.flatnonzero(self._of.target != NONE)
        self._put_each(shared, 2, ISSUE, self._of.start[shared], self._of.target[shared], flow=False)
        self._put_each(shared, 3, WAIT, self._of.end[shared], self._of.target[shared], flow=False)

    def _dependencies(self, rows: pd.DataFrame) -> None:
        """What streams were told to wait for; where no such call was traced, operations that were launched, on a stream
        that was free, and began as soon as another stream's had ended."""
        told = rows[(rows["kind"] == "mark") & rows["name"].isin([STREAM_WAIT, EVENT_RECORDED])]
        if len(told):
            self._told(told)
            return
        of = self._of
        ready = np.maximum(self.before, np.where(of.launch != NONE, of.launch + self.latency, of.start))
        late = np.flatnonzero(of.start - ready > ALREADY_NS)
        order = np.argsort(of.end, kind="stable")
        at = np.searchsorted(of.end[order], of.start[late] + ALREADY_NS, "right") - 1
        waits, source = [], []
        for one, place in zip(late.tolist(), at.tolist(), strict=True):
            while place >= 0 and of.end[order[place]] > max(int(ready[one]), int(of.start[one]) - AT_ONCE_NS):
                other = int(order[place])
                if of.stream[other] != of.stream[one] and of.start[other] < of.start[one]:
                    waits.append(one)
                    source.append(other)
                    break
                place -= 1
        self._give(DEPENDS, np.array(source, np.int64), np.array(waits, np.int64))

    def _told(self, marks: pd.DataFrame) -> None:
        """marks: where events were recorded, and where streams were told to wait for them, by `corr`. The next
        operation of a stream that waits waits for the last one that had been launched on the other stream by then."""
        of = self._of
        place = {str(name): number for number, name in enumerate(self._of.names.tolist())}
        launched = {}  # stream -> its operations of known launch, and when they were launched, ascending
        for stream in self._streams:
            mine = of.of_stream(stream)
            mine = mine[of.launch[mine] != NONE]
            mine = mine[np.argsort(of.launch[mine], kind="stable")]
            launched[stream] = mine, of.launch[mine]
        columns = ("name", "lane", "issue_ns", "corr")
        table = list(zip(*(marks[column].tolist() for column in columns), strict=True))
        recorded = {int(corr): (place.get(str(lane), NONE), int(when))
                    for name, lane, when, corr in table if name == EVENT_RECORDED}  # fmt: skip
        edges: dict[tuple[int, int], None] = {}
        for name, lane, when, corr in table:
            stream, event = place.get(str(lane), NONE), recorded.get(int(corr))
            if name != STREAM_WAIT or event is None or not {stream, event[0]} <= launched.keys():
                continue
            before, upto = launched[event[0]]
            after, since = launched[stream]
            last, following = int(np.searchsorted(upto, event[1], "right")) - 1, int(np.searchsorted(since, when))
            if last < 0 or following >= len(after):
                continue
            source, waits = int(before[last]), int(after[following])
            if of.end[source] <= of.start[waits] + ALREADY_NS:
                edges[source, waits] = None
        ends = np.array(list(edges), np.int64).reshape(-1, 2)
        self._give(DEPENDS, ends[:, 0], ends[:, 1])

    def _give(self, kind: str, source: Int, waits: Int) -> None:
        """Operations wait for others."""
        ended = self._of.end[source]
        target = self._new(kind, ended, ended)
        self._put_each(source, 3, ISSUE, ended, target)
        self._put_each(waits, 1, WAIT, self._of.start[waits], target)

    def _synchronizations(self, rows: pd.DataFrame) -> Intervals:
        """When the training thread waits for the device. It waits for what ended last by then of what it had launched
        before: if nothing did in that time, all was over already."""
        of = self._of
        waits = rows[(rows["kind"] == "wait") & (rows["lane"] == MAIN) & rows["dur_ns"].notna()]
        names = waits["name"].astype(str)
        waits = waits[names.str.endswith(SYNCHRONIZES)].sort_values("start_ns", kind="stable")
        start = waits["start_ns"].to_numpy(np.int64)
        end = start + waits["dur_ns"].to_numpy(np.int64)
        order = np.argsort(of.end, kind="stable")
        at = np.searchsorted(of.end[order], end + ALREADY_NS, "right") - 1
        source, moments = [], []
        for begin, over, place in zip(start.tolist(), end.tolist(), at.tolist(), strict=True):
            while place >= 0 and of.end[order[place]] > begin:
                other = int(order[place])
                if of.launch[other] < begin:
                    source.append(other)
                    moments.append(over)
                    break
                place -= 1
        which, when = np.array(source, np.int64), np.array(moments, np.int64)
        target = self._new(SYNC, of.end[which], np.minimum(of.end[which], when))
        self._put_each(which, 3, ISSUE, of.end[which], target)
        self._host.put(when, WAIT, when, target, True)
        return Intervals.union(start, end)

    def _lead(self) -> int:
        """The stream that computes for longest."""
        of = self._of
        spent = {
            stream: int((of.end - of.start)[(of.stream == stream) & (of.target == NONE)].sum())
            for stream in self._streams
        }
        longest: int = max(spent, key=lambda stream: spent[stream])
        return longest

    def _ends(self, lead: int) -> None:
        """A step is over when the host is through with it, and every stream."""
        of, steps = self._of, self._steps
        last = 4 * len(of.start) + 4 * np.arange(len(steps.numbers))  # behind all that is in its step
        target = self._new(STEP, steps.host_end, steps.host_end)
        self._host.put(steps.host_end, ISSUE, steps.host_end - 1, target, True)
        waits = [(last, steps.end, target)]
        for stream in self._streams:
            mine = of.of_stream(stream)
            at = np.searchsorted(of.step[mine], steps.numbers, "right") - 1  # launched in order, so are their steps
            there = (at >= 0) & (of.step[mine][np.maximum(at, 0)] == steps.numbers)
            if stream == lead or not there.any():
                continue
            which = mine[at[there]]
            target = self._new(STEP, of.end[which], of.end[which])
            self._events[stream].put(4 * which + 3, ISSUE, of.end[which], target, True)
            waits.append((last[there], steps.end[there], target))
        for key, when, target in waits:
            self._events[lead].put(key, WAIT, when, target, True)

    # --- programs

    def _host_program(self) -> Program:
        host = self._host
        what, when, target = (np.concatenate(part) for part in (host.what, host.when, host.target))
        none = np.zeros(len(what), np.int64)
        return what, target + len(self._time.lane_tasks), when, when, none, none + 1

    def _stream_program(self, stream: int) -> Program:
        events, of = self._events[stream], self._of
        key, what, when, target, flow = (
            np.concatenate(part) for part in (events.key, events.what, events.when, events.target, events.flow)
        )
        # In the order of the stream: of what waits for the end of a step, behind the last that was launched in it.
        place = key // 4
        behind = place >= len(of.start)
        number = np.where(behind, place - len(of.start), 0)
        step = np.searchsorted(self._steps.numbers, of.step[np.minimum(place, len(of.start) - 1)])
        step = np.where(behind, number, step)
        order = np.lexsort((key, when, behind, step))
        what, when, target, flow, step = what[order], when[order], target[order], flow[order], step[order]
        index = np.arange(len(when))
        begin = np.append(self._steps.device_begin, EVER // 2)[step]
        limit = np.append(self._steps.end, EVER // 2 + (1 << 40))[step] - 1
        moments = np.maximum.accumulate(np.clip(when, begin, limit) - index) + index
        moments = np.minimum.accumulate((np.minimum(moments, limit) - index)[::-1])[::-1] + index
        own = np.where(flow == 1, target + len(self._time.lane_tasks), target)
        ended = np.where((what == ISSUE) & (flow == 0), NONE, moments)
        return what, own, moments, ended, np.zeros(len(what), np.int64), flow

    def _stream_time(self, stream: int) -> StreamTime:
        """It is idle but for its operations; before those of unknown launch, what it waited for is not known."""
        of = self._of
        mine = of.of_stream(stream)
        computes = mine[of.target[mine] == NONE]
        unknown = mine[(of.launch[mine] == NONE) & (self.before[mine] > -EVER)]
        busy = Intervals.union(of.start[computes], of.end[computes])
        busy = busy | Intervals.union(self.before[unknown], of.start[unknown])
        edges = np.concatenate([[0], np.stack([busy.start, busy.end], axis=1).ravel(), [EVER]])
        idle = Intervals.union(edges[0::2], edges[1::2])
        steps = computes[of.optimizer[computes]]
        return StreamTime(idle, {"optimizer": Intervals.union(of.start[steps], of.end[steps])})
