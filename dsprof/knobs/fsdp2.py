"""Knobs of FSDP2's fully_shard."""

from __future__ import annotations

from typing import Final

from .knob import DIFFERS, ROUNDING, SAME, Choice, Either, Knob, Number, TrueOrFalse, of_fact

_SHARD: Final = "fully_shard"
_FORMATS: Final = Choice(("bfloat16", "float16", "float32"))

KNOBS: Final = (
    Knob(
        "fsdp2.reshard_after_forward",
        "parameters are freed after forward and gathered again for backward; a number: they are kept on so many ranks",
        Either((TrueOrFalse(), Number(2, whole=True))),
        SAME,
        _SHARD,
        states=of_fact("fsdp", "reshard_after_forward"),
    ),
    Knob(
        "fsdp2.modules_per_unit",
        "so many modules of one class, in the order in which the script shards them, are one unit",
        Number(1, whole=True),
        ROUNDING,
        _SHARD,
        unit="modules",
    ),
    Knob(
        "fsdp2.forward_prefetch",
        "how many of the next units are gathered while one computes in forward",
        Number(0, whole=True),
        SAME,
        _SHARD,
        unit="units",
    ),
    Knob("fsdp2.backward_prefetch", "the same in backward", Number(0, whole=True), SAME, _SHARD, unit="units"),
    Knob(
        "fsdp2.param_dtype",
        "the number format in which units compute, and parameters travel",
        _FORMATS,
        DIFFERS,
        _SHARD,
        states=of_fact("fsdp", "param_dtype"),
    ),
    Knob(
        "fsdp2.reduce_dtype",
        "the number format in which gradients travel",
        _FORMATS,
        ROUNDING,
        _SHARD,
        states=of_fact("fsdp", "reduce_dtype"),
    ),
)
