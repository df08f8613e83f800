"""Knobs of the host: garbage collection, cores, the job's environment."""

from __future__ import annotations

from typing import Final

from .knob import DIFFERS, SAME, Choice, Either, Json, Knob, Number, TrueOrFalse

KNOBS: Final = (
    Knob(
        "gc.freeze", "what is there after three steps is never collected", TrueOrFalse(), SAME, "an optimizer of torch"
    ),
    Knob(
        "gc.every",
        "garbage is collected after every Nth step, on all ranks at once, and never in between; 0: never",
        Number(0, whole=True),
        SAME,
        "an optimizer of torch",
        unit="steps",
    ),
    Knob(
        "affinity.cores",
        "how many cores of its own each rank of a host has; spread: all are dealt out",
        Either((Number(1, whole=True), Choice(("spread",)))),
        SAME,
        "ranks that torchrun started",
        unit="cores",
    ),
    Knob(
        "env.*",
        "a variable of the job's environment, such as env.OMP_NUM_THREADS or env.PYTORCH_CUDA_ALLOC_CONF",
        Json(),
        DIFFERS,
        "the job's environment",
    ),
)
