"""How much memory a rank needs, from formulas.

States: with Adam in mixed precision 2 bytes a parameter, 2 of gradient and 12 of optimizer, of which ZeRO stage 1
shares the optimizer's over the data-parallel ranks, stage 2 the gradients too, stage 3 all (Rajbhandari et al., 2020).
Activations of a layer and micro-batch: s b h (10 + 24/t + 5 a s / (h t)) bytes (Korthikanti et al., 2022); with
activations computed again 2 s b h a layer, and one layer whole. A first stage holds as many micro-batches as there are
stages (1F1B).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from .cost import parameters
from .steps import Column, StepShapes

GIB: Final = 2.0**30
CONTEXT_GIB: Final = 1.5
"""What the driver and the communication library take."""
FRAGMENTED: Final = 0.08
"""What the allocator reserves beyond what is allocated, as a share."""
STATES: Final = {"bfloat16": (2.0, 2.0, 12.0), "float16": (2.0, 2.0, 12.0), "float32": (4.0, 4.0, 8.0)}
"""torch's dtype -> bytes a parameter: of itself, its gradient, Adam's states (with a copy in fp32 where it is half)."""


@dataclass(frozen=True)
class MemoryNeed:
    """GiB on the rank that needs most. parameters, gradients, optimizer: the states. activations: with the logits and,
    at stage 3, the layer that is gathered. reserved: beside them."""

    parameters: Column
    gradients: Column
    optimizer: Column
    activations: Column
    reserved: Column

    @property
    def total(self) -> Column:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.reserved


def memory(steps: StepShapes, dtype: str = "bfloat16", flash: bool = True) -> MemoryNeed:
    """flash: attention scores are not kept."""
    s, size = steps, parameters(steps)
    each = STATES[dtype]
    shared = [np.where(s.zero >= stage, s.dp, 1.0) for stage in (3, 2, 1)]
    states = [size * bytes_ / over for bytes_, over in zip(each, shared, strict=True)]
    tokens = s.sequence * s.micro_batch
    wide = each[0] / 2
    scores = 0.0 if flash else 5 * s.heads * s.sequence / (s.hidden * s.tp)
    layer = tokens * s.hidden * (10 + 24 / s.tp + scores) * wide
    layers = np.ceil(s.layers / s.pp)
    kept = np.where(s.recompute > 0, 2 * wide * tokens * s.hidden, layer)
    held = np.minimum(s.pp, s.micro_batches)
    logits = tokens * s.vocabulary / s.tp * (each[0] + 4)
    gathered = np.where(s.zero >= 3, 2 * 12 * s.hidden**2 / s.tp * each[0], 0.0)
    last = np.where(s.recompute > 0, layer, 0.0)
    activations = np.maximum(kept * layers * held + last, kept * layers + last + logits) + gathered
    used = (sum(states) + activations) / GIB
    parameters_, gradients, optimizer = (state / GIB for state in states)
    return MemoryNeed(parameters_, gradients, optimizer, activations / GIB, used * FRAGMENTED + CONTEXT_GIB)
