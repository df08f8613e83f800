"""Traces of torch.profiler (Chrome's format and Perfetto's), old and new, of devices and of CPUs alone.

stream   a file's events, piece by piece, whatever its size: neither the file nor its events are ever held as a whole
around   what stands around the events: where they begin, and the few values beside them that are used
brackets brackets and quotes of a JSON text
events   what of them is kept, as arrays
arrays   lists of events, as those
reader   from text to lists of events, by their category
perfetto slices of a Perfetto trace (protobuf: its wire format, which Chakra's traces have, too)
from_perfetto  those as the events that torch.profiler's JSON has
chrome   a file's events as they are, for traces of other tools
names    which kernels communicate, and what collectives are called
phases   what the training thread did, from its operators and annotations
pauses   when the host put nothing on the device
sound    whether events have what they should have
collectives   what a communication says of its collective
rows     the trace's rows; `blocks`: how a table is made of them

`dsprof.importers.kineto` makes a run of them, `dsprof.trace.deep` rows of a rank that was captured besides.
"""

from __future__ import annotations

from .chrome import ChromeEvents, head_of
from .events import Events
from .names import CommNames, is_computation
from .pauses import launch_pauses
from .perfetto import PerfettoTrace, Slice, Track, looks_like_perfetto
from .reader import events_of, read_events
from .rows import TraceRows, trace_rows_of
from .stream import TraceError, TraceText, beginning_of, looks_like_trace

__all__ = [
    "ChromeEvents", "CommNames", "Events", "PerfettoTrace", "Slice", "TraceError", "TraceRows", "TraceText",
    "Track", "beginning_of",
    "events_of", "head_of", "is_computation", "launch_pauses", "looks_like_perfetto", "looks_like_trace", "read_events",
    "trace_rows_of",
]  # fmt: skip
