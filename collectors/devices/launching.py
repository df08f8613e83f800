"""For how much of its steps a rank's device is in phases that its host is still launching, told while the job runs.

Inside of such a phase the device may stand idle, which events at its two ends do not show. The analyzer tells the same
of a run that has ended (`Study.unseen_idle_ms`). It is read back from the newest records of the rank's own capture,
whose file is in memory: that takes some milliseconds, and is done a few times in a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from dsprof.live.tail import Record, Tail
from dsprof.ondisk import Flag, State
from dsprof.schema import DEVICE_CLOCK, Kind

from ..native import NativeRecorder
from .device_times import PHASES

MOST_RECORDS: Final = 512
MOST_CHUNKS: Final = 2
"""That are read at once, and in so many files: phases of the host and of the device, some 60 steps of them."""
FEWEST_PHASES: Final = 8
"""Of the device. Of fewer nothing is told."""
TIGHTEST: Final = 0.25
"""Share of the samples of the two clocks that counts: those that tell the difference best."""
MOSTLY: Final = 0.9
"""Of the time in phases, what must be on one stream for that to be the one that computes."""


class DevicePhase(NamedTuple):
    """issue_ns: when the host began it; start_ns, end_ns: when the device did, and ended it, on the same clock"""

    issue_ns: int
    start_ns: int
    end_ns: int


class ClockSample(NamedTuple):
    """It was `device_ns` on the device at some time from `from_ns` to `to_ns` on the host."""

    from_ns: int
    to_ns: int
    device_ns: float


def clock_offset(samples: Iterable[ClockSample]) -> float | None:
    """What to add to a device's times, ns; None without samples. `trace.derive.device_clock` has the same of a whole
    capture, from more than the samples."""
    best = sorted(samples, key=lambda one: one.to_ns - one.from_ns)
    best = best[: max(1, int(len(best) * TIGHTEST))]
    if not best:
        return None
    low = max(one.from_ns - one.device_ns for one in best)
    high = min(one.to_ns - one.device_ns for one in best)
    if low <= high:
        return (low + high) / 2
    return median((one.from_ns + one.to_ns) / 2 - one.device_ns for one in best)


def launching_share(phases: Iterable[DevicePhase], host_ends: Mapping[int, int]) -> tuple[float, float] | None:
    """For how much of the time the device is in phases that its host is still launching, from 0 to 1: in the first half
    of the time from the first phase's begin to the last one's end, and in the second. None of too few phases.

    phases: of one stream, on the host's clock; host_ends: when the host began each phase -> when it ended it
    """
    outer: list[tuple[int, int, int]] = []
    latest = -1
    for phase in sorted(phases):
        ended = host_ends.get(phase.issue_ns, phase.issue_ns)
        if phase.issue_ns >= latest:  # else it lies within another one, as what is computed again in a backward
            outer.append((phase.start_ns, phase.end_ns, ended))
            latest = ended
    if len(outer) < FEWEST_PHASES:
        return None
    first, last = min(start for start, _, _ in outer), max(end for _, end, _ in outer)
    half = (last - first) / 2
    if half <= 0:
        return None
    spent = [0.0, 0.0]
    for start, end, host_end in outer:
        spent[start >= first + half] += max(min(host_end, end) - start, 0)
    return min(spent[0] / half, 1.0), min(spent[1] / half, 1.0)


class Launching:
    """Reads what one rank has recorded of itself so far."""

    def __init__(self, folder: Path, recorder: NativeRecorder) -> None:
        self._tail = Tail(folder)
        self._collect = recorder.collect_device
        self._names = frozenset(recorder.intern(name) for name in PHASES)
        self._clock = recorder.intern(DEVICE_CLOCK)
        self._samples: set[ClockSample] = set()

    def share(self, since_ns: int) -> tuple[float, float] | None:
        """`launching_share` of the phases that the host has begun since then; None where it is not known. Raises
        OSError."""
        self._collect()  # what the device is through with by now
        self._note_clock()
        offset = clock_offset(self._samples)
        records = self._tail.newest(bytes([Kind.KERNEL, Kind.PHASE]), MOST_RECORDS, MOST_CHUNKS)
        known = [one for one in records if one.name in self._names and one.end_ns and one.state is State.DONE]
        phases = [one for one in known if one.kind is Kind.KERNEL and one.flags & Flag.DEVICE]
        stream = self._computes(phases)
        if offset is None or stream is None:
            return None
        move = round(offset)
        host_ends: dict[int, int] = {}
        for one in known:
            if one.kind is Kind.PHASE:
                host_ends[one.start_ns] = max(one.end_ns, host_ends.get(one.start_ns, 0))
        timed = (
            DevicePhase(int(one.of("issue_ns")), one.start_ns + move, one.end_ns + move)
            for one in phases
            if one.of("lane") == stream and one.of("issue_ns") >= since_ns
        )
        return launching_share(timed, host_ends)

    def _note_clock(self) -> None:
        for one in self._tail.newest(bytes([Kind.GAUGE]), MOST_RECORDS, MOST_CHUNKS):
            if one.name == self._clock and one.end_ns:
                self._samples.add(ClockSample(one.start_ns, one.end_ns, float(one.of("value"))))

    def _computes(self, phases: list[Record]) -> int | None:
        """The lane of the stream that computes; None where several do, and none mostly."""
        spent: dict[int, int] = {}
        for one in phases:
            lane = int(one.of("lane"))
            spent[lane] = spent.get(lane, 0) + one.end_ns - one.start_ns
        most = max(spent, key=lambda lane: spent[lane], default=None)
        return most if most is not None and spent[most] >= MOSTLY * sum(spent.values()) else None
