"""The alpha-beta model of a collective: a fixed latency and a time a byte, fitted to what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from ..align.link_shares import MANY_BYTES
from ..arrays import Float
from .transfers_at_once import SHARED, octaves, transfers_at_once

MIN_SIZE_RATIO = 2.0
"""Latency and bandwidth come apart only if the sizes differ by this much."""
LARGE_BYTES = 1 << 20
LEAST_MS_PER_BYTE = 1e-6
"""Where only small messages were seen, bandwidth cannot be told: take 1 GB/s at best."""

REFITS = 4
"""How often a fit to transfers that share the link tells what part of them bytes take, and is made anew by that."""
FREE = 0.1
"""Of what the largest transfers take: where the bytes of those that shared the link are said to take less, what they
took together is asked."""
FEW_BYTES = 1 << 16
"""The bytes of smaller messages are free on any link; of those up to MANY_BYTES it is not known."""
LONG_MS = 10.0
"""What hosts move that is all of one size, larger than FEW_BYTES, and typically takes longer than this is counted as
bandwidth: the latency of a network is a hundredth of it. (Six buckets of 0.5 MiB over 40 MB/s that three ranks shared
took 105 ms each.) That it is latency stays possible (`possible_links`). Of devices it is not known what waited."""
SLOW_MS_PER_BYTE = 2e-5
"""50 MB/s: cores that move and add bytes inside of a host, and wait for one another, are faster than that. (8 us a KB
were seen of four ranks on two busy cores.)"""
SPREAD_OF_SLOW = 0.25
"""Of large transfers that are all of one size, over a link that is slow: their bytes are what takes long, however these
are divided, and their latency is asked about by itself (`possible_links`). Savings so told of four jobs over links of
24 to 40 MB/s (d1 and d6 of benchmarks/fix_pairs.py, n1 and n2) were missed by up to 8 %; this allows for three times as
much."""
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
    """Fit by non-negative least squares of relative errors over the median transfer of each size. A size counts half
    for itself and half by the time that its transfers take together: what is small goes through buffers on its way, so
    it lies on no line with what is large, and the latter is what the steps wait for.

    Where all sizes are alike, a small message is counted as latency and a large one as bandwidth. Where transfers
    shared the link with others (`alone_ns`, if it is told), their bytes would have taken less by themselves, and their
    latency would not. How they shared it is an assumption: on one connection a small one waits for a large one, and
    seems to take as long. Where that makes bytes nearly free, all that were under way at once count as one transfer
    (`transfers_at_once`), as together they had the whole link. `on_device`: what was measured is what devices took and
    not what threads did that wanted a core, so a prediction for the same size errs as much as transfers were seen to
    vary; else that is not known where no two sizes tell.
    """
    if collectives.empty:
        return Link(0.0, 0.0, False)
    measured = _transfers(collectives)
    shared = measured.alone < SHARED * measured.ms
    if not shared.any():
        return _fit(measured, on_device=on_device)
    found = _refitted(measured, on_device=on_device)
    # Others that were alone may tell the latency: whether bytes are free is asked of those that shared the link.
    suspect = _refitted(_Transfers(*(of[shared] for of in measured)), on_device=on_device)
    if not suspect.fitted or not _bytes_are_free(suspect):
        return found
    size, ms, largest = transfers_at_once(collectives)
    together = _fit(_Transfers(size, ms, ms), on_device=on_device)
    if largest > MANY_BYTES and (together.fitted or together.latency_ms == 0):
        return replace(together, largest=largest)
    return replace(found, fitted=found.fitted and largest <= FEW_BYTES)


def _bytes_are_free(link: Link) -> bool:
    """Whether next to nothing of the largest transfers is their bytes."""
    return link.largest * link.ms_per_byte < FREE * float(link.transfer_ms(np.array(link.largest)))


def _refitted(table: _Transfers, *, on_device: bool) -> Link:
    """Fitted again and again, each time with what the transfers would take without those that shared the link."""
    long = _is_long(table, on_device=on_device)  # asked once: without those that shared the link they take less
    found = _fit(table, on_device=on_device, long=long)
    for _ in range(REFITS):
        found = _fit(_unshared(table, found), on_device=on_device, long=long)
    return found


def _is_long(table: _Transfers, *, on_device: bool) -> bool:
    """Whether what is moved takes longer than any latency: see LONG_MS."""
    return not on_device and bool(len(table.ms)) and float(np.median(table.ms)) > LONG_MS


def _fit(table: _Transfers, *, on_device: bool, long: bool | None = None) -> Link:
    """long: whether what is all of one size takes longer than any latency; None: as it does in the table."""
    long = _is_long(table, on_device=on_device) if long is None else long
    octave = octaves(table.bytes)
    alike = [octave == one for one in np.unique(octave)]
    size, transfer = (np.array([np.median(of[one]) for one in alike]) for of in (table.bytes, table.ms))
    usable = transfer > 0
    size, transfer = size[usable], transfer[usable]
    if len(size) == 0:
        return Link(0.0, 0.0, False)
    if size.max() < MIN_SIZE_RATIO * size.min():
        # No link is so slow that a small message is all bandwidth.
        if size.max() < LARGE_BYTES and not (long and size.max() > FEW_BYTES):
            found = Link(max(float(np.median(transfer - size * LEAST_MS_PER_BYTE)), 0.0), LEAST_MS_PER_BYTE, False)
        else:
            found = Link(0.0, float(np.median(transfer / size)), False)
            if found.ms_per_byte > SLOW_MS_PER_BYTE and size.max() >= LARGE_BYTES:
                found = replace(found, spread=SPREAD_OF_SLOW)
        found = replace(found, largest=float(size.max()))
        return _with_spread(found, table) if on_device else found
    spent = np.array([table.ms[one].sum() for one in alike])[usable]
    latency, per_byte = _line(size, transfer, (1 / len(size) + spent / spent.sum()) / 2)
    if size.max() < LARGE_BYTES:
        per_byte = max(per_byte, LEAST_MS_PER_BYTE)
    return _with_spread(Link(latency, per_byte, True, largest=float(size.max())), table)


def _line(size: Float, transfer: Float, weight: Float) -> tuple[float, float]:
    """Latency and ms a byte, neither below 0, so that the weighted squares of relative errors are least."""
    by = np.sqrt(weight)
    design = np.stack([by / transfer, by * size / transfer], axis=1)
    scale = np.abs(design).max(axis=0)
    latency, per_byte = _not_negative(design / scale, by) / scale
    return float(latency), float(per_byte)


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
    return _with_spread(link, _unshared(_transfers(collectives), link))


class _Transfers(NamedTuple):
    """Of each collective that moves anything. alone: its part of the time, where several shared the link."""

    bytes: Float
    ms: Float
    alone: Float


def _transfers(collectives: pd.DataFrame) -> _Transfers:
    size, took = collectives["bytes"].to_numpy(np.float64), collectives["transfer_ns"].to_numpy(np.float64)
    alone = collectives["alone_ns"].to_numpy(np.float64) if "alone_ns" in collectives else took
    moves = (size > 0) & np.isfinite(took) & np.isfinite(alone)
    return _Transfers(size[moves], took[moves] / 1e6, alone[moves] / 1e6)


def _unshared(table: _Transfers, link: Link) -> _Transfers:
    """What the transfers would take if each had the link to itself: the part of them that bytes take, as the link has
    it, is shorter."""
    of_bytes = table.bytes * link.ms_per_byte * table.ms / np.maximum(table.alone, 1e-9)
    part = of_bytes / np.maximum(of_bytes + link.latency_ms, 1e-12)
    return table._replace(ms=table.ms + part * (table.alone - table.ms))


def _with_spread(link: Link, table: _Transfers) -> Link:
    """With the error that its predictions for these collectives have."""
    predicted = np.maximum(link.transfer_ms(table.bytes), 1e-9)
    return replace(link, spread=max(float(np.median(np.abs(table.ms / predicted - 1))), LEAST_SPREAD))
