"""Transfers of a process group that were under way at once, counted as one: what they took together does not depend on
which of them got more of the link."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from ..arrays import Float, Int

SHARED: Final = 0.95
"""A transfer that had less of its link than this shared it."""
OFTEN: Final = 0.25
"""Of the steps: what comes in fewer of them tells nothing."""
TOUCHING_NS: Final = 1e4
"""One that begins so shortly before another one ends comes after it."""


def transfers_at_once(collectives: pd.DataFrame) -> tuple[Float, Float, float]:
    """Bytes and ms of each unbroken time in which transfers were under way, both divided by the latencies that passed
    one after another in it; and the bytes of the largest of these transfers.

    k transfers, m of them at a time, that had the link for T in all took T = latency * k / m + bytes * ms_per_byte, as
    the latency of one passes while others move. Without `end_ns` each counts by itself.
    """
    timed = collectives[[name for name in ("transfer_ns", "alone_ns") if name in collectives]].notna().all(axis=1)
    moves = collectives[(collectives["bytes"] > 0) & timed]
    size, took = (moves[name].to_numpy(np.float64) for name in ("bytes", "transfer_ns"))
    alone = moves["alone_ns"].to_numpy(np.float64) if "alone_ns" in moves else took
    if not len(moves):
        return np.empty(0), np.empty(0), 0.0
    order, first = _unbroken(moves, took)
    count = np.diff(np.append(first, len(size)))
    bytes_of, took_of, alone_of = (np.add.reduceat(of[order], first) for of in (size, took, alone))
    latencies = np.maximum(count * alone_of / np.maximum(took_of, 1e-9), 1e-9)
    often = _often(moves, bytes_of / latencies)
    largest = np.maximum.reduceat(size[order], first)[often].max()
    return (bytes_of / latencies)[often], (alone_of / latencies)[often] / 1e6, float(largest)


def octaves(size: Float) -> Float:
    """Octaves rather than sizes: a run with 200 different parameters has too few samples of each."""
    found: Float = np.floor(np.log2(np.maximum(size, 1)))
    return found


def _often(moves: pd.DataFrame, size: Float) -> npt.NDArray[np.bool_]:
    """Which of these sizes come often enough; all, where none does."""
    octave = octaves(size)
    named, times = np.unique(octave, return_counts=True)
    steps = moves["step"].nunique() if "step" in moves else 1
    found: npt.NDArray[np.bool_] = np.isin(octave, named[times >= OFTEN * steps])
    return found if found.any() else np.ones(len(size), bool)


def _unbroken(moves: pd.DataFrame, took: Float) -> tuple[Int, Int]:
    """The order of the begins of transfers, group by group and step by step; and where in it one begins while none that
    began before is under way."""
    if "end_ns" not in moves:
        return np.arange(len(moves)), np.arange(len(moves))
    end = moves["end_ns"].to_numpy(np.float64, na_value=np.nan)
    keys = [pd.factorize(moves[name])[0] for name in ("step", "group") if name in moves]
    order = np.lexsort((end - took, *keys))
    end, begin = end[order], (end - took)[order]
    other = np.zeros(len(order), bool)
    for key in keys:
        other[1:] |= np.diff(key[order]) != 0
    # One after another on one axis: all of a step ends before the next one begins.
    known = np.isfinite(end)
    span = float(end[known].max() - begin[known].min()) + 1.0 if known.any() else 0.0
    offset = np.cumsum(other) * span
    upto = np.maximum.accumulate(np.where(known, end + offset, -np.inf))
    starts = np.append(True, ~(begin[1:] + offset[1:] < upto[:-1] - TOUCHING_NS))
    return order, np.flatnonzero(starts)
