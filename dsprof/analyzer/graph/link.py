"""The alpha-beta model of a collective: a fixed latency and a time a byte, fitted to what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from ..arrays import Float, Int

MIN_SIZE_RATIO = 2.0
"""Latency and bandwidth come apart only if the sizes differ by this much."""
LARGE_BYTES = 1 << 20
LEAST_MS_PER_BYTE = 1e-6
"""Where only small messages were seen, bandwidth cannot be told: take 1 GB/s at best."""

OFTEN = 0.25
"""Of the steps: what comes in fewer of them tells nothing where others shared the link."""
LEAST_SPREAD = 0.1
"""Two sizes fit any line exactly; a prediction for a third is not exact."""


@dataclass(frozen=True)
class Link:
    """transfer_ms = latency_ms + bytes * ms_per_byte. `fitted`: the sizes seen told the two apart."""

    latency_ms: float
    ms_per_byte: float
    fitted: bool
    spread: float = 0.5
    """Typical relative error of one prediction."""
    largest: float = field(default=math.inf, compare=False)
    """Bytes of the largest transfer that it was fitted to: of larger ones it is only a guess."""

    def transfer_ms(self, size: Float) -> Float:
        return self.latency_ms + size * self.ms_per_byte


def capped(link: Link, size: float, ms_per_byte: float, largest: float) -> Link:
    """The same time for `size` bytes; the time of a further byte is at most what much larger transfers, of up to
    `largest` bytes, were seen to take. Small ones vary by more than their bytes take."""
    if link.ms_per_byte <= ms_per_byte:
        return link
    whole = float(link.transfer_ms(np.array(size)))
    return replace(link, latency_ms=max(whole - size * ms_per_byte, 0.0), ms_per_byte=ms_per_byte, largest=largest)


def fit_link(collectives: pd.DataFrame, *, on_device: bool = False) -> Link:
    """Fit by non-negative least squares of relative errors over the median transfer of each size.

    Where all sizes are alike, a small message is counted as latency and a large one as bandwidth. What shared the link
    with others (`alone_ns`, if it is told) counts as one transfer with them: in which order several get how much of a
    link nobody knows, but together they have the whole of it (`_as_one`). `on_device`: what was measured is what
    devices took and not what threads did that wanted a core, so a prediction for the same size errs as much as
    transfers were seen to vary; else that is not known where no two sizes tell.
    """
    if collectives.empty:
        return Link(0.0, 0.0, False)
    found = _fit(_transfers(collectives), on_device=on_device)
    return replace(found, largest=_largest(collectives)) if math.isfinite(found.largest) else found


def _fit(table: _Transfers, *, on_device: bool) -> Link:
    octave = _octaves(table.bytes)
    alike = [octave == one for one in np.unique(octave)]
    size, transfer = (np.array([np.median(of[one]) for one in alike]) for of in (table.bytes, table.ms))
    usable = transfer > 0
    size, transfer = size[usable], transfer[usable]
    if len(size) == 0:
        return Link(0.0, 0.0, False)
    if size.max() < MIN_SIZE_RATIO * size.min():
        if size.max() < LARGE_BYTES:  # no link is so slow that a small message is all bandwidth
            found = Link(max(float(np.median(transfer - size * LEAST_MS_PER_BYTE)), 0.0), LEAST_MS_PER_BYTE, False)
        else:
            found = Link(0.0, float(np.median(transfer / size)), False)
        found = replace(found, largest=float(size.max()))
        return _with_spread(found, table) if on_device else found
    design = np.stack([1 / transfer, size / transfer], axis=1)
    scale = np.abs(design).max(axis=0)
    latency, per_byte = _not_negative(design / scale, np.ones(len(size))) / scale
    if size.max() < LARGE_BYTES:
        per_byte = max(per_byte, LEAST_MS_PER_BYTE)
    return _with_spread(Link(float(latency), float(per_byte), True, largest=float(size.max())), table)


def _not_negative(design: Float, wanted: Float) -> Float:
    """The least squares of `wanted` by two columns, [N, 2], with nothing below 0, [2]. scipy.optimize does this for any
    number of columns, and its import takes 40 MB."""
    both: Float = np.asarray(np.linalg.lstsq(design, wanted)[0], np.float64)
    if (both >= 0).all():
        return both
    # Else one of the two is 0: where the sum of squares has its least on the edge of what is allowed.
    alone = np.diag(np.maximum(design.T @ wanted / np.maximum((design**2).sum(axis=0), 1e-300), 0.0))
    missed = ((design @ alone - wanted[:, None]) ** 2).sum(axis=0)
    found: Float = alone[:, int(missed.argmin())]
    return found


def same_sizes(link: Link, collectives: pd.DataFrame) -> Link:
    """`link`, of which nothing is asked but what these take, or as many of them at other times: it errs as much as they
    vary, whatever it would miss another size by."""
    return _with_spread(link, _transfers(collectives))


class _Transfers(NamedTuple):
    """Of each transfer that moves anything: bytes, and ms, to each latency that it has."""

    bytes: Float
    ms: Float


def _transfers(collectives: pd.DataFrame) -> _Transfers:
    moves = collectives[collectives["bytes"] > 0]
    size, took = moves["bytes"].to_numpy(np.float64), moves["transfer_ns"].to_numpy(np.float64)
    alone = moves["alone_ns"].to_numpy(np.float64) if "alone_ns" in moves else took
    if not (alone < took).any():
        return _Transfers(size, took / 1e6)
    return _as_one(moves, size, took / 1e6, alone / 1e6)


def _as_one(moves: pd.DataFrame, size: Float, took: Float, alone: Float) -> _Transfers:
    """Those that were under way at once, of a process group, as one: k of them that had the link for T in all, their
    parts of it, took T = latency * k / m + bytes * ms_per_byte, where m was how many of them there were at a time, as
    the latency of one passes while others move. All of it is divided by k / m here."""
    first = _first_of_each(moves, took)
    count = np.diff(np.append(first, len(size)))
    order = _by_begin(moves, took)
    bytes_of, took_of, alone_of = (np.add.reduceat(of[order], first) for of in (size, took, alone))
    latencies = count * alone_of / np.maximum(took_of, 1e-9)
    found = _Transfers(bytes_of / np.maximum(latencies, 1e-9), alone_of / np.maximum(latencies, 1e-9))
    if "step" not in moves:
        return found
    octave = _octaves(found.bytes)
    named, times = np.unique(octave, return_counts=True)
    often = np.isin(octave, named[times >= OFTEN * moves["step"].nunique()])
    return _Transfers(*(of[often] for of in found)) if often.any() else found


def _by_begin(moves: pd.DataFrame, took: Float) -> Int:
    """The order of the begins of transfers, group by group and step by step; as they are where no ends are told."""
    if "end_ns" not in moves:
        return np.arange(len(moves))
    begin = moves["end_ns"].to_numpy(np.float64) - 1e6 * took
    return np.lexsort((begin, *_lanes(moves)))


def _first_of_each(moves: pd.DataFrame, took: Float) -> Int:
    """Where in that order transfers begin while none that began before is under way."""
    if "end_ns" not in moves:
        return np.arange(len(moves))
    order = _by_begin(moves, took)
    end = moves["end_ns"].to_numpy(np.float64)[order]
    begin = end - 1e6 * took[order]
    lane = np.zeros(len(order), np.int64)
    for codes in _lanes(moves):
        lane[1:] += np.diff(codes[order]) != 0
    lane = np.cumsum(lane > 0)
    # Lane after lane on one axis: what was before ends before all that follows it begins.
    apart = lane * (np.nanmax(end, initial=0.0) - np.nanmin(begin, initial=0.0) + 1.0)
    upto = np.maximum.accumulate(np.nan_to_num(end, nan=-np.inf) + apart)
    starts = np.append(True, ~(begin[1:] + apart[1:] < upto[:-1]))
    return np.flatnonzero(starts)


def _lanes(moves: pd.DataFrame) -> list[Int]:
    """Numbers of what no transfers share a link across."""
    return [pd.factorize(moves[name])[0] for name in ("step", "group") if name in moves]


def _largest(collectives: pd.DataFrame) -> float:
    """Bytes of the usual largest collective, each by itself."""
    size = collectives["bytes"].to_numpy(np.float64)
    octave = _octaves(size)
    return float(np.median(size[octave == octave.max()]))


def _octaves(size: Float) -> Float:
    """Octaves rather than sizes: a run with 200 different parameters has too few samples of each."""
    found: Float = np.floor(np.log2(np.maximum(size, 1)))
    return found


def _with_spread(link: Link, table: _Transfers) -> Link:
    """With the error that its predictions for these collectives have."""
    predicted = np.maximum(link.transfer_ms(table.bytes), 1e-9)
    return replace(link, spread=max(float(np.median(np.abs(table.ms / predicted - 1))), LEAST_SPREAD))
