"""torch.profiler's events from a Perfetto trace (`export_chrome_trace("x.pftrace")`), as its JSON would have them.

Such a trace names no categories: those of a stream are told by their annotations, runtime calls by their names, and
what is left are operators and annotations, as in the JSON of torch before 1.12.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from .perfetto import PerfettoTrace, Slice, Track

CALL: Final = re.compile(r"(cuda|hip)[A-Z]|cu(Launch|Mem|Stream|Event|Graph)[A-Z]?")
PYTHON: Final = re.compile(r"\.py\(\d+\): |^<built-in |^nn\.Module: ")
OF_EVENTS: Final = (
    "stream", "device", "correlation", "bytes", "wait_on_stream", "wait_on_cuda_event_record_corr_id", "cbid",
    "Device Type", "Device Id", "Total Allocated", "Total Reserved",
)  # fmt: skip
COPIES: Final = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}
"""How names begin of what is no kernel -> `cat`."""
STREAM: Final = re.compile(r"stream\s*\d", re.IGNORECASE)


class PerfettoEvents:
    """A file's events. `base_ns`: to be added to their times. `cut`: as `PerfettoTrace.cut`. Raises TraceError
    and OSError. `more`: names of further arguments that are kept."""

    def __init__(self, path: Path, more: tuple[str, ...]) -> None:
        self._trace = PerfettoTrace(path, {*OF_EVENTS, *more})
        self.cut = self._trace.cut
        self.base_ns = self._trace.slices[0].start_ns if self._trace.slices else 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self._event(one) for one in self._trace.slices if one.value is None)

    def _event(self, one: Slice) -> dict[str, Any]:
        track = self._trace.tracks.get(one.track, Track())
        thread = track.tid if track.tid is not None else one.track % (1 << 31)
        event = {
            "ph": "X", "cat": one.category or category_of(one, track), "name": one.name, "pid": track.pid or 0,
            "tid": thread, "ts": (one.start_ns - self.base_ns) / 1e3, "dur": one.dur_ns / 1e3, "args": one.args,
        }  # fmt: skip
        if one.name == "[memory]":
            event["ph"] = "i"
        return event


def category_of(one: Slice, track: Track) -> str:
    """What the JSON has as `cat`."""
    args = one.args
    if "wait_on_stream" in args or one.name in ("Stream Wait Event", "Event Sync", "Stream Sync", "Context Sync"):
        return "cuda_sync"
    if "stream" in args or STREAM.match(track.name):
        if "correlation" not in args:
            return "gpu_user_annotation"
        return next((category for begins, category in COPIES.items() if one.name.startswith(begins)), "kernel")
    if "cbid" in args or ("correlation" in args and CALL.match(one.name)):
        return "cuda_runtime"
    return "python_function" if PYTHON.search(one.name) else "Operator"
