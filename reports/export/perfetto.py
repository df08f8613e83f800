"""A `.pftrace` for ui.perfetto.dev."""

from __future__ import annotations

import json
import zlib
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd

from dsprof.analyzer.text import clean
from dsprof.exported import ABOUT

from .about import about_run
from .slices import Selection, details, lanes, marks, records, samples

if TYPE_CHECKING:
    from dsprof.analyzer.analysis import Analysis

SEQUENCE: Final = 1
FINDINGS_PROCESS: Final = 1
"""Number of the process that the findings stand in; ranks follow."""
FIRST_RANK: Final = 2
STATE_CLEARED: Final = 1
NEEDS_STATE: Final = 2
"""Flags of a packet: whether names given before still hold."""


class MissingPackage(Exception):
    """The package that writes this format is not installed. The message says how to get it."""


def write(analysis: Analysis, file: IO[bytes], selection: Selection) -> int:
    """Write the run to `file`; how many events. Raises MissingPackage."""
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
    except ImportError as error:
        raise MissingPackage("Perfetto's trace writer is not installed: pip install 'dsprof[perfetto]'") from error
    writer = _Writer(protos, StreamingTraceProtoBuilder(file))
    hosts = {rank.rank: rank.host for rank in analysis.run.ranks}
    for rank in selection.ranks:
        rows = selection.of(analysis.trace.read(rank))
        host = f" ({clean(hosts[rank])})" if hosts.get(rank) else ""
        process = writer.process(FIRST_RANK + rank, f"rank {rank}{host}")
        for name, spans in lanes(rows):
            writer.slices(writer.track(process, name), spans)
        moments = marks(rows)
        if len(moments):
            writer.instants(writer.track(process, "marks"), moments)
        for name, values in samples(rows):
            writer.counter(process, name, values)
    writer.findings(analysis, selection)
    writer.about(analysis)
    return writer.events


class _Writer:
    """Packets of one sequence; names are written once and then told by number."""

    def __init__(self, protos: Any, builder: Any) -> None:
        self.events = 0
        self._protos = protos
        self._builder = builder
        self._names: dict[str, int] = {}
        self._first = True
        self._tracks = 0

    def process(self, number: int, name: str) -> int:
        self._tracks += 1
        packet = self._packet()
        packet.track_descriptor.uuid = self._tracks
        packet.track_descriptor.process.pid = number
        packet.track_descriptor.process.process_name = name
        self._builder.write_packet(packet)
        return self._tracks

    def track(self, process: int, name: str, **counter: Any) -> int:
        self._tracks += 1
        packet = self._packet()
        packet.track_descriptor.uuid = self._tracks
        packet.track_descriptor.parent_uuid = process
        packet.track_descriptor.name = clean(name)
        if counter:
            packet.track_descriptor.counter.unit = counter["unit"]
        self._builder.write_packet(packet)
        return self._tracks

    def slices(self, track: int, spans: pd.DataFrame) -> None:
        """Spans that nest, the outer first."""
        begin = self._protos.TrackEvent.TYPE_SLICE_BEGIN
        ends: list[int] = []
        for row in records(spans):
            start, stop = int(row["start_ns"]), int(row["start_ns"]) + int(row["dur_ns"])
            while ends and ends[-1] <= start:
                self._end(track, ends.pop())
            packet = self._event(track, start, begin, str(row["name"]), str(row["kind"]))
            self._annotate(packet.track_event, details(row))
            flow = _flow(row)
            if flow:
                packet.track_event.flow_ids.append(flow)
            self._builder.write_packet(packet)
            ends.append(stop)
        while ends:
            self._end(track, ends.pop())

    def instants(self, track: int, moments: pd.DataFrame) -> None:
        for row in records(moments):
            packet = self._event(
                track, int(row["start_ns"]), self._protos.TrackEvent.TYPE_INSTANT, str(row["name"]), "mark"
            )
            self._annotate(packet.track_event, details(row))
            self._builder.write_packet(packet)

    def counter(self, process: int, name: str, values: pd.DataFrame) -> None:
        descriptor = self._protos.CounterDescriptor
        memory = (values["kind"] == "mem").all()
        track = self.track(process, name, unit=descriptor.UNIT_SIZE_BYTES if memory else descriptor.UNIT_UNSPECIFIED)
        times, numbers = values["start_ns"].to_numpy(np.int64), values["value"].to_numpy(np.float64)
        for at, value in zip(times.tolist(), numbers.tolist(), strict=True):
            packet = self._packet(at)
            packet.track_event.type = self._protos.TrackEvent.TYPE_COUNTER
            packet.track_event.track_uuid = track
            packet.track_event.double_counter_value = value
            self._builder.write_packet(packet)
            self.events += 1

    def findings(self, analysis: Analysis, selection: Selection) -> None:
        """Each as long as the steps that it is of."""
        steps = analysis.steps
        if steps.empty:
            return
        process = self.process(FINDINGS_PROCESS, f"dsprof: {clean(analysis.verdict.headline)}")
        first, last = int(steps["step"].min()), int(steps["step"].max())
        for finding in analysis.findings:
            begin, end = finding.where.steps or (first, last)
            if selection.steps is not None:
                begin, end = max(begin, selection.steps[0]), min(end, selection.steps[1] - 1)
            there = steps[(steps["step"] >= begin) & (steps["step"] <= end)]
            if there.empty:
                continue
            track = self.track(process, f"{finding.severity} {finding.code}")
            start = int(there["start_ns"].min())
            packet = self._event(
                track, start, self._protos.TrackEvent.TYPE_SLICE_BEGIN, clean(finding.title), finding.code
            )
            said: dict[str, str | int | float] = {"code": finding.code, "severity": finding.severity}
            if finding.gain is not None:
                said |= {"gain_ms": finding.gain.ms, "gain_low_ms": finding.gain.low, "gain_high_ms": finding.gain.high}
            said |= {f"fix {number}": clean(fix.title) for number, fix in enumerate(finding.fixes, 1)}
            self._annotate(packet.track_event, said)
            self._builder.write_packet(packet)
            self._end(track, int((there["start_ns"] + there["dur_ns"]).max()))

    def about(self, analysis: Analysis) -> None:
        """A moment that says what run it is."""
        track = self.track(self.process(FINDINGS_PROCESS, "about this run"), ABOUT)
        first = int(analysis.steps["start_ns"].min()) if len(analysis.steps) else 0
        packet = self._event(track, first, self._protos.TrackEvent.TYPE_INSTANT, "run", ABOUT)
        annotation = packet.track_event.debug_annotations.add()
        annotation.name, annotation.string_value = ABOUT, json.dumps(about_run(analysis), default=str)
        self._builder.write_packet(packet)

    def _packet(self, at: int | None = None) -> Any:
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = SEQUENCE
        packet.sequence_flags = STATE_CLEARED if self._first else NEEDS_STATE
        self._first = False
        if at is not None:
            packet.timestamp = max(at, 0)
        return packet

    def _event(self, track: int, at: int, kind: int, name: str, category: str) -> Any:
        packet = self._packet(at)
        event = packet.track_event
        event.type, event.track_uuid = kind, track
        event.categories.append(category)
        number = self._names.get(name)
        if number is None:
            number = self._names[name] = len(self._names) + 1
            interned = packet.interned_data.event_names.add()
            interned.iid, interned.name = number, clean(name)
        event.name_iid = number
        self.events += 1
        return packet

    def _end(self, track: int, at: int) -> None:
        packet = self._packet(at)
        packet.track_event.type = self._protos.TrackEvent.TYPE_SLICE_END
        packet.track_event.track_uuid = track
        self._builder.write_packet(packet)

    @staticmethod
    def _annotate(event: Any, said: dict[str, str | int | float]) -> None:
        for name, value in said.items():
            annotation = event.debug_annotations.add()
            annotation.name = name
            if isinstance(value, bool | int):
                annotation.int_value = int(value)
            elif isinstance(value, float):
                annotation.double_value = value
            else:
                annotation.string_value = clean(value)


def _flow(row: dict[str, Any]) -> int:
    """The same number for a collective on all its ranks, and for what waits for it; 0: it is none."""
    group, number = row.get("group"), row.get("seq")
    if row["kind"] not in ("comm", "wait") or not isinstance(group, str) or not group:
        return 0
    if number is None or number is pd.NA or int(number) < 0 or str(row["name"]) in ("send", "recv"):
        return 0
    return zlib.crc32(f"{group} {int(number)}".encode()) + 1
