"""Parsed events as arrays: those of one kind, a list at a time."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from ..room import taken_by_json
from .events import KERNEL, UNKNOWN, Annotation, Events
from .names import ANNOTATIONS, CommNames
from .phases import stands_among_old_operators, stands_among_operators
from .sound import Odd, ns_of, whole
from .stream import MOST_TAKEN, TraceError

Int = npt.NDArray[np.int64]
Event = dict[str, Any]

MOST_NAME: Final = 512
"""Characters of a name that are kept."""
MOST_DISTINCT: Final = 1 << 20
"""Names; further ones are kept as OTHER_NAME, so that names that never repeat don't fill the memory."""
OTHER_NAME: Final = "(too many names)"
COMM_ARGS: Final = (
    "Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype", "Process Group Name",
    "Process Group Description", "Process Group Ranks", "Seq", "seq_num", "Input Dims", "Input type",
)  # fmt: skip
OF_A_THREAD: Final = itemgetter("name", "tid", "ts", "dur")
OF_A_DEVICE: Final = itemgetter("name", "ts", "dur")


class EventArrays:
    """Adds lists of events to `events`. A method raises Odd, or what a wrong type raises, where an event lacks what it
    should have."""

    def __init__(self, events: Events, comm: CommNames) -> None:
        self._events, self._comm = events, comm
        self._names: dict[str, int] = {}
        self._threads: dict[int | str, int] = {}
        self._notes: list[bool] = []  # of each name, whether an operator of it is an annotation
        self._taken_by_lists = 0

    def ops(self, found: list[Event], old: bool) -> None:
        """`old`: of before torch 1.12, where all annotations stand among the operators."""
        name, thread, start, length = zip(*map(OF_A_THREAD, found), strict=True)
        columns = {
            "name": self._name_codes(name), "thread": self._thread_codes(thread), "start_ns": ns_of(start),
            "dur_ns": ns_of(length),
        }  # fmt: skip
        noted = np.array(self._notes)[columns["name"]]
        if old:
            noted |= np.array([stands_among_old_operators(one) for one in name])
        if noted.any():
            self.annotations([found[at] for at in np.flatnonzero(noted).tolist()])
            columns = {key: column[~noted] for key, column in columns.items()}
        self._events.ops.add(**columns)

    def calls(self, found: list[Event]) -> None:
        name, thread, start, length = zip(*map(OF_A_THREAD, found), strict=True)
        self._events.calls.add(
            name=self._name_codes(name), thread=self._thread_codes(thread), start_ns=ns_of(start), dur_ns=ns_of(length),
            corr=whole([event["args"].get("correlation", UNKNOWN) for event in found]),
        )  # fmt: skip

    def device(self, found: list[Event], what: int) -> None:
        args = [event["args"] for event in found]
        name, start, length = zip(*map(OF_A_DEVICE, found), strict=True)
        names, first = self._name_codes(name), len(self._events.device)
        self._events.device.add(
            name=names, what=np.full(len(found), what), start_ns=ns_of(start), dur_ns=ns_of(length),
            device=whole([one.get("device", 0) for one in args]),
            stream=whole([one.get("stream", 0) for one in args]),
            corr=whole([one.get("correlation", UNKNOWN) for one in args]),
            bytes=whole([one.get("bytes", UNKNOWN) for one in args]),
        )  # fmt: skip
        if what == KERNEL:
            for at in np.flatnonzero(np.array([one is not None for one in self._events.collectives])[names]).tolist():
                self._events.comm_args[first + at] = self._kept(args[at])

    def annotations(self, found: list[Event]) -> None:
        _, thread, start, duration = zip(*map(OF_A_THREAD, found), strict=True)
        places = self._thread_codes(thread).tolist(), ns_of(start).tolist(), ns_of(duration).tolist()
        for event, of, begin, length in zip(found, *places, strict=True):
            name = event["name"][:MOST_NAME]
            args = event.get("args") if name.startswith(ANNOTATIONS) else None
            kept = self._kept(args) if isinstance(args, dict) else {}
            self._events.annotations.append(Annotation(name, of, begin, length, kept))

    def _kept(self, args: Event) -> Event:
        """Of a communication's arguments those that are used. Raises TraceError where lists in them take too much."""
        kept = {}
        for name in COMM_ARGS:
            value = args.get(name)
            if isinstance(value, list):
                self._taken_by_lists += taken_by_json(orjson.dumps(value))
            if isinstance(value, (str, int, list)):
                kept[name] = value
        if self._taken_by_lists > MOST_TAKEN:
            raise TraceError(
                f"the arguments of its communications would take more than {MOST_TAKEN >> 20} MiB of memory"
            )
        return kept

    def memory(self, found: list[Event]) -> None:
        args = [event["args"] for event in found]
        self._events.memory.add(
            start_ns=ns_of([event["ts"] for event in found]), kind=whole([one["Device Type"] for one in args]),
            device=whole([one["Device Id"] for one in args], least=-1),
            allocated=whole([one.get("Total Allocated", UNKNOWN) for one in args]),
            reserved=whole([one.get("Total Reserved", UNKNOWN) for one in args]),
        )  # fmt: skip

    def stream_waits(self, found: list[Event]) -> None:
        args = [event["args"] for event in found]
        self._events.stream_waits.add(
            start_ns=ns_of([event["ts"] for event in found]),
            device=whole([one.get("device", 0) for one in args]),
            stream=whole([one["stream"] for one in args]),
            corr=whole([one.get("correlation", UNKNOWN) for one in args]),
            of_stream=whole([one["wait_on_stream"] for one in args]),
            of_corr=whole([one["wait_on_cuda_event_record_corr_id"] for one in args]),
        )

    def _name_codes(self, names: Sequence[Any]) -> Int:
        codes = list(map(self._names.get, names))
        if None in codes:
            codes = [self._new_name(name) if code is None else code for code, name in zip(codes, names, strict=True)]
        return np.array(codes, np.int64)

    def _new_name(self, name: Any) -> int:
        if not isinstance(name, str):
            raise Odd
        name = name[:MOST_NAME]
        code = self._names.get(name)
        if code is None:
            if len(self._names) >= MOST_DISTINCT:
                name = OTHER_NAME
            code = self._names.get(name, len(self._events.names))
            if code == len(self._events.names):
                self._events.names.append(name)
                self._notes.append(stands_among_operators(name))
                self._events.collectives.append(self._comm.collective(name))
            self._names[name] = code
        return code

    def _thread_codes(self, threads: Sequence[Any]) -> Int:
        codes = list(map(self._threads.get, threads))
        if None in codes:
            codes = [self._new_thread(one) if code is None else code for code, one in zip(codes, threads, strict=True)]
        return np.array(codes, np.int64)

    def _new_thread(self, thread: Any) -> int:
        code = self._threads.get(thread)
        if code is None:
            if not isinstance(thread, (int, str)) or len(self._threads) >= MOST_DISTINCT:
                raise Odd
            code = self._threads[thread] = len(self._threads)
            self._events.threads.append(thread)
        return code
