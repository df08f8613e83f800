"""How far a device's clock lies apart from the host's, from what cannot have been otherwise.

A device does not begin what the host had not launched yet, and a call that waits for the device does not come back
before the device is through. Beside the samples that the capture takes for this (`native/device_times.hpp`) each launch
and each such wait is a bound. Samples are taken by a thread of their own, which on a busy host comes to it
milliseconds late; among the many bounds there are some of moments at which nothing was late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.schema import DEVICE_CLOCK, HOST_SYNC

from .rows import Int, ends, integers, present, texts

Float = npt.NDArray[np.float64]

SEGMENT_NS: Final = 20_000_000_000
"""In that time the clocks drift apart by a fraction of a millisecond at most."""
FINEST_NS: Final = 1_000_000_000
"""Bounds within it that contradict each other do so for another reason than drift."""
DRIFT: Final = 100e-6
"""Of the time, by which clocks may drift apart: no bound of a wait that differs by more is one."""
WAITS: Final = ("item", "copy to host", "torch.cuda.synchronize")
"""Calls that come back when the stream of the thread is through: others may wait for less, or for nothing."""


@dataclass(frozen=True)
class Bounds:
    """What is to be added to a device's time, ns: `low` or more, `low_at` by that clock; `high` or less, `high_at`."""

    low_at: Float
    low: Float
    high_at: Float
    high: Float

    def between(self, begin: float, end: float) -> Bounds:
        low = (self.low_at >= begin) & (self.low_at < end)
        high = (self.high_at >= begin) & (self.high_at < end)
        return Bounds(self.low_at[low], self.low[low], self.high_at[high], self.high[high])

    def __add__(self, other: Bounds) -> Bounds:
        names = ("low_at", "low", "high_at", "high")
        return Bounds(*(np.concatenate([getattr(self, name), getattr(other, name)]) for name in names))


def align_clock(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with the times of a device's streams on the host's clock, and without the samples that tell it."""
    sampled = (texts(rows, "kind") == "gauge") & (texts(rows, "name") == DEVICE_CLOCK)
    if not sampled.any():
        return rows
    when, offset, _ = clock_offsets(of_samples(rows[sampled]), of_launches(rows), of_waits(rows))
    timed = (rows["device"] & rows["dur_ns"].notna()).to_numpy(bool)
    rows = rows[~sampled].reset_index(drop=True)
    timed = timed[~sampled]
    start, end = rows["start_ns"].to_numpy(np.int64)[timed], ends(rows)[timed]
    started, ended = (at + np.rint(np.interp(at, when, offset)).astype(np.int64) for at in (start, end))
    rows.loc[timed, "start_ns"] = started
    rows.loc[timed, "dur_ns"] = pd.array(np.maximum(ended - started, 0), "Int64")
    return rows


def clock_offsets(
    samples: Bounds, launches: Bounds | None = None, waits: Bounds | None = None
) -> tuple[Float, Float, float]:
    """What to add to a device's times (ns) at some of them, in order, and how far off that may be, ns.

    waits: those that contradict the others by more than clocks drift are not used: such a call waited for less.
    """
    certain = samples if launches is None else samples + launches
    if waits is not None and len(certain.low):
        least = certain.low.max() - DRIFT * float(np.ptp(np.append(certain.low_at, waits.high_at)))
        kept = waits.high >= least
        certain += Bounds(waits.low_at, waits.low, waits.high_at[kept], waits.high[kept])
    first, last = float(samples.low_at.min()), float(np.append(certain.low_at, certain.high_at).max())
    edges = np.arange(first, last + SEGMENT_NS, SEGMENT_NS)
    edges[0] = -np.inf
    found = [
        point for begin in edges for point in _points(certain, float(begin), max(float(begin), first) + SEGMENT_NS)
    ]
    found.sort()
    when, offset, doubt = (np.array(column) for column in zip(*found, strict=True))
    return when, offset, float(np.median(doubt))


def _points(bounds: Bounds, begin: float, end: float) -> list[tuple[float, float, float]]:
    """When, what to add, and how far off that may be: of all this time, or of halves of it where it is not the same."""
    here = bounds.between(begin, end)
    if not len(here.low) or not len(here.high):
        return []
    at, until = int(here.low.argmax()), int(here.high.argmin())
    low, high = float(here.low[at]), float(here.high[until])
    every = np.append(here.low_at, here.high_at)
    if low > high and np.ptp(every) > FINEST_NS:
        middle = float(every.min() + every.max()) / 2
        halves = _points(here, begin, middle) + _points(here, middle, end)
        if halves:
            return halves
    return [(float(here.low_at[at] + here.high_at[until]) / 2, (low + high) / 2, abs(high - low) / 2)]


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
