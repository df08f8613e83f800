"""Knobs of torch.compile."""

from __future__ import annotations

from typing import Final

from .knob import ROUNDING, Choice, Knob, TrueOrFalse

_COMPILE: Final = "torch.compile"

KNOBS: Final = (
    Knob(
        "compile.dynamic",
        "true: kernels for any shape, so that another one is not compiled again; false: a kernel for each shape",
        TrueOrFalse(),
        ROUNDING,
        _COMPILE,
    ),
    Knob(
        "compile.mode",
        "how hard it looks for fast kernels; reduce-overhead launches them as CUDA graphs",
        Choice(("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")),
        ROUNDING,
        _COMPILE,
    ),
    Knob("compile.disable", "nothing is compiled: the model runs as it is written", TrueOrFalse(), ROUNDING, _COMPILE),
)
