"""Pauses of the interpreter."""

from __future__ import annotations

from ..context import Change, Context
from ..finding import Evidence, Finding, Gain, Where
from .base import code_fix, confidence_of, script_of


def collections(context: Context) -> Change | None:
    """No garbage collection of 0.1 ms or more."""
    pause = context.work("pause")
    return Change({"pause": pause}) if pause.any() else None


def garbage_collection(context: Context, change: Change, gain: Gain, alone: Gain) -> Finding:
    """Python's garbage collector stops a rank, and so everyone who waits for it."""
    mean = change.removed["pause"].mean(axis=1)
    ranks = tuple(rank for rank, ms in zip(context.ranks, mean, strict=True) if ms > 0.1 * mean.max())
    numbers = context.step_numbers
    rows = context.rows
    chosen = rows[(rows["kind"] == "pause") & rows["step"].isin(numbers) & rows["rank"].isin(ranks)]
    lengths = chosen["dur_ns"].dropna().astype("int64") / 1e6
    full = int((chosen["value"] == 2).sum())
    evidence = (
        Evidence("garbage collection a step", round(float(mean.max()), 3), "ms", 0.0),
        Evidence("longest collection", round(float(lengths.max()), 3), "ms"),
        Evidence("collections of 0.1 ms and more a step", round(len(lengths) / len(numbers) / len(ranks), 2), "count"),
        Evidence("of those, full (generation 2)", full, "count"),
    )
    script = script_of(context)
    once = "gc.collect(); gc.freeze() once, after set-up and before the loop"
    seldom = "or gc.disable(), and gc.collect() every few hundred steps on all ranks at once"
    fixes = (
        code_fix(once, "gc.freeze()", True, script, alone),
        code_fix(seldom, "gc.disable()", True, script),
    )
    names = ", ".join(map(str, ranks[:8]))
    title = f"garbage collection stops rank {names} for {mean.max():.1f} ms a step"
    where = Where(ranks=ranks, steps=context.step_range)
    return Finding("pause.gc", title, "info", confidence_of(gain), where, evidence, gain, fixes)
