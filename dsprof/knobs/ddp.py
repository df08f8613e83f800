"""Knobs of DistributedDataParallel."""

from __future__ import annotations

from typing import Final

from .knob import ROUNDING, SAME, Choice, Knob, Number, TrueOrFalse, of_fact

_DDP: Final = "DistributedDataParallel"

KNOBS: Final = (
    Knob(
        "ddp.bucket_cap_mb",
        "how large a bucket of gradients may become before it is reduced",
        Number(0.001),
        ROUNDING,
        _DDP,
        unit="MiB",
        states=of_fact("ddp", "bucket_cap_mb"),
    ),
    Knob(
        "ddp.static_graph",
        "the same parameters take part in every step, so nothing is looked for",
        TrueOrFalse(),
        SAME,
        _DDP,
        states=of_fact("ddp", "static_graph"),
    ),
    Knob(
        "ddp.find_unused_parameters",
        "look in each forward for parameters that take no part",
        TrueOrFalse(),
        SAME,
        _DDP,
        states=of_fact("ddp", "find_unused_parameters"),
    ),
    Knob(
        "ddp.gradient_as_bucket_view",
        "gradients lie in their buckets, so they are not copied",
        TrueOrFalse(),
        SAME,
        _DDP,
        states=of_fact("ddp", "gradient_as_bucket_view"),
    ),
    Knob(
        "ddp.broadcast_buffers",
        "rank 0's buffers are sent to all ranks before each forward",
        TrueOrFalse(),
        "trains differently",
        _DDP,
        states=of_fact("ddp", "broadcast_buffers"),
    ),
    Knob("ddp.comm_hook", "the number format in which gradients travel", Choice(("bf16", "fp16")), ROUNDING, _DDP),
    Knob(
        "ddp.accumulate",
        "gradients are reduced in every Nth backward only, as no_sync around the others has it",
        Number(1, whole=True),
        ROUNDING,
        _DDP,
        unit="micro-batches",
    ),
)
