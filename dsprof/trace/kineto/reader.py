"""From a trace's text to the arrays that are kept of it.

Two of five events are arrows between others, which their correlation tells as well: they are passed over before they
are parsed. So are the arguments of operators.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any, Final

import orjson

from .arrays import COMM_ARGS, EventArrays
from .events import COPY, FILL, KERNEL, Events
from .from_perfetto import PerfettoEvents
from .names import ANNOTATIONS, CommNames
from .perfetto import looks_like_perfetto
from .phases import SAVES_IN_PYTHON
from .sound import (
    LATEST_US,
    Odd,
    has_times_and_thread,
    is_call,
    is_memory_sample,
    is_of_device,
    is_stream_wait,
)
from .stream import FIRST, LAST, SPLIT, TraceError, TraceText

Event = dict[str, Any]

MOST_UNKNOWN: Final = 5
"""Categories that are named, of events that are none of torch.profiler's."""
DEVICE_CATEGORIES: Final = {
    "kernel": KERNEL, "Kernel": KERNEL, "gpu_memcpy": COPY, "Memcpy": COPY, "gpu_memset": FILL, "Memset": FILL,
}  # fmt: skip
"""With a capital letter as torch before 1.12 wrote them, like those below."""
OPERATORS: Final = ("cpu_op", "Operator")
CALLS: Final = ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "privateuse1_runtime", "Runtime")
OLD_OPERATORS: Final = "Operator"
ANNOTATED: Final = ("user_annotation",)
PYTHON: Final = "python_function"
SYNCHRONIZATION: Final = "cuda_sync"
STREAM_WAIT: Final = "Stream Wait Event"
"""Of the kinds of synchronizations, the one that is between streams; hosts' waits are calls, too."""
PASSED_OVER: Final = ("ac2g", "fwdbwd", "async_cpu_to_gpu", "gpu_user_annotation", "Trace", "overhead")
LEGACY: Final = {"CPU functions": OLD_OPERATORS, "CUDA functions": "Kernel"}
"""`pid` of events without a category, as torch.autograd.profiler wrote them before torch 1.8 -> their category."""
MEMORY: Final = "[memory]"
BLOCK: Final = 1 << 14
"""Events that are held as they came, before they become arrays."""


def read_events(path: Path, comm: CommNames | None = None) -> Events:
    """All that is kept of a file: of Chrome's format, or of Perfetto's. Raises TraceError and OSError."""
    if looks_like_perfetto(path):
        found = PerfettoEvents(path, COMM_ARGS)
        return events_of(found, {"baseTimeNanoseconds": found.base_ns}, found.cut, comm)
    text, reader = TraceText(path), _EventReader(comm or CommNames())
    collects = gc.isenabled()
    gc.disable()  # what is parsed has no cycles, and looking for them takes a quarter of the time
    try:
        for piece in text.pieces():
            reader.take(piece)
    finally:
        if collects:
            gc.enable()
    return _on_base(reader.events, text.about, text.cut)


def events_of(found: Iterable[Event], about: dict[str, Any], cut: str = "", comm: CommNames | None = None) -> Events:
    """The same of events as torch.profiler's JSON has them. `about`: what that says beside them."""
    reader, found = _EventReader(comm or CommNames()), iter(found)
    while block := list(islice(found, BLOCK)):
        reader.take_events(block)
    return _on_base(reader.events, about, cut)


def _on_base(events: Events, about: dict[str, Any], cut: str) -> Events:
    events.about, events.cut = about, cut
    base = about.get("baseTimeNanoseconds", 0)
    if type(base) is int and 0 < base < LATEST_US * 500:
        for table in (events.ops, events.calls, events.device, events.memory, events.stream_waits):
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
OF_C10D: Final = re.compile(rb'"name": "(?:%s)' % b"|".join(name.encode() for name in ANNOTATIONS))
NAMED_WITHIN: Final = 120
"""So many bytes of an event tell how its name begins."""
ARROWS: Final = (b'    "ph": "s"', b'    "ph": "f"')
ARROW: Final = len(ARROWS[0])


def _pass_over(text: bytes) -> None:
    pass


class _EventReader:
    def __init__(self, comm: CommNames) -> None:
        self.events = Events()
        self._arrays = EventArrays(self.events, comm)
        # How Kineto's text of an event begins -> where it goes.
        self._takes: dict[bytes, Callable[[bytes], None]] = {}
        self._lists: dict[str, list[bytes]] = {}
        for category in (*OPERATORS, *CALLS, *DEVICE_CATEGORIES, *ANNOTATED, *PASSED_OVER):
            take = _pass_over if category in PASSED_OVER else self._lists.setdefault(category, []).append
            for layout in LAYOUTS:
                self._takes[(layout % category.encode())[:TELLING]] = take
        for layout in LAYOUTS:
            self._takes[(layout % PYTHON.encode())[:TELLING]] = self._python
        self._rest: list[bytes] = []
        self._broken = 0

    def take(self, piece: memoryview) -> None:
        """Add the events in a piece of text. Raises TraceError."""
        first = FIRST.match(piece)
        if first is not None and bytes(piece[-len(LAST) :]) == LAST:
            self._sort_texts(SPLIT.split(piece[first.end() : -len(LAST)]))
        else:
            self.take_events(parse_events(bytes(piece)))

    def take_events(self, found: list[Any]) -> None:
        """Add events that are parsed."""
        self.events.count += len(found)
        by_category: dict[str, list[Event]] = {}
        for event in found:
            if not isinstance(event, dict):
                self._leave_out(event)
                continue
            phase = event.get("ph")
            category = event.get("cat")
            if category is None:
                category = LEGACY.get(str(event.get("pid")))
            if phase == "X" and isinstance(category, str):
                by_category.setdefault(category, []).append(event)
            elif phase in ("X", "B", "b"):
                self._note_unknown(f"phase {phase}" if category is None else category)
            elif phase in ("i", "I") and event.get("name") == MEMORY:
                by_category.setdefault(MEMORY, []).append(event)
        for category, chosen in by_category.items():
            if category not in PASSED_OVER:
                self._take(category, chosen)

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
            if category in OPERATORS:  # without their arguments, but for annotations of collectives among them
                chosen = [
                    text if OF_C10D.search(text, 0, NAMED_WITHIN) else text.partition(ARGUMENTS)[0] for text in chosen
                ]
            self._take(category, self._each_parsed(chosen))
            self._lists[category].clear()
        if rest:
            found = self._each_parsed(rest)
            rest.clear()
            self.events.count -= len(found)
            self.take_events(found)

    def _python(self, text: bytes) -> None:
        """Of Python's functions only those are kept that save."""
        if b"save" in text and SAVES_IN_PYTHON.search(text.decode("utf-8", "replace")):
            self._rest.append(text)

    def _each_parsed(self, texts: list[bytes]) -> list[Any]:
        """Events from what stands between their braces; without those that are no JSON, as long as they are few."""
        try:
            return _loaded(b"{" + b"},{".join(texts) + b"}")
        except orjson.JSONDecodeError:
            found = []
            for text in texts:
                try:
                    found += parse_events(b"{" + text + b"}")
                except TraceError as error:
                    self._broken += 1
                    self._leave_out(text)
                    if self._broken > max(MOST_BROKEN_SHARE * self.events.count, FEW_BROKEN):
                        raise error
            return found

    def _take(self, category: str, found: list[Event]) -> None:
        if category in OPERATORS:
            old = category == OLD_OPERATORS
            self._try(lambda events: self._arrays.ops(events, old), has_times_and_thread, found)
        elif category in CALLS:
            self._try(self._arrays.calls, is_call, found)
        elif category in DEVICE_CATEGORIES:
            what = DEVICE_CATEGORIES[category]
            self._try(lambda events: self._arrays.device(events, what), is_of_device, found)
        elif category in ANNOTATED:
            self._try(self._arrays.annotations, has_times_and_thread, found)
        elif category == PYTHON:
            saving = [event for event in found if SAVES_IN_PYTHON.search(str(event.get("name")))]
            if saving:
                self._try(self._arrays.annotations, has_times_and_thread, saving)
        elif category == SYNCHRONIZATION:
            waits = [event for event in found if event.get("name") == STREAM_WAIT]
            if waits:
                self._try(self._arrays.stream_waits, is_stream_wait, waits)
        elif category == MEMORY:
            self._try(self._arrays.memory, is_memory_sample, found)
        else:
            self._note_unknown(category)

    def _note_unknown(self, category: Any) -> None:
        if len(self.events.unknown) < MOST_UNKNOWN:
            self.events.unknown.setdefault(str(category)[:40])

    def _try(self, add: Callable[[list[Event]], None], sound: Callable[[Event], bool], found: list[Event]) -> None:
        """Add them all at once, or, where one is odd, those that are sound."""
        try:
            add(found)
        except (Odd, KeyError, TypeError, AttributeError, ValueError, OverflowError):
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


def _loaded(events: bytes) -> list[Any]:
    found: list[Any] = orjson.loads(b"[" + events + b"]")
    return found


def parse_events(events: bytes) -> list[Any]:
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
