"""How far a device's clock lies apart from the host's, from what cannot have been otherwise.

A device does not begin what the host had not launched yet, and a call that waits for the device does not come back
before the device is through. Beside the samples that the capture takes for this (`native/device_times.hpp`) each launch
and each such wait is a bound. Samples are taken by a thread of their own, which on a busy host comes to it
milliseconds late; among the many bounds there are some of moments at which nothing was late. A bound holds at its time,
and by as much less before and after as clocks may have drifted apart since.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.schema import DEVICE_CLOCK, HOST_SYNC

from .rows import Int, ends, integers, present, texts

Float = npt.NDArray[np.float64]

DRIFT: Final = 50e-6
"""Of the time, by which the clocks may drift apart."""
APART_NS: Final = 20e9
"""Samples are taken twice in so long. Where nothing tells of a clock for longer it was not recorded, and may have been
set anew since (`DeviceTimes::stop`)."""
WAITS: Final = ("item", "torch.cuda.synchronize")
"""Calls that come back when the stream of the thread is through. Others may wait for less, or, as a copy to pinned
memory, for nothing."""


@dataclass(frozen=True)
class Bounds:
    """What is to be added to a device's time, ns: `low` or more, `low_at` by that clock; `high` or less, `high_at`."""

    low_at: Float
    low: Float
    high_at: Float
    high: Float

    def __add__(self, other: Bounds) -> Bounds:
        names = ("low_at", "low", "high_at", "high")
        return Bounds(*(np.concatenate([getattr(self, name), getattr(other, name)]) for name in names))


@dataclass(frozen=True)
class DeviceClock:
    """certain: bounds by samples and launches; waits: by calls that waited for the device, of which some may have
    waited for less: those that are contradicted do not count."""

    certain: Bounds
    waits: Bounds

    def offset(self, at: Float) -> tuple[Float, Float]:
        """What to add to a device's times (ns), and how far off that may be, ns."""
        offset, doubt = np.zeros(len(at)), np.zeros(len(at))
        which = np.searchsorted(self._begins, at, "right") - 1
        for part in np.unique(np.maximum(which, 0)).tolist():
            mine = np.maximum(which, 0) == part
            bounds = self._parts[part]
            low, high = (
                _at_least(bounds.low_at, bounds.low, at[mine]),
                -_at_least(bounds.high_at, -bounds.high, at[mine]),
            )
            offset[mine], doubt[mine] = (low + high) / 2, np.abs(high - low) / 2
        return offset, doubt

    @cached_property
    def _bounds(self) -> Bounds:
        """All that count."""
        least = _at_least(self.certain.low_at, self.certain.low, self.waits.high_at)
        kept = self.waits.high >= least
        nothing = np.empty(0)
        return self.certain + Bounds(nothing, nothing, self.waits.high_at[kept], self.waits.high[kept])

    @cached_property
    def _begins(self) -> Float:
        """When each unbroken time begins in which something tells of the clock, from both sides. Times between belong
        to the one before."""
        every = np.sort(np.append(self._bounds.low_at, self._bounds.high_at))
        begins = every[np.append(True, np.diff(every) > APART_NS)]
        low, high = (np.searchsorted(begins, at, "right") - 1 for at in (self._bounds.low_at, self._bounds.high_at))
        found: Float = begins[np.intersect1d(low, high)]
        return found

    @cached_property
    def _parts(self) -> list[Bounds]:
        bounds = self._bounds
        low, high = (np.searchsorted(self._begins, at, "right") - 1 for at in (bounds.low_at, bounds.high_at))
        return [
            Bounds(bounds.low_at[low == i], bounds.low[low == i], bounds.high_at[high == i], bounds.high[high == i])
            for i in range(len(self._begins))
        ]


def _at_least(when: Float, low: Float, at: Float) -> Float:
    """What the offset is at least at some times, by bounds of other times; without any, nothing: -inf."""
    found = np.full(len(at), -np.inf)
    if not len(when):
        return found
    order = np.argsort(when, kind="stable")
    first = float(when[order[0]])
    when, low, at = when[order] - first, low[order], at - first
    before, after = np.maximum.accumulate(low + DRIFT * when), np.maximum.accumulate((low - DRIFT * when)[::-1])[::-1]
    place = np.searchsorted(when, at, "right")
    there = place > 0
    found[there] = before[place[there] - 1] - DRIFT * at[there]
    there = place < len(when)
    found[there] = np.maximum(found[there], after[place[there]] + DRIFT * at[there])
    return found


def align_clock(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with the times of a device's streams on the host's clock, and without the samples that tell it."""
    sampled = (texts(rows, "kind") == "gauge") & (texts(rows, "name") == DEVICE_CLOCK)
    if not sampled.any():
        return rows
    clock = clock_of(rows)
    timed = (rows["device"] & rows["dur_ns"].notna()).to_numpy(bool)
    rows = rows[~sampled].reset_index(drop=True)
    timed = timed[~sampled]
    start, end = rows["start_ns"].to_numpy(np.int64)[timed], ends(rows)[timed]
    started, ended = (at + np.rint(clock.offset(at.astype(np.float64))[0]).astype(np.int64) for at in (start, end))
    rows.loc[timed, "start_ns"] = started
    rows.loc[timed, "dur_ns"] = pd.array(np.maximum(ended - started, 0), "Int64")
    return rows


def clock_of(rows: pd.DataFrame) -> DeviceClock:
    """Of rows with samples."""
    sampled = (texts(rows, "kind") == "gauge") & (texts(rows, "name") == DEVICE_CLOCK) & present(rows, "value")
    return DeviceClock(of_samples(rows[sampled]) + of_launches(rows), of_waits(rows))


def of_samples(samples: pd.DataFrame) -> Bounds:
    """A sample says that it was `value` on the device at some time from `start_ns` to `start_ns + dur_ns`."""
    device = samples["value"].to_numpy(np.float64)
    early = samples["start_ns"].to_numpy(np.float64) - device
    return Bounds(device, early, device, early + samples["dur_ns"].fillna(0).to_numpy(np.float64))


def of_launches(rows: pd.DataFrame) -> Bounds:
    """Phases and waits of streams began no earlier than the host had issued them."""
    kind = texts(rows, "kind")
    chosen = rows["device"].to_numpy(bool) & present(rows, "dur_ns") & present(rows, "issue_ns")
    chosen &= (kind == "kernel") | (kind == "wait")
    start = rows["start_ns"].to_numpy(np.float64)[chosen]
    nothing = np.empty(0)
    return Bounds(start, integers(rows, "issue_ns")[chosen] - start, nothing, nothing)


def of_waits(rows: pd.DataFrame) -> Bounds:
    """Phases that the host had launched to the end were over when a thread that waited for them then went on."""
    kind, device = texts(rows, "kind"), rows["device"].to_numpy(bool)
    ended, thread, lane = present(rows, "dur_ns"), rows["thread"].to_numpy(np.int64), texts(rows, "lane")
    end, nothing = ends(rows), np.empty(0)
    of_stream = device & (kind == "kernel") & ended & present(rows, "issue_ns")
    waited = ~device & (kind == "mark") & (texts(rows, "name") == HOST_SYNC) & ended
    waited &= np.isin(texts(rows, "purpose"), WAITS)
    if not of_stream.any() or not waited.any():
        return Bounds(nothing, nothing, nothing, nothing)
    # Of the stream that computes: a call waits for the one that is current.
    spent = pd.Series(integers(rows, "dur_ns")[of_stream]).groupby(pd.factorize(lane[of_stream])[0]).sum()
    of_stream[of_stream] = pd.factorize(lane[of_stream])[0] == int(spent.idxmax())
    waited &= np.isin(thread, np.unique(thread[of_stream]))
    of_host = ~device & (kind == "phase") & ended
    host_end = pd.Series(end[of_host]).groupby(rows["start_ns"].to_numpy(np.int64)[of_host]).max()
    launched = host_end.reindex(integers(rows, "issue_ns")[of_stream]).to_numpy(np.float64)
    known = ~np.isnan(launched)
    order = np.argsort(launched[known], kind="stable")
    launched, over = launched[known][order], np.maximum.accumulate(end[of_stream][known][order].astype(np.float64))
    began: Int = rows["start_ns"].to_numpy(np.int64)[waited]
    last = np.searchsorted(launched, began, "right") - 1
    there = last >= 0
    over = over[last[there]]
    return Bounds(nothing, nothing, over, end[waited][there] - over)
