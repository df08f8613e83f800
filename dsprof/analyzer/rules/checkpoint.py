"""Saving checkpoints while training stands still."""

from __future__ import annotations

import numpy as np

from ..context import Context
from ..finding import Evidence, Finding, Fix, Where
from ..text import count
from .base import LEAST_SHARE, at, code_fix, confidence_of, need_steps

KIND = "checkpointing"


def stall(context: Context) -> list[Finding]:
    """Saving blocks the training loop."""
    need_steps(context)
    irregular = context.irregular
    own = irregular.own_ms.get(KIND)
    if own is None:
        return []
    saved = own.max(axis=0) > 0
    every = f"{KIND}_ms"
    usual = context.ordinary[every].mean() if every in context.ordinary else 0.0
    if saved.any():
        lost = irregular.excess_ms[KIND][saved]
        gain = context.cost(lost)
        longest = own[:, saved].max(axis=0)
        ranks = tuple(rank for rank, ms in zip(irregular.ranks, own.sum(axis=1), strict=True) if ms > 0)
        numbers = irregular.steps[saved]
        steps = (int(numbers[0]), int(numbers[-1]))
        often = f"{count(int(saved.sum()), 'time')} in {count(len(irregular.steps), 'step')}"
    elif usual > LEAST_SHARE * context.step_ms:  # in every step
        series = context.ordinary.pivot(index="rank", columns="step", values=every).to_numpy(np.float64)
        gain, longest = context.gain(series.max(axis=0)), series.max(axis=0)
        ranks = tuple(rank for rank, ms in zip(context.ranks, series.sum(axis=1), strict=True) if ms > 0)
        steps = context.step_range or (0, 0)
        often = "in every step"
    else:
        return []
    if gain.ms < LEAST_SHARE * context.step_ms:
        return []
    fact = next(iter(context.facts.get("checkpoint", [])), {})
    site, function = fact.get("site"), fact.get("function") or "saving"
    evidence = (
        Evidence("one checkpoint", round(float(longest.mean()), 3), "ms"),
        Evidence("saved", often, ""),
        Evidence("ordinary step", round(context.step_ms, 3), "ms"),
    )
    asynchronous = (
        f"save while training goes on: torch.distributed.checkpoint.async_save{at(site)}; it waits for a copy only"
    )
    fixes: tuple[Fix, ...] = (
        code_fix(asynchronous, "torch.distributed.checkpoint.async_save(...)", "", site, gain),
        Fix("code", "or save half as often, which halves the cost"),
    )
    title = f"saving a checkpoint ({function}) stops training for {longest.mean():.0f} ms, {often}"
    where = Where(ranks=ranks, op="checkpoint", steps=steps)
    return [Finding("checkpoint.stall", title, "info", confidence_of(gain), where, evidence, gain, fixes)]
