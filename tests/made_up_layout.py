"""What a run of eight layers would tell of any layout, made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from dsprof.analyzer.layout import Layout, LayoutCosts, Wire
from dsprof.analyzer.work.stage_layers import StageLayer

NOTHING = Wire(0.0, 0.0, 2, 0.1)
F, B, ONCE, OPTIMIZER = 10.0, 20.0, 3.0, 2.0
"""Of the whole model, 8 layers, and a micro-batch; ms."""


def costs(wire: Wire = NOTHING, **more: Any) -> LayoutCosts:
    layers = tuple(StageLayer(f"layers.{i}", 0, F / 8, B / 8) for i in range(8))
    ran = Layout(dp=2, micro_batches=8)
    found = LayoutCosts(
        ran=ran, taken={(0, "F"): F, (0, "B"): B}, layers=layers, recompute_ms=0.0, once_ms=ONCE,
        data_ms=0.0, offload_ms=0.0, optimizer_ms=OPTIMIZER, waiting_ms=0.0,
        step_ms=8 * (F + B) + ONCE + OPTIMIZER, steps=np.ones(4), noise_ms=0.1,
        model_bytes=(8e6,), buckets=4, units=8, rounds=1, replicas=wire, stages=NOTHING, tensor=NOTHING,
        activation_bytes=1e5, tensor_calls=0.0, on_gpu=False,
    )  # fmt: skip
    return replace(found, **more)
