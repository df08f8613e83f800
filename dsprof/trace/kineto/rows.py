"""The rows of the trace, of one file's events.

Kernels, copies and fills are rows of their stream's lane (`cuda.7`), launches rows of the thread that made them; what
has a correlation has it as `corr`. A kernel that communicates is a `comm` row. It is there where it begins on the
device, which is its `issue_ns`; its launch has a row of its own. In a trace without a device the operators that are
inside no other one are `kernel` rows of their thread, and c10d's annotations are the collectives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson
import pandas as pd

from dsprof.schema import COLUMNS

from .events import COPY, KERNEL, UNKNOWN, Annotation, Events
from .names import ANNOTATIONS, MESSAGES, bytes_of, collective_name, dtype_of
from .phases import NO_PHASE, ProfiledSteps, backward_names, find_phases, find_steps, main_thread, outermost, told_by

Int = npt.NDArray[np.int64]

MAIN: Final = "main"
SYNCHRONIZES: Final = re.compile(r"(cuda|hip)(Device|Stream|Event)Synchronize|cudaMemcpy$|hipMemcpy$")
"""Calls in which a thread stands still until the device has done something."""
HOST_COPY: Final = re.compile(r"(Copy|Memcpy) ?(HtoD|DtoH|HostToDevice|DeviceToHost|PtoP)")
"""A copy between a device and something else; all other ones are work of the device's own."""
CATEGORIES: Final = tuple(name for name, kind in COLUMNS.items() if kind == "category")
DEVICES: Final = {0: "cpu", 1: "cuda", 6: "hip"}
"""c10::DeviceType, in the events of memory."""
RESUME_NS: Final = 2_000_000
"""So long after its collective has ended a thread that waited for it goes on, at the latest."""
MOST_GROUP: Final = 128
ELIDED: Final = "..."
"""In a list of ranks that Kineto found too long."""


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
    notes: list[str] = field(default_factory=list)


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
    else:
        build.operators()
        build.host_collectives()
    build.memory()
    return TraceRows(build.rows(), build.groups, steps, has_device, (build.numbered, build.communications), build.notes)


class _RowBuilder:
    def __init__(self, events: Events, main: int, steps: ProfiledSteps) -> None:
        self._events, self._main, self._steps = events, main, steps
        self._blocks: list[tuple[int, dict[str, Any]]] = []
        self.groups: dict[str, dict[str, Any]] = _groups_told(events.about)
        self.notes: list[str] = []
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

    def _add(self, count: int, **columns: Any) -> None:
        if count:
            self._blocks.append((count, columns))

    def _of_thread(self, thread: Int) -> dict[str, Any]:
        return {"lane": [self._lanes[one] for one in thread.tolist()], "thread": self._ids[thread]}

    # --- the training thread

    def steps(self) -> None:
        steps = self._steps
        self._add(
            len(steps.number), kind="step", name="step", lane=MAIN, step=steps.number, start_ns=steps.start_ns,
            dur_ns=steps.end_ns - steps.start_ns, source="imported" if steps.marked else "derived",
        )  # fmt: skip

    def phases(self) -> None:
        found = find_phases(self._events, self._main, self._steps)
        self._add(
            len(found.name), kind="phase", name=found.name, lane=MAIN, step=self._steps.of(found.start_ns),
            start_ns=found.start_ns, dur_ns=found.end_ns - found.start_ns,
            source=["derived" if derived else "imported" for derived in found.derived],
        )  # fmt: skip

    def annotations(self) -> None:
        """The user's own, as dsprof's spans are: marks that last."""
        chosen = [
            note for note in self._events.annotations
            if not (note.name.startswith(ANNOTATIONS) or NO_PHASE.match(note.name) or told_by(note))
        ]  # fmt: skip
        start = np.array([note.start_ns for note in chosen], np.int64)
        self._add(
            len(chosen), kind="mark", name=[note.name for note in chosen], start_ns=start, step=self._steps.of(start),
            dur_ns=np.array([note.dur_ns for note in chosen], np.int64),
            **self._of_thread(np.array([note.thread for note in chosen], np.int64)),
        )  # fmt: skip

    # --- the device

    def device(self) -> None:
        events, table = self._events, self._events.device
        start, corr, what, codes = table["start_ns"], table["corr"], table["what"], table["name"]
        launch, _ = self._launched(corr)
        step = self._steps.of(np.where(launch == UNKNOWN, start, launch))
        self._device_end, self._device_corr = start + table["dur_ns"], corr
        several = len(np.unique(table["device"])) > 1
        places = np.stack([table["device"], table["stream"]], axis=1)
        different, which = np.unique(places, axis=0, return_inverse=True)
        words = [f"cuda.{device}.{stream}" if several else f"cuda.{stream}" for device, stream in different.tolist()]
        lane = np.array(words, object)[which.reshape(-1)]
        names = np.array(events.names, object)[codes]
        comm = np.array(events.communicates, bool)[codes] & (what == KERNEL)
        from_host = np.array([HOST_COPY.search(name) is not None for name in events.names], bool)[codes]
        copied = (what == COPY) & from_host
        for kind, chosen in (("copy", copied), ("kernel", ~copied & ~comm)):
            self._add(
                int(chosen.sum()), kind=kind, name=names[chosen], lane=lane[chosen], start_ns=start[chosen],
                dur_ns=table["dur_ns"][chosen], corr=corr[chosen], step=step[chosen], issue_ns=launch[chosen],
                bytes=table["bytes"][chosen],
            )  # fmt: skip
        self._communications(np.flatnonzero(comm), names, lane, step)

    def _communications(self, chosen: Int, names: npt.NDArray[Any], lane: npt.NDArray[Any], step: Int) -> None:
        table, args = self._events.device, self._events.comm_args
        _, calls = self._launched(table["corr"][chosen])
        around = self._notes_around(calls)
        found = [
            self._collective(args.get(at, {}), str(names[at]), note)
            for at, note in zip(chosen.tolist(), around, strict=True)
        ]
        self._add_collectives(
            found, start_ns=table["start_ns"][chosen], dur_ns=table["dur_ns"][chosen], lane=lane[chosen],
            corr=table["corr"][chosen], step=step[chosen],
        )  # fmt: skip

    def _add_collectives(self, found: list[dict[str, Any]], **columns: Any) -> None:
        self._add(
            len(found), kind="comm", issue_ns=columns["start_ns"],
            **{key: [one.get(key) for one in found] for key in ("name", "group", "dtype")},
            **{key: np.array([one.get(key, UNKNOWN) for one in found], np.int64) for key in ("seq", "bytes")},
            **columns,
        )  # fmt: skip
        self.communications += len(found)
        self.numbered += sum("seq" in one for one in found)

    def _collective(self, args: Mapping[str, Any], kernel: str, note: Annotation | None) -> dict[str, Any]:
        """name, group, seq, bytes, dtype of a communication, as far as its arguments and c10d's annotation tell."""
        told = args or (note.args if note is not None else {})
        word = told.get("Collective name")
        name = collective_name(word) if isinstance(word, str) else None
        name = name or (collective_name(note.name) if note is not None else None) or collective_name(kernel)
        found: dict[str, Any] = {"name": name or "collective"}
        size = bytes_of(told)
        if size is None and note is not None:
            size = bytes_of(note.args)
        if size is not None:
            found["bytes"] = size
        kind = told.get("dtype")
        if isinstance(kind, str) and dtype_of(kind):
            found["dtype"] = dtype_of(kind)
        if name in MESSAGES or name is None:  # of a message its other side is not told
            return found
        group = told.get("Process Group Name")
        if isinstance(group, (str, int)) and not isinstance(group, bool) and str(group):
            found["group"] = str(group)[:MOST_GROUP]
            self._know_group(found["group"], told)
            seq = told.get("Seq")
            if type(seq) is int and 0 <= seq < 1 << 31:
                found["seq"] = seq
        else:
            found["group"] = f"{name} (group not told)"
            self.groups.setdefault(found["group"], {"ranks": [], "size": 0, "desc": "", "backend": "kernels"})
        return found

    def _know_group(self, group: str, told: Mapping[str, Any]) -> None:
        about = self.groups.setdefault(group, {"ranks": [], "size": 0, "desc": "", "backend": "kernels"})
        about["backend"] = "kernels" if len(self._events.device) else about.get("backend", "")
        if not about["ranks"]:
            about["ranks"] = _ranks(told.get("Process Group Ranks"))
        size = told.get("Group size")
        if type(size) is int and 0 < size < 1 << 24:
            about["size"] = size
        desc = told.get("Process Group Description")
        if isinstance(desc, str) and not about["desc"]:
            about["desc"] = desc[:MOST_GROUP]

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

    def _notes_around(self, calls: Int) -> list[Annotation | None]:
        """c10d's annotation that each call was made within, if it has one."""
        by_thread: dict[int, list[Annotation]] = {}
        for note in self._events.annotations:
            if note.name.startswith(ANNOTATIONS):
                by_thread.setdefault(note.thread, []).append(note)
        begins = {}
        for thread, notes in by_thread.items():
            notes.sort(key=lambda note: note.start_ns)
            begins[thread] = np.array([note.start_ns for note in notes], np.int64)
        table, found = self._events.calls, list[Annotation | None]()
        for call in calls.tolist():
            thread = int(table["thread"][call]) if call != UNKNOWN else UNKNOWN
            around: Annotation | None = None
            if thread in by_thread:
                when = int(table["start_ns"][call])
                at = int(np.searchsorted(begins[thread], when, "right")) - 1
                last = by_thread[thread][at] if at >= 0 else None
                around = last if last is not None and when < last.start_ns + last.dur_ns else None
            found.append(around)
        return found

    def launches(self) -> None:
        """Calls that put something on the device."""
        table = self._events.calls
        chosen = np.flatnonzero(np.isin(table["corr"], self._device_corr[self._device_corr >= 0]))
        names = np.array(self._events.names, object)[table["name"][chosen]]
        self._add(
            len(chosen), kind="launch", name=names, start_ns=table["start_ns"][chosen], dur_ns=table["dur_ns"][chosen],
            corr=table["corr"][chosen], step=self._steps.of(table["start_ns"][chosen]),
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
        self._add(
            len(chosen), kind="wait", lane=MAIN, start_ns=start[within], dur_ns=(end - start)[within],
            name=np.array(self._events.names, object)[table["name"][chosen]], corr=self._device_corr[last],
            step=self._steps.of(start[within]), thread=self._ids[table["thread"][chosen]],
        )  # fmt: skip

    # --- without a device

    def operators(self) -> None:
        table = self._events.ops
        for thread in np.unique(table["thread"]).tolist() if len(table) else ():
            mine = np.flatnonzero(table["thread"] == thread)
            mine = mine[outermost(table["start_ns"][mine], (table["start_ns"] + table["dur_ns"])[mine])]
            self._add(
                len(mine), kind="kernel", name=np.array(self._events.names, object)[table["name"][mine]],
                start_ns=table["start_ns"][mine], dur_ns=table["dur_ns"][mine],
                step=self._steps.of(table["start_ns"][mine]), **self._of_thread(table["thread"][mine]),
            )  # fmt: skip

    def host_collectives(self) -> None:
        """c10d's annotations as collectives, from their issue to their end; and where the training thread did nothing
        until one ended, a wait for it."""
        notes = [note for note in self._events.annotations if note.name.startswith(ANNOTATIONS)]
        notes = sorted({(note.name, note.start_ns): note for note in notes}.values(), key=lambda note: note.start_ns)
        found = [self._collective({}, "", note) for note in notes]
        start = np.array([note.start_ns for note in notes], np.int64)
        end = start + np.array([note.dur_ns for note in notes], np.int64)
        backend = self._events.about.get("distributedInfo")
        name = backend.get("backend") if isinstance(backend, dict) else None
        for about in self.groups.values():
            about["backend"] = name if isinstance(name, str) and name else "gloo"
        self._add_collectives(
            found, start_ns=start, dur_ns=end - start, step=self._steps.of(start),
            lane=[f"comm.{one['group']}" if "group" in one else "comm.messages" for one in found],
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
        self._add(
            len(chosen), kind="wait", lane=MAIN, start_ns=low, dur_ns=end[chosen] - low, step=self._steps.of(low),
            name=[found[at]["name"] for at in chosen.tolist()],
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
                self._add(
                    len(when), kind="mem", name=name, lane=lane, start_ns=when, dur_ns=np.zeros(len(when), np.int64),
                    bytes=size[changed], step=self._steps.of(when),
                )  # fmt: skip

    # --- all together

    def rows(self) -> pd.DataFrame:
        total = sum(count for count, _ in self._blocks)
        columns: dict[str, Any] = {}
        start = self._column("start_ns", total, 0)
        length = self._column("dur_ns", total, 0)
        order = np.lexsort((-length, start))
        for name, kind in COLUMNS.items():
            if kind == "category":
                columns[name] = self._words(name, total, order)
            elif kind in ("int64", "int32", "int16"):
                default = -1 if name == "step" else 0
                columns[name] = self._column(name, total, default)[order].astype(kind)
            elif kind.startswith("Int"):
                values = self._column(name, total, UNKNOWN)[order]
                columns[name] = pd.arrays.IntegerArray(values.astype(kind.lower()), values == UNKNOWN)
            elif kind == "boolean":
                known = name == "ended"
                columns[name] = pd.arrays.BooleanArray(np.full(total, known), np.full(total, not known))
            else:
                columns[name] = np.full(total, np.nan)
        return pd.DataFrame(columns, copy=False)

    def _column(self, name: str, total: int, missing: int) -> Int:
        result = np.full(total, missing, np.int64)
        at = 0
        for count, columns in self._blocks:
            if name in columns:
                result[at : at + count] = columns[name]
            at += count
        return result

    def _words(self, name: str, total: int, order: Int) -> pd.Categorical:
        codes, known = np.full(total, UNKNOWN, np.int32), dict[str, int]()
        at = 0
        for count, columns in self._blocks:
            value = columns.get(name, "imported" if name == "source" else None)
            if isinstance(value, str):
                codes[at : at + count] = known.setdefault(value, len(known))
            elif value is not None:
                codes[at : at + count] = [
                    UNKNOWN if one is None else known.setdefault(one, len(known)) for one in value
                ]
            at += count
        names = sorted(known)
        place = np.full(len(known) + 1, UNKNOWN, np.int32)
        for number, word in enumerate(names):
            place[known[word]] = number
        return pd.Categorical.from_codes(place[codes[order]], pd.Index(names, dtype=object))


def _groups_told(about: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The process groups that `distributedInfo` names."""
    told = about.get("distributedInfo")
    config = told.get("pg_config") if isinstance(told, dict) else None
    found = {}
    for one in config if isinstance(config, list) else ():
        if isinstance(one, dict) and isinstance(one.get("pg_name"), (str, int)):
            ranks, size = _ranks(one.get("ranks")), one.get("pg_size")
            found[str(one["pg_name"])[:MOST_GROUP]] = {
                "ranks": ranks, "size": size if type(size) is int and 0 < size < 1 << 24 else len(ranks),
                "desc": str(one.get("pg_desc", ""))[:MOST_GROUP], "backend": "kernels",
            }  # fmt: skip
    return found


def _ranks(told: Any) -> list[int]:
    """A list of ranks, or its text; nothing where it is cut short or none."""
    if isinstance(told, str) and ELIDED not in told:
        try:
            told = orjson.loads(told)
        except orjson.JSONDecodeError:
            return []
    if isinstance(told, list) and all(type(rank) is int and 0 <= rank < 1 << 24 for rank in told):
        return sorted(set(told))
    return []
