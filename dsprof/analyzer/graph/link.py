"""The alpha-beta model of a collective: a fixed latency and a time a byte, fitted to what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from ..arrays import Float

MIN_SIZE_RATIO = 2.0
"""Latency and bandwidth come apart only if the sizes differ by this much."""
LARGE_BYTES = 1 << 20
LEAST_MS_PER_BYTE = 1e-6
"""Where only small messages were seen, bandwidth cannot be told: take 1 GB/s at best."""

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

    Where all sizes are alike, a small message is counted as latency and a large one as bandwidth. `on_device`: what was
    measured is what devices took and not what threads did that wanted a core, so a prediction for the same size errs
    as much as transfers were seen to vary; else that is not known where no two sizes tell.
    """
    from scipy.optimize import nnls

    if collectives.empty:
        return Link(0.0, 0.0, False)
    table = collectives[collectives["bytes"] > 0]
    # Octaves rather than sizes: a run with 200 different parameters has too few samples of each.
    octave = np.floor(np.log2(np.maximum(table["bytes"].to_numpy(np.float64), 1)))
    grouped = table.groupby(octave)
    size = grouped["bytes"].median().to_numpy(np.float64)
    transfer = grouped["transfer_ns"].median().to_numpy(np.float64) / 1e6
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
    solution, _ = nnls(design / scale, np.ones(len(size)))
    latency, per_byte = solution / scale
    if size.max() < LARGE_BYTES:
        per_byte = max(per_byte, LEAST_MS_PER_BYTE)
    return _with_spread(Link(float(latency), float(per_byte), True, largest=float(size.max())), table)


def same_sizes(link: Link, collectives: pd.DataFrame) -> Link:
    """`link`, of which nothing is asked but what these take, or as many of them at other times: it errs as much as they
    vary, whatever it would miss another size by."""
    return _with_spread(link, collectives[collectives["bytes"] > 0])


def _with_spread(link: Link, table: pd.DataFrame) -> Link:
    """With the error that its predictions for these collectives have."""
    every = table["transfer_ns"].to_numpy(np.float64) / 1e6
    predicted = np.maximum(link.transfer_ms(table["bytes"].to_numpy(np.float64)), 1e-9)
    return replace(link, spread=max(float(np.median(np.abs(every / predicted - 1))), LEAST_SPREAD))
