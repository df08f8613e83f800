"""From a trace's text to the arrays that are kept of it.

Two of five events are arrows between others, which their correlation tells as well: they are passed over before they
are parsed. So are the arguments of operators.
"""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from ..room import taken_by_json
from .events import COPY, FILL, KERNEL, UNKNOWN, Annotation, Events
from .names import ANNOTATIONS, CommNames
from .stream import FIRST, LAST, MOST_TAKEN, SPLIT, TraceError, TraceText

Int = npt.NDArray[np.int64]
Event = dict[str, Any]

LATEST_US: Final = 9.0e15
"""The year 2255. What is later, or before the epoch, is no time."""
MOST_NAME: Final = 512
"""Characters of a name that are kept."""
MOST_DISTINCT: Final = 1 << 20
"""Names; further ones are kept as OTHER_NAME, so that names that never repeat don't fill the memory."""
OTHER_NAME: Final = "(too many names)"
DEVICE_CATEGORIES: Final = {
    "kernel": KERNEL, "Kernel": KERNEL, "gpu_memcpy": COPY, "Memcpy": COPY, "gpu_memset": FILL, "Memset": FILL,
}  # fmt: skip
"""With a capital letter as torch before 1.12 wrote them, like those below."""
OPERATORS: Final = ("cpu_op", "Operator")
CALLS: Final = ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "privateuse1_runtime", "Runtime")
ANNOTATED: Final = ("user_annotation",)
PASSED_OVER: Final = (
    "ac2g", "fwdbwd", "async_cpu_to_gpu", "python_function", "gpu_user_annotation", "Trace", "overhead",
)  # fmt: skip
MEMORY: Final = "[memory]"
COMM_ARGS: Final = (
    "Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype", "Process Group Name",
    "Process Group Description", "Process Group Ranks", "Seq", "Input Dims", "Input type",
)  # fmt: skip


def read_events(path: Path, comm: CommNames | None = None) -> Events:
    """All that is kept of a file. Raises TraceError and OSError."""
    text, reader = TraceText(path), _EventReader(comm or CommNames())
    collects = gc.isenabled()
    gc.disable()  # what is parsed has no cycles, and looking for them takes a quarter of the time
    try:
        for piece in text.pieces():
            reader.take(piece)
    finally:
        if collects:
            gc.enable()
    events = reader.events
    events.about, events.cut = text.about, text.cut
    base = events.about.get("baseTimeNanoseconds", 0)
    if type(base) is int and 0 < base < LATEST_US * 500:
        for table in (events.ops, events.calls, events.device, events.memory):
            table["start_ns"][:] += base
        for note in events.annotations:
            note.start_ns += base
    return events


NO_NUMBER: Final = re.compile(rb":\s*-?(?:nan|inf|NaN|Infinity)\b")
FEW_BROKEN: Final = 2
MOST_BROKEN_SHARE: Final = 0.01
"""Of a file's events, that may be no JSON; with more of them it is not to be trusted."""
LAYOUTS: Final = (
    b'    "ph": "X", "cat": "%s", "name": ', b'    "ph": "X",\n    "cat": "%s",\n    "name": ',
)  # fmt: skip
"""How Kineto writes an event: of old, and as torch 2.13 has it."""
TELLING: Final = 35
"""So many bytes of an event tell its category, by the first eight letters of that."""
ARGUMENTS: Final = b',\n    "args"'
ARROWS: Final = (b'    "ph": "s"', b'    "ph": "f"')
ARROW: Final = len(ARROWS[0])


def _pass_over(text: bytes) -> None:
    pass


class _Odd(Exception):
    """One of these events lacks what it should have."""


class _EventReader:
    def __init__(self, comm: CommNames) -> None:
        self.events = Events()
        self._comm = comm
        self._names: dict[str, int] = {}
        self._threads: dict[int | str, int] = {}
        # How Kineto's text of an event begins -> where it goes.
        self._takes: dict[bytes, Callable[[bytes], None]] = {}
        self._lists: dict[str, list[bytes]] = {}
        for category in (*OPERATORS, *CALLS, *DEVICE_CATEGORIES, *ANNOTATED, *PASSED_OVER):
            take = _pass_over if category in PASSED_OVER else self._lists.setdefault(category, []).append
            for layout in LAYOUTS:
                self._takes[(layout % category.encode())[:TELLING]] = take
        self._rest: list[bytes] = []
        self._broken = 0
        self._taken_by_lists = 0

    def take(self, piece: memoryview) -> None:
        """Add the events in a piece of text. Raises TraceError."""
        first = FIRST.match(piece)
        if first is not None and bytes(piece[-len(LAST) :]) == LAST:
            self._sort_texts(SPLIT.split(piece[first.end() : -len(LAST)]))
        else:
            self._sort_events(_parsed(bytes(piece)))

    def _sort_texts(self, texts: list[bytes]) -> None:
        self.events.count += len(texts)
        takes, rest = self._takes, self._rest
        for text in texts:
            take = takes.get(text[:TELLING])
            if take is not None:
                take(text)
            elif text[:ARROW] not in ARROWS:
                rest.append(text)
        for category, chosen in self._lists.items():
            if not chosen:
                continue
            if category in OPERATORS:  # without their arguments
                chosen = [text.partition(ARGUMENTS)[0] for text in chosen]
            self._take(category, self._each_parsed(chosen))
            self._lists[category].clear()
        if rest:
            found = self._each_parsed(rest)
            rest.clear()
            self.events.count -= len(found)
            self._sort_events(found)

    def _each_parsed(self, texts: list[bytes]) -> list[Any]:
        """Events from what stands between their braces; without those that are no JSON, as long as they are few."""
        try:
            return _loaded(b"{" + b"},{".join(texts) + b"}")
        except orjson.JSONDecodeError:
            found = []
            for text in texts:
                try:
                    found += _parsed(b"{" + text + b"}")
                except TraceError as error:
                    self._broken += 1
                    self._leave_out(text)
                    if self._broken > max(MOST_BROKEN_SHARE * self.events.count, FEW_BROKEN):
                        raise error
            return found

    def _sort_events(self, found: list[Any]) -> None:
        self.events.count += len(found)
        by_category: dict[str, list[Event]] = {}
        for event in found:
            if not isinstance(event, dict):
                self._leave_out(event)
                continue
            phase = event.get("ph")
            category = event.get("cat")
            if phase == "X" and isinstance(category, str):
                by_category.setdefault(category, []).append(event)
            elif phase in ("i", "I") and event.get("name") == MEMORY:
                by_category.setdefault(MEMORY, []).append(event)
        for category, chosen in by_category.items():
            if category not in PASSED_OVER:
                self._take(category, chosen)

    def _take(self, category: str, found: list[Event]) -> None:
        if category in OPERATORS:
            self._try(self._ops, _times_and_thread, found)
        elif category in CALLS:
            self._try(self._calls, _of_call, found)
        elif category in DEVICE_CATEGORIES:
            what = DEVICE_CATEGORIES[category]
            self._try(lambda events: self._device(events, what), _of_device, found)
        elif category in ANNOTATED:
            self._try(self._annotations, _times_and_thread, found)
        elif category == MEMORY:
            self._try(self._memory, _of_memory, found)

    def _try(self, add: Callable[[list[Event]], None], sound: Callable[[Event], bool], found: list[Event]) -> None:
        """Add them all at once, or, where one is odd, those that are sound."""
        try:
            add(found)
        except (_Odd, KeyError, TypeError, AttributeError, ValueError, OverflowError):
            kept = []
            for event in found:
                if sound(event):
                    kept.append(event)
                else:
                    self._leave_out(event)
            if kept:
                add(kept)

    def _leave_out(self, event: Any) -> None:
        self.events.odd += 1
        if not self.events.first_odd:
            self.events.first_odd = repr(event)[:160]

    # --- a list of events as arrays

    def _ops(self, found: list[Event]) -> None:
        name, thread, start, length = zip(*map(OF_A_THREAD, found), strict=True)
        self.events.ops.add(
            name=self._name_codes(name), thread=self._thread_codes(thread), start_ns=_ns(start), dur_ns=_ns(length)
        )

    def _calls(self, found: list[Event]) -> None:
        name, thread, start, length = zip(*map(OF_A_THREAD, found), strict=True)
        self.events.calls.add(
            name=self._name_codes(name), thread=self._thread_codes(thread), start_ns=_ns(start), dur_ns=_ns(length),
            corr=_whole([event["args"].get("correlation", UNKNOWN) for event in found]),
        )  # fmt: skip

    def _device(self, found: list[Event], what: int) -> None:
        args = [event["args"] for event in found]
        name, start, length = zip(*map(OF_A_DEVICE, found), strict=True)
        names, first = self._name_codes(name), len(self.events.device)
        self.events.device.add(
            name=names, what=np.full(len(found), what), start_ns=_ns(start), dur_ns=_ns(length),
            device=_whole([one.get("device", 0) for one in args]),
            stream=_whole([one.get("stream", 0) for one in args]),
            corr=_whole([one.get("correlation", UNKNOWN) for one in args]),
            bytes=_whole([one.get("bytes", UNKNOWN) for one in args]),
        )  # fmt: skip
        if what == KERNEL:
            for at in np.flatnonzero(np.array(self.events.communicates)[names]).tolist():
                self.events.comm_args[first + at] = self._kept(args[at])

    def _annotations(self, found: list[Event]) -> None:
        _, thread, start, duration = zip(*map(OF_A_THREAD, found), strict=True)
        places = self._thread_codes(thread).tolist(), _ns(start).tolist(), _ns(duration).tolist()
        for event, of, begin, length in zip(found, *places, strict=True):
            name = event["name"][:MOST_NAME]
            args = event.get("args") if name.startswith(ANNOTATIONS) else None
            kept = self._kept(args) if isinstance(args, dict) else {}
            self.events.annotations.append(Annotation(name, of, begin, length, kept))

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

    def _memory(self, found: list[Event]) -> None:
        args = [event["args"] for event in found]
        self.events.memory.add(
            start_ns=_ns([event["ts"] for event in found]), kind=_whole([one["Device Type"] for one in args]),
            device=_whole([one["Device Id"] for one in args], least=-1),
            allocated=_whole([one.get("Total Allocated", UNKNOWN) for one in args]),
            reserved=_whole([one.get("Total Reserved", UNKNOWN) for one in args]),
        )  # fmt: skip

    def _name_codes(self, names: Sequence[Any]) -> Int:
        codes = list(map(self._names.get, names))
        if None in codes:
            codes = [self._new_name(name) if code is None else code for code, name in zip(codes, names, strict=True)]
        return np.array(codes, np.int64)

    def _new_name(self, name: Any) -> int:
        if not isinstance(name, str):
            raise _Odd
        name = name[:MOST_NAME]
        code = self._names.get(name)
        if code is None:
            if len(self._names) >= MOST_DISTINCT:
                name = OTHER_NAME
            code = self._names.get(name, len(self.events.names))
            if code == len(self.events.names):
                self.events.names.append(name)
                self.events.communicates.append(self._comm.communicates(name))
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
                raise _Odd
            code = self._threads[thread] = len(self._threads)
            self.events.threads.append(thread)
        return code


def _loaded(events: bytes) -> list[Any]:
    found: list[Any] = orjson.loads(b"[" + events + b"]")
    return found


def _parsed(events: bytes) -> list[Any]:
    """With what Kineto has written against JSON mended: numbers that are none, names that are no UTF-8. Raises
    TraceError."""
    try:
        return _loaded(events)
    except orjson.JSONDecodeError:
        mended = NO_NUMBER.sub(b": null", events.decode("utf-8", "replace").encode())
    try:
        return _loaded(mended)
    except orjson.JSONDecodeError as error:
        raise TraceError(f"an event is no JSON ({str(error)[:120]})") from error


OF_A_THREAD: Final = itemgetter("name", "tid", "ts", "dur")
OF_A_DEVICE: Final = itemgetter("name", "ts", "dur")


def _ns(microseconds: Sequence[Any]) -> Int:
    """Whole or with a fraction, as ns. Raises _Odd and what a wrong type raises."""
    values = np.array(microseconds)
    if values.dtype.kind not in "iuf":
        raise _Odd
    if not ((values >= 0) & (values < LATEST_US)).all():  # NaN is neither
        raise _Odd
    if values.dtype.kind in "iu":
        return values.astype(np.int64) * 1000
    whole = np.floor(values)
    result: Int = whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1000).astype(np.int64)
    return result


def _whole(values: list[Any], least: int = UNKNOWN) -> Int:
    found = np.array(values)
    if found.dtype.kind not in "iu" or (len(found) and (found.min() < least or found.max() >= 1 << 62)):
        raise _Odd
    return found.astype(np.int64)


# --- whether one event is sound: the same as above, one by one


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value < LATEST_US


def _is_whole(value: Any, least: int = UNKNOWN) -> bool:
    return type(value) is int and least <= value < 1 << 31


def _times_and_thread(event: Event) -> bool:
    named = isinstance(event.get("name"), str) and type(event.get("tid")) in (int, str)
    return named and _is_time(event.get("ts")) and _is_time(event.get("dur"))


def _args(event: Event) -> dict[str, Any] | None:
    args = event.get("args")
    return args if isinstance(args, dict) else None


def _of_call(event: Event) -> bool:
    args = _args(event)
    return _times_and_thread(event) and args is not None and _is_whole(args.get("correlation", UNKNOWN))


def _of_device(event: Event) -> bool:
    args = _args(event)
    if args is None or not (isinstance(event.get("name"), str) and _is_time(event.get("ts"))):
        return False
    numbers = (args.get(key, 0) for key in ("device", "stream", "correlation"))
    size = args.get("bytes", UNKNOWN)
    return _is_time(event.get("dur")) and all(map(_is_whole, numbers)) and type(size) is int and -1 <= size < 1 << 62


def _of_memory(event: Event) -> bool:
    args = _args(event)
    if args is None or not _is_time(event.get("ts")):
        return False
    sizes = (args.get(key, UNKNOWN) for key in ("Total Allocated", "Total Reserved"))
    return (
        _is_whole(args.get("Device Type"))
        and _is_whole(args.get("Device Id"), -1)
        and all(type(size) is int and -1 <= size < 1 << 62 for size in sizes)
    )
