"""The rows of the trace, of one file's events.

Kernels, copies and fills are rows of their stream's lane (`cuda.7`), launches rows of the thread that made them; what
has a correlation has it as `corr`. A kernel that communicates is a `comm` row, whose `arrival_ns` is where the kernel
begins on the device and whose `issue_ns` is where it was launched. In a trace without a device the operators that are
inside no other one are `kernel` rows of their thread, and c10d's annotations are the collectives.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.schema import EVENT_RECORDED, STREAM_WAIT

from .blocks import Coded, RowBlocks
from .collectives import CollectiveReader
from .events import COPY, KERNEL, UNKNOWN, Events
from .names import ANNOTATIONS
from .pauses import launch_pauses
from .phases import (
    NO_PHASE,
    ProfiledSteps,
    ThreadPhases,
    backward_names,
    find_phases,
    find_steps,
    main_thread,
    outermost,
    told_by,
)

Int = npt.NDArray[np.int64]

MAIN: Final = "main"
SYNCHRONIZES: Final = re.compile(r"(cuda|hip)(Device|Stream|Event)Synchronize|cudaMemcpy$|hipMemcpy$")
"""Calls in which a thread stands still until the device has done something."""
HOST_COPY: Final = re.compile(r"(Copy|Memcpy) ?(HtoD|DtoH|HostToDevice|DeviceToHost|PtoP)")
"""A copy between a device and something else; all other ones are work of the device's own."""
DEVICES: Final = {0: "cpu", 1: "cuda", 6: "hip"}
"""c10::DeviceType, in the events of memory."""
RESUME_NS: Final = 2_000_000
"""So long after its collective has ended a thread that waited for it goes on, at the latest."""


@dataclass
class TraceRows:
    """rows: columns of `schema.COLUMNS`, `rank` 0, by time.

    groups:   name -> {ranks, size, desc, backend}, as far as the file tells
    steps:    marked by the profiler; else all is one step
    numbered: how many communications have a number, and of how many
    """

    rows: pd.DataFrame
    groups: dict[str, dict[str, Any]]
    steps: ProfiledSteps
    has_device: bool
    numbered: tuple[int, int]


def trace_rows_of(events: Events) -> TraceRows:
    main = main_thread(events)
    steps = find_steps(events, main)
    build = _RowBuilder(events, main, steps)
    has_device = len(events.device) > 0
    build.steps()
    build.phases()
    build.annotations()
    if has_device:
        build.device()
        build.launches()
        build.waits()
        build.stream_waits()
        build.host_operators()
    else:
        build.operators()
        build.host_collectives()
    build.memory()
    numbered = build.numbered, build.communications
    return TraceRows(build.blocks.table(), build.collectives.groups, steps, has_device, numbered)


class _RowBuilder:
    def __init__(self, events: Events, main: int, steps: ProfiledSteps) -> None:
        self._events, self._main, self._steps = events, main, steps
        self.blocks = RowBlocks()
        self.collectives = CollectiveReader(events)
        self._phases = ThreadPhases([], np.empty(0, np.int64), np.empty(0, np.int64), [])
        self.numbered = self.communications = 0
        self._device_end = np.empty(0, np.int64)
        self._device_corr = np.empty(0, np.int64)
        threads = events.threads
        backward = self._backward_thread()
        self._lanes = [
            MAIN if one == main else "autograd" if one == backward else f"thread.{threads[one]}"
            for one in range(len(threads))
        ]
        self._ids = np.array([one if type(one) is int and 0 <= one < 1 << 31 else -1 for one in threads], np.int64)

    def _backward_thread(self) -> int:
        ops = self._events.ops
        chosen = backward_names(self._events)[ops["name"]] if len(ops) else np.empty(0, bool)
        if not chosen.any():
            return UNKNOWN
        found = int(np.bincount(ops["thread"][chosen]).argmax())
        return found if found != self._main else UNKNOWN

    def _of_thread(self, thread: Int) -> dict[str, Any]:
        return {"lane": Coded(thread, self._lanes), "thread": self._ids[thread]}

    def _named(self, name: Int) -> Coded:
        return Coded(name, self._events.names)

    # --- the training thread

    def steps(self) -> None:
        steps = self._steps
        self.blocks.add(
            len(steps.number), kind="step", name="step", lane=MAIN, step=steps.number, start_ns=steps.start_ns,
            dur_ns=steps.end_ns - steps.start_ns, source="imported" if steps.marked else "derived",
        )  # fmt: skip

    def phases(self) -> None:
        found = self._phases = find_phases(self._events, self._main, self._steps)
        self.blocks.add(
            len(found.name), kind="phase", name=Coded.of(found.name), lane=MAIN, step=self._steps.of(found.start_ns),
            start_ns=found.start_ns, dur_ns=found.end_ns - found.start_ns,
            source=Coded(np.array(found.derived, np.int64), ("imported", "derived")),
        )  # fmt: skip

    def annotations(self) -> None:
        """The user's own, as dsprof's spans are: marks that last."""
        chosen = [
            note for note in self._events.annotations
            if not (note.name.startswith(ANNOTATIONS) or NO_PHASE.match(note.name) or told_by(note))
        ]  # fmt: skip
        start = np.array([note.start_ns for note in chosen], np.int64)
        self.blocks.add(
            len(chosen), kind="mark", name=Coded.of([note.name for note in chosen]), start_ns=start,
            step=self._steps.of(start), dur_ns=np.array([note.dur_ns for note in chosen], np.int64),
            **self._of_thread(np.array([note.thread for note in chosen], np.int64)),
        )  # fmt: skip

    # --- the device

    def device(self) -> None:
        events, table = self._events, self._events.device
        start, corr, what, codes = table["start_ns"], table["corr"], table["what"], table["name"]
        launch, call = self._launched(corr)
        step = self._steps.of(np.where(launch == UNKNOWN, start, launch))
        self._device_end, self._device_corr = start + table["dur_ns"], corr
        lane, names = self._streams(), self._named(codes)
        comm = np.array([one is not None for one in events.collectives], bool)[codes] & (what == KERNEL)
        from_host = np.array([HOST_COPY.search(name) is not None for name in events.names], bool)[codes]
        copied = (what == COPY) & from_host
        for kind, chosen in (("copy", copied), ("kernel", ~copied & ~comm)):
            self.blocks.add(
                int(chosen.sum()), kind=kind, name=names[chosen], lane=lane[chosen], start_ns=start[chosen],
                dur_ns=table["dur_ns"][chosen], corr=corr[chosen], step=step[chosen], issue_ns=launch[chosen],
                bytes=table["bytes"][chosen],
            )  # fmt: skip
        self._communications(np.flatnonzero(comm), call, launch, lane, step)

    def _streams(self) -> Coded:
        """The lane of each thing that the device did."""
        table = self._events.device
        return self._lanes_of(table["device"], table["stream"])

    def _lanes_of(self, device: Int, stream: Int) -> Coded:
        devices = np.unique(self._events.device["device"])
        devices, device = np.unique(np.concatenate([device, devices]), return_inverse=True)
        device = device[: len(stream)]
        streams, stream = np.unique(stream, return_inverse=True)
        places, place = np.unique(device * len(streams) + stream, return_inverse=True)
        found = zip(devices[places // len(streams)].tolist(), streams[places % len(streams)].tolist(), strict=True)
        return Coded(place, [f"cuda.{one}.{other}" if len(devices) > 1 else f"cuda.{other}" for one, other in found])

    def _communications(self, chosen: Int, call: Int, launch: Int, lane: Coded, step: Int) -> None:
        table, args, names = self._events.device, self._events.comm_args, self._events.names
        around = self.collectives.notes_around(call[chosen])
        found = [
            self.collectives.read(args.get(at, {}), names[name], note, self._events.collectives[name] or "")
            for at, name, note in zip(chosen.tolist(), table["name"][chosen].tolist(), around, strict=True)
        ]
        self._add_collectives(
            found, start_ns=table["start_ns"][chosen], arrival_ns=table["start_ns"][chosen], lane=lane[chosen],
            dur_ns=table["dur_ns"][chosen], issue_ns=launch[chosen], corr=table["corr"][chosen], step=step[chosen],
        )  # fmt: skip

    def _add_collectives(self, found: list[dict[str, Any]], **columns: Any) -> None:
        self.blocks.add(
            len(found), kind="comm",
            **{key: Coded.of([one.get(key) for one in found]) for key in ("name", "group", "dtype")},
            **{key: np.array([one.get(key, UNKNOWN) for one in found], np.int64) for key in ("seq", "bytes")},
            **columns,
        )  # fmt: skip
        self.communications += len(found)
        self.numbered += sum("seq" in one for one in found)

    def _launched(self, corr: Int) -> tuple[Int, Int]:
        """When each correlation was launched, and the row of that call; UNKNOWN where it is not told."""
        calls = self._events.calls
        if not len(calls):
            return np.full(len(corr), UNKNOWN), np.full(len(corr), UNKNOWN)
        order = np.argsort(calls["corr"], kind="stable")
        known = calls["corr"][order]
        at = np.minimum(np.searchsorted(known, corr), len(known) - 1)
        row = np.where((known[at] == corr) & (corr >= 0), order[at], UNKNOWN)
        return np.where(row == UNKNOWN, UNKNOWN, calls["start_ns"][row]), row

    def launches(self) -> None:
        """Calls that put something on the device."""
        table = self._events.calls
        chosen = np.flatnonzero(np.isin(table["corr"], self._device_corr[self._device_corr >= 0]))
        self.blocks.add(
            len(chosen), kind="launch", name=self._named(table["name"][chosen]),
            start_ns=table["start_ns"][chosen], dur_ns=table["dur_ns"][chosen], corr=table["corr"][chosen],
            step=self._steps.of(table["start_ns"][chosen]),
            **self._of_thread(table["thread"][chosen]),
        )  # fmt: skip

    def waits(self) -> None:
        """The training thread in a call that waits for the device: for what ended last by then."""
        table = self._events.calls
        stops = np.array([SYNCHRONIZES.match(name) is not None for name in self._events.names], bool)
        chosen = np.flatnonzero(stops[table["name"]] & (table["thread"] == self._main))
        start, end = table["start_ns"][chosen], table["start_ns"][chosen] + table["dur_ns"][chosen]
        order = np.argsort(self._device_end, kind="stable")
        at = np.searchsorted(self._device_end[order], end, "right") - 1
        last = order[np.maximum(at, 0)] if len(order) else np.zeros(len(at), np.int64)
        within = (at >= 0) & (self._device_end[last] > start)
        chosen, last = chosen[within], last[within]
        self.blocks.add(
            len(chosen), kind="wait", lane=MAIN, start_ns=start[within], dur_ns=(end - start)[within],
            name=self._named(table["name"][chosen]), corr=self._device_corr[last],
            step=self._steps.of(start[within]), thread=self._ids[table["thread"][chosen]],
        )  # fmt: skip

    def stream_waits(self) -> None:
        """Marks where streams were told to wait for an event, and where that was recorded on another: both have its
        `corr`, and `issue_ns` of their calls."""
        table = self._events.stream_waits
        recorded = self._launched(table["of_corr"])[0]
        called = self._launched(table["corr"])[0]
        called = np.where(called == UNKNOWN, table["start_ns"], called)
        known = (recorded != UNKNOWN) & (table["of_corr"] >= 0) & (table["stream"] != table["of_stream"])
        of_corr = table["of_corr"]
        first = np.zeros(len(of_corr), bool)
        first[np.unique(of_corr, return_index=True)[1]] = True
        for name, when, stream, chosen in (
            (STREAM_WAIT, called, "stream", known), (EVENT_RECORDED, recorded, "of_stream", known & first),
        ):  # fmt: skip
            self.blocks.add(
                int(chosen.sum()), kind="mark", name=name, lane=self._lanes_of(table["device"], table[stream])[chosen],
                start_ns=when[chosen], dur_ns=np.zeros(int(chosen.sum()), np.int64), issue_ns=when[chosen],
                corr=of_corr[chosen], step=self._steps.of(when[chosen]),
            )  # fmt: skip

    def host_operators(self) -> None:
        """What the training thread and that of backward compute while nothing is put on the device: operators within a
        pause of the launches, as far as no phase that an annotation tells explains it."""
        table, calls = self._events.ops, self._events.calls
        launches = np.isin(calls["corr"], self._device_corr[self._device_corr >= 0])
        low, high = launch_pauses(calls["start_ns"][launches], (calls["start_ns"] + calls["dur_ns"])[launches])
        told = ~np.array(self._phases.derived, bool)
        begin, finish = self._phases.start_ns[told], self._phases.end_ns[told]
        for thread, lane in enumerate(self._lanes):
            mine = np.flatnonzero(table["thread"] == thread) if lane in (MAIN, "autograd") and len(table) else ()
            if not len(mine) or not len(low):
                continue
            mine = np.asarray(mine)
            start, end = table["start_ns"][mine], (table["start_ns"] + table["dur_ns"])[mine]
            pause = np.searchsorted(low, start, "right") - 1
            phase = np.searchsorted(begin, start, "right") - 1
            chosen = (pause >= 0) & (end <= high[np.maximum(pause, 0)])
            chosen &= (phase < 0) | (start >= np.append(finish, 0)[phase])
            mine = mine[chosen]
            mine = mine[outermost(start[chosen], end[chosen])]
            self.blocks.add(
                len(mine), kind="kernel", name=self._named(table["name"][mine]), start_ns=table["start_ns"][mine],
                dur_ns=table["dur_ns"][mine], step=self._steps.of(table["start_ns"][mine]),
                **self._of_thread(table["thread"][mine]),
            )  # fmt: skip

    # --- without a device

    def operators(self) -> None:
        table = self._events.ops
        for thread in np.unique(table["thread"]).tolist() if len(table) else ():
            mine = np.flatnonzero(table["thread"] == thread)
            mine = mine[outermost(table["start_ns"][mine], (table["start_ns"] + table["dur_ns"])[mine])]
            self.blocks.add(
                len(mine), kind="kernel", name=self._named(table["name"][mine]),
                start_ns=table["start_ns"][mine], dur_ns=table["dur_ns"][mine],
                step=self._steps.of(table["start_ns"][mine]), **self._of_thread(table["thread"][mine]),
            )  # fmt: skip

    def host_collectives(self) -> None:
        """c10d's annotations as collectives, from their issue to their end; and where the training thread did nothing
        until one ended, a wait for it."""
        notes = [note for note in self._events.annotations if note.name.startswith(ANNOTATIONS)]
        notes = sorted({(note.name, note.start_ns): note for note in notes}.values(), key=lambda note: note.start_ns)
        found = [self.collectives.read({}, "", note) for note in notes]
        start = np.array([note.start_ns for note in notes], np.int64)
        end = start + np.array([note.dur_ns for note in notes], np.int64)
        backend = self._events.about.get("distributedInfo")
        name = backend.get("backend") if isinstance(backend, dict) else None
        for about in self.collectives.groups.values():
            about["backend"] = name if isinstance(name, str) and name else "gloo"
        self._add_collectives(
            found, start_ns=start, dur_ns=end - start, issue_ns=start, step=self._steps.of(start),
            lane=Coded.of([f"comm.{one['group']}" if "group" in one else "comm.messages" for one in found]),
        )  # fmt: skip
        self._host_waits(found, start, end)

    def _host_waits(self, found: list[dict[str, Any]], start: Int, end: Int) -> None:
        table = self._events.ops
        mine = np.flatnonzero(table["thread"] == self._main) if len(table) else np.empty(0, np.int64)
        if not len(mine) or not len(found):
            return
        begin, finish = table["start_ns"][mine], table["start_ns"][mine] + table["dur_ns"][mine]
        order = outermost(begin, finish)
        begin, finish = begin[order], finish[order]
        after = np.searchsorted(begin, end)  # the operator with which the thread goes on
        resumed = np.append(begin, np.iinfo(np.int64).max)[after]
        before = np.append(finish, np.iinfo(np.int64).min)[after - 1]
        low = np.maximum(start, before)
        waits = (low < end) & (resumed - end <= RESUME_NS)
        # Of several that end in one gap it is the last that was waited for, from the end of the one before on.
        chosen = np.flatnonzero(waits)
        chosen = chosen[np.argsort(end[chosen], kind="stable")]
        earlier = np.append(np.iinfo(np.int64).min, np.maximum.accumulate(end[chosen]))[: len(chosen)]
        low = np.maximum(low[chosen], earlier)
        longer = low < end[chosen]
        chosen, low = chosen[longer], low[longer]
        self.blocks.add(
            len(chosen), kind="wait", lane=MAIN, start_ns=low, dur_ns=end[chosen] - low, step=self._steps.of(low),
            name=Coded.of([found[at]["name"] for at in chosen.tolist()]),
        )  # fmt: skip

    # --- memory

    def memory(self) -> None:
        """Samples of what is allocated, and of what is reserved where that changes."""
        table = self._events.memory
        for kind, device in sorted({*zip(table["kind"].tolist(), table["device"].tolist(), strict=True)}):
            mine = np.flatnonzero((table["kind"] == kind) & (table["device"] == device))
            mine = mine[np.argsort(table["start_ns"][mine], kind="stable")]
            lane = DEVICES.get(kind, f"device{kind}") + (f".{device}" if device >= 0 else "")
            for name in ("allocated", "reserved"):
                size = table[name][mine]
                changed = np.append(True, np.diff(size) != 0)[: len(size)] & (size >= 0)
                when = table["start_ns"][mine][changed]
                if name == "reserved" and not size[changed].any():
                    continue  # a CPU reserves nothing
                self.blocks.add(
                    len(when), kind="mem", name=name, lane=lane, start_ns=when, dur_ns=np.zeros(len(when), np.int64),
                    bytes=size[changed], step=self._steps.of(when),
                )  # fmt: skip
