"""What each layer of a pipeline takes, for the partition method `measured`."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .module import PipelineModule
from .transfer import message_of

UNCOUNTED: Final = 1
"""Calls of a layer before those that count: they make buffers and choose kernels."""


def measure(module: PipelineModule, inputs: Any, path: str | Path | None = None, *, repeats: int = 5) -> dict[str, Any]:
    """Seconds that the forward and the backward of each layer take here, with `inputs` as the first layer gets them.

    In one process, layer by layer, so the whole model need not fit. Returns, and writes as JSON to `path`,
    {"layers": [{"name": ..., "forward_s": ..., "backward_s": ...}, ...]}: medians of `repeats` calls.
    """
    layers: list[dict[str, Any]] = []
    for name, layer in module.each_layer():
        message = message_of(inputs, f"layer {name}") if layers else None
        forward, backward, inputs = _time(layer, inputs, [] if message is None else message.tensors, repeats)
        layers.append({"name": name, "forward_s": forward, "backward_s": backward})
    module.zero_grad(set_to_none=True)
    found = {"layers": layers}
    if path is not None:
        Path(path).write_text(json.dumps(found, indent=2) + "\n")
    return found


def _time(layer: Any, inputs: Any, tensors: list[Tensor], repeats: int) -> tuple[float, float, Any]:
    """Seconds of forward and backward, and the output, detached."""
    for tensor in tensors:
        tensor.requires_grad_(tensor.is_floating_point())
    forward, backward, output = [], [], None
    for _ in range(UNCOUNTED + repeats):
        start = _now()
        output = layer(inputs)
        middle = _now()
        outputs = [t for t in (output if isinstance(output, tuple) else (output,)) if isinstance(t, Tensor)]
        differentiable = [t for t in outputs if t.requires_grad]
        if differentiable:
            torch.autograd.backward(differentiable, [torch.ones_like(t) for t in differentiable])
        forward.append(middle - start)
        backward.append(_now() - middle)
        for tensor in tensors:
            tensor.grad = None
    median = statistics.median
    detached = tree_map_only(Tensor, Tensor.detach, output)
    return median(forward[UNCOUNTED:]), median(backward[UNCOUNTED:]), detached


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
