"""Collectives: too small, or in the way although they could overlap the computation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from .. import replay
from ..context import Context
from ..finding import Evidence, Finding, Fix, Gain, Where
from ..link import Link, fit_link
from .base import LEAST_SHARE, NotJudged, at, code_fix, confidence_of, need_steps

Float = npt.NDArray[np.float64]

CPU_MS_PER_BYTE: Final = 2e-6
"""Of reducing and copying, nominal: it stays whatever the cut."""
CAPS_MB: Final = (1, 2, 5, 10, 25, 50, 100)


@dataclass(frozen=True)
class Recut:
    """Another bucket size, replayed."""

    cap_mb: float
    buckets: int
    gain: Gain


def small_messages(context: Context) -> list[Finding]:
    """Many small collectives: each pays the latency, few would do."""
    need_steps(context)
    cut = _gradients(context)
    if cut is None:
        return []
    larger = [recut for recut in _recuts(context, cut) if recut.buckets < cut.count]
    if not larger:
        return []
    best = max(larger, key=lambda recut: recut.gain.ms)
    if best.gain.ms < LEAST_SHARE * context.step_ms:
        return []
    evidence = (
        Evidence("gradient collectives a step", cut.count, "count", best.buckets),
        Evidence("median size", round(cut.median_bytes / 1024, 1), "KiB"),
        Evidence("latency of one", round(cut.link.latency_ms, 4), "ms"),
        Evidence("host time to issue one", round(cut.host_ms, 4), "ms"),
    )
    title = f"{cut.count} gradient collectives a step of {_size(cut.median_bytes)} each are bound by latency"
    where = Where(group=cut.group, op="all_reduce", steps=context.step_range)
    fixes = (_bucket_fix(context, best),)
    confidence = confidence_of(best.gain) * (1.0 if cut.link.fitted else 0.5)
    return [Finding("comm.small-messages", title, "info", round(confidence, 2), where, evidence, best.gain, fixes)]


def exposed(context: Context) -> list[Finding]:
    """Collectives block the computation although they could overlap it."""
    need_steps(context)
    if context.ranks_missing:
        raise NotJudged("without every rank's capture, waiting for a late peer looks the same")
    waited = float(context.middle["comm_exposed"].mean())
    if waited < LEAST_SHARE * context.step_ms:
        return []
    cut = _gradients(context)
    smaller = [recut for recut in _recuts(context, cut) if cut and recut.buckets > cut.count]
    best = max(smaller, key=lambda recut: recut.gain.ms, default=None)
    evidence = [
        Evidence("exposed communication a step", round(waited, 3), "ms", 0.0),
        Evidence("share of the step", round(100 * waited / context.step_ms, 1), "%"),
    ]
    if cut is not None:
        evidence.append(Evidence("gradient collectives a step", cut.count, "count"))
    nothing = Gain(0.0, 0.0, 0.0, 0.0)
    fixes: list[Fix] = []
    gain = nothing
    if best is not None and best.gain.ms > 0:
        gain = best.gain
        fixes.append(_bucket_fix(context, best))
    for fact in context.facts.get("ddp", [])[:1]:
        if fact.get("find_unused_parameters"):
            title = f"find_unused_parameters=False if every parameter is used{at(fact.get('site'))}"
            fixes.append(code_fix(title, "find_unused_parameters", False, fact.get("site")))
    title = f"{waited:.1f} ms of each step wait for collectives"
    title += "" if fixes else "; no other bucket size would hide more of them"
    where = Where(group=cut.group if cut else None, op="all_reduce" if cut else None, steps=context.step_range)
    return [Finding("comm.exposed", title, "info", confidence_of(gain), where, tuple(evidence), gain, tuple(fixes))]


@dataclass(frozen=True)
class _Cut:
    """How the gradients are reduced now."""

    group: str
    count: int
    total_bytes: float
    median_bytes: float
    host_ms: float
    link: Link
    sizes: tuple[int, ...]
    """Of a typical step, in order of issue."""


def _gradients(context: Context) -> _Cut | None:
    table = context.collectives
    table = table[(table["purpose"] == "gradient") & table["step"].isin(context.step_numbers)]
    if table.empty:
        return None
    steps = table["step"].nunique()
    group = str(table["group"].mode().iloc[0])
    one_step = table[table["step"] == table["step"].iloc[len(table) // 2]]
    rows = context.rows
    issued = rows[(rows["kind"] == "comm") & (rows["purpose"] == "gradient")]
    host = issued["host_ns"].dropna().astype("int64")
    return _Cut(
        group=group,
        count=round(len(table) / steps),
        total_bytes=float(table["bytes"].sum() / steps),
        median_bytes=float(table["bytes"].median()),
        host_ms=float(host.median()) / 1e6 if len(host) else 0.0,
        link=fit_link(table),
        sizes=tuple(int(size) for size in one_step.sort_values("first_ns")["bytes"]),
    )


def _recuts(context: Context, cut: _Cut | None) -> list[Recut]:
    """The step replayed with other bucket sizes."""
    if cut is None:
        return []
    tensors = _tensor_bytes(context, cut)
    before = _replay_cut(context, cut, list(cut.sizes))
    found: list[Recut] = []
    for cap in CAPS_MB:
        sizes = pack(tensors, cap << 20)
        if found and found[-1].buckets == len(sizes):
            continue
        unburdened = _less_cpu_ms(context, cut, len(sizes))
        saved = before - context.overlapped(before, _replay_cut(context, cut, sizes)) + unburdened
        low, high = (before - _replay_cut(context, cut, sizes, 1 + sign * cut.link.spread) for sign in (1, -1))
        gain = context.gain(saved)
        ends = float(low.mean()) + unburdened, float(high.mean()) + unburdened
        gain = replace(gain, low=min(gain.low, *ends), high=max(gain.high, *ends))
        found.append(Recut(cap, len(sizes), gain))
    return found


def _replay_cut(context: Context, cut: _Cut, sizes: list[int], slower: float = 1.0) -> Float:
    """Step durations [S] with gradients cut into `sizes`. The present cut is replayed the same way, with modelled
    transfers, so that the model's own error cancels from the difference."""
    transfer = cut.link.transfer_ms(np.array(sizes, np.float64)) * slower
    return context.over_steps(lambda program: replay.run(replay.rebucket(program, sizes, transfer, cut.host_ms)))


def _less_cpu_ms(context: Context, cut: _Cut, buckets: int) -> float:
    """Where the cores are busy, each collective's CPU time in the backend's threads is taken from the computation."""
    load = context.load
    if load is None or load.beside_ms is None:
        return 0.0
    moving = cut.total_bytes * CPU_MS_PER_BYTE
    of_one = max(load.beside_ms - moving, 0.0) / cut.count
    return load.step_ms_of(of_one * (cut.count - buckets))


def _tensor_bytes(context: Context, cut: _Cut) -> list[int]:
    """Gradient sizes in the order they become ready; where DDP did not tell, pieces of 64 KiB."""
    for fact in context.facts.get("ddp", []):
        sizes = [int(size) for size in fact.get("gradient_bytes", [])]
        if sizes and 0.5 < sum(sizes) / max(cut.total_bytes, 1) < 2:
            return sizes
    piece = 1 << 16
    return [piece] * max(int(cut.total_bytes // piece), 1)


def pack(tensors: list[int], cap_bytes: int) -> list[int]:
    """Bucket sizes as DDP makes them for an explicit bucket_cap_mb: a bucket closes when it has reached its size."""
    sizes, current = [], 0
    for tensor in tensors:
        current += tensor
        if current >= cap_bytes:
            sizes.append(current)
            current = 0
    return [*sizes, current] if current else sizes


def _bucket_fix(context: Context, best: Recut) -> Fix:
    facts = context.facts.get("ddp", [])
    site = facts[0].get("site") if facts else None
    title = f"DistributedDataParallel(bucket_cap_mb={best.cap_mb:g}){at(site)}: {best.buckets} collectives a step"
    return code_fix(title, "bucket_cap_mb", best.cap_mb, site, best.gain)


def _size(count: float) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 1024:.1f} KiB"
