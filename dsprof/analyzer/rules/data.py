"""Input: the loop waits for it, or the ranks get unequal amounts of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ..context import Change, Context
from ..finding import Evidence, Finding, Fix, Gain, Where
from .base import NotJudged, at, code_fix, confidence_of

Float = npt.NDArray[np.float64]

MOST_WORKERS = 32
HAND_OVER_MS = 0.5
HAND_OVER_MS_PER_BYTE = 1e-6
SLACK = 1.5
"""Batches do not all take the same time: that much more capacity than the mean needs."""


def waiting(context: Context) -> Change | None:
    """Enough DataLoader workers to have the next batch ready in time."""
    waited = context.work("data")
    worst = float(waited.mean(axis=1).max())
    if worst <= 0:
        return None
    one_batch, rest, workers, _ = _supply(context, worst)
    left = min((max(one_batch / workers - rest, 0) + _hand_over_ms(context)) / worst, 1.0)
    return Change({"data": waited * (1 - left)}, overlaps=True) if left < 1 else None


def _hand_over_ms(context: Context) -> float:
    """What taking a batch from a worker costs by itself, nominal: a queue, and the bytes at memory speed."""
    rows = context.rows
    forward = rows[(rows["kind"] == "phase") & (rows["name"] == "forward") & rows["step"].isin(context.step_numbers)]
    size = float(forward["bytes"].fillna(0).sum()) / max(len(context.ranks) * len(context.step_numbers), 1)
    return HAND_OVER_MS + size * HAND_OVER_MS_PER_BYTE


def _supply(context: Context, worst_ms: float) -> tuple[float, float, int, int]:
    """Time one worker takes for a batch, the step without the wait (ms); workers that would do, and those there are."""
    loader = _loader(context)
    now = int(loader.get("num_workers") or 0) if loader else 0
    rest = max(context.step_ms - worst_ms, 0.05 * context.step_ms)
    # Starved workers finish a batch a step between them, so one takes `now` steps; a loop that loads its own batches
    # takes what it waited.
    one_batch = now * context.step_ms if now else worst_ms
    workers = min(max(math.ceil(SLACK * one_batch / rest), now + 1, 2), MOST_WORKERS)
    return one_batch, rest, workers, now


def _loader(context: Context) -> dict[str, Any] | None:
    """The DataLoader that the loop waited for most: its rows carry its number as their value. None: none was seen."""
    rows = context.rows
    data = rows[(rows["kind"] == "phase") & (rows["name"] == "data") & rows["step"].isin(context.step_numbers)]
    loaders = context.facts.get("dataloader", [])
    waited = data["dur_ns"].astype("float64").groupby([data["rank"], data["value"]]).sum()
    if len(waited):
        rank, number = waited.idxmax()
        same = [fact for fact in loaders if fact.get("number") == int(number)]
        if same:
            return next((fact for fact in same if fact.get("rank") == int(rank)), same[0])
    return loaders[0] if loaders and len({fact.get("site") for fact in loaders}) == 1 else None


def stall(context: Context, change: Change, gain: Gain, alone: Gain) -> Finding:
    """The training loop stands still until its next batch is there."""
    mean = context.work("data").mean(axis=1)
    loader = _loader(context)
    _, _, workers, now = _supply(context, float(mean.max()))
    ranks = tuple(rank for rank, ms in zip(context.ranks, mean, strict=True) if ms > 0.5 * mean.max())
    measured = bool(((context.rows["name"] == "data") & (context.rows["source"] == "measured")).any())
    evidence = [
        Evidence("waiting for input a step", round(float(mean.max()), 3), "ms", 0.0),
        Evidence("share of the step", round(100 * float(mean.max()) / context.step_ms, 1), "%"),
        Evidence("DataLoader workers", now if loader else "unknown", "", workers),
    ]
    if not measured:
        evidence.append(Evidence("seen as", "time between the optimizer and the next forward", ""))
    site = loader.get("site") if loader else None
    fixes: list[Fix] = []
    if loader and loader.get("by_engine"):
        call = f"DataLoader(..., num_workers={workers}, persistent_workers=True)"
        title = f"initialize(training_data={call}){at(site)}; of a data set it makes a DataLoader with {now} workers"
        fixes.append(code_fix(title, "training_data", call, site, alone))
    elif loader:
        title = f"DataLoader(num_workers={workers}, persistent_workers=True){at(site)}"
        title += "; its IterableDataset must be split by get_worker_info()" if loader.get("iterable") else ""
        fixes.append(code_fix(title, "num_workers", workers, site, alone))
        if now and not loader.get("persistent_workers"):
            fixes.append(code_fix("keep workers between epochs", "persistent_workers", True, site))
    else:
        title = f"prepare batches beside the computation: a DataLoader with num_workers={workers}"
        fixes.append(code_fix(title, "num_workers", workers, None, alone))
    title = f"the loop waits {mean.max():.1f} ms of each step for input"
    where = Where(ranks=ranks, op="DataLoader" if loader else None, steps=context.step_range)
    return Finding("data.stall", title, "info", confidence_of(gain), where, tuple(evidence), gain, tuple(fixes))


def explained_by_size(context: Context) -> tuple[Float, Float] | None:
    """The part of each rank's compute that its share of the input explains: ms above (+) or below (-) what an equal
    share would cost, [R, S]; and the sizes. None where sizes are unknown or never differ between ranks that are to do
    the same work.

    Compute is taken as linear in the input, with the slope from how a rank's own compute follows its own input; where
    a rank's input never varies, from the differences between ranks.
    """
    sizes = context.input_sizes()
    if sizes is None:
        return None
    between = _less_mean_of_team(context, sizes)
    if not between.any():
        return None
    compute = context.work("compute")
    within = sizes - sizes.mean(axis=1, keepdims=True)
    if within.any():
        slope = float((within * (compute - compute.mean(axis=1, keepdims=True))).sum() / (within**2).sum())
    else:
        slope = float((between * _less_mean_of_team(context, compute)).sum() / (between**2).sum())
    excess: Float = max(slope, 0.0) * between
    return np.minimum(excess, 0.95 * compute), sizes


def _less_mean_of_team(context: Context, values: Float) -> Float:
    """`values` [R, S] without their mean over the ranks that are to do the same work."""
    found = np.zeros_like(values)
    for team in context.teams:
        found[team] = values[team] - values[team].mean(axis=0)
    return found


def unequal(context: Context) -> Change | None:
    """Every rank given an equal share of the step's input."""
    if len(context.ranks) < 2:
        if context.ranks_missing:
            raise NotJudged("only one of the job's ranks was captured")
        return None
    if context.input_sizes() is None:
        raise NotJudged("the sizes of the inputs to forward were not captured")
    if context.in_stages and len(context.teams) == 1:
        raise NotJudged("ranks are stages of a pipeline, so their inputs differ")
    explained = explained_by_size(context)
    return Change({"compute": explained[0]}) if explained is not None else None


def imbalance(context: Context, change: Change, gain: Gain, alone: Gain) -> Finding:
    """Ranks are given unequal amounts of work in the same step, so each step takes as long as its largest share."""
    excess, compute = change.removed["compute"], context.work("compute")
    sizes = context.input_sizes()
    assert sizes is not None
    spreads = [np.ptp(sizes[team], axis=0) / np.maximum(sizes[team].mean(axis=0), 1) for team in context.teams]
    spread = np.max(spreads, axis=0)
    deviation = _less_mean_of_team(context, compute).ravel()
    share = np.corrcoef(excess.ravel(), deviation)[0, 1] if excess.any() and deviation.any() else 0.0
    evidence = (
        Evidence("largest less smallest input of a step, of the mean", round(100 * float(spread.mean()), 1), "%", 0.0),
        Evidence("extra compute of the rank with most input", round(float(excess.max(axis=0).mean()), 3), "ms", 0.0),
        Evidence("correlation of a rank's extra compute with its extra input", round(float(share), 2), ""),
    )
    loaders = context.facts.get("dataloader", [])
    site = loaders[0].get("site") if loaders else None
    title = (
        f"give every rank batches of like length in a step: sort or bucket samples by length in the sampler{at(site)}"
    )
    fixes = (
        code_fix(title, "sampler", "length-bucketed", site, alone),
        code_fix("or fill batches up to a number of tokens, not of samples", "batch_sampler", "token budget", site),
    )
    title = f"ranks get unequal inputs: {100 * spread.mean():.0f} % between the largest and the smallest of a step"
    where = Where(ranks=context.ranks, steps=context.step_range)
    return Finding("data.imbalance", title, "info", confidence_of(gain), where, evidence, gain, fixes)
