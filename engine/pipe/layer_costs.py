"""What each layer of a pipeline takes, for the partition method `measured`."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..zero.shard import find_sharded
from .module import PipelineModule
from .p2p import Message, PipelineError, message_of
from .runtime import arrived

UNCOUNTED: Final = 1
"""Calls of a layer before those that count: they make buffers and choose kernels."""


def measure(module: PipelineModule, inputs: Any, path: str | Path | None = None, *, repeats: int = 5) -> dict[str, Any]:
    """Seconds that the forward and the backward of each layer take here, with `inputs` as the first layer gets them.

    In one process, layer by layer, so the whole model need not fit, on the device that `inputs` are on. Returns, and
    writes as JSON to `path`, {"layers": [{"name": ..., "forward_s": ..., "backward_s": ...}, ...]}: medians of
    `repeats` calls. Gradients that there are, of parameters that are here, are dropped. Raises PipelineError, naming
    the layer, for one that fails or whose output cannot be sent, and ValueError for a module that an engine has.
    """
    if repeats < 1:
        raise ValueError(f"measure: repeats={repeats}; write 1 or more")
    if any(find_sharded(param) is not None for param in module.parameters()):
        raise ValueError("measure: an engine has sharded these parameters; measure before initialize, or after destroy")
    found = {"layers": time_layers(module.each_layer(), inputs, repeats)}
    module.zero_grad(set_to_none=True)
    if path is not None:
        Path(path).write_text(json.dumps(found, indent=2) + "\n")
    return found


def time_layers(
    functions: Iterable[tuple[str, Callable[[Any], Any]]], inputs: Any, repeats: int
) -> list[dict[str, Any]]:
    """The same of any layers by name, each called on the output of the one before, where `inputs` are. It leaves
    gradients."""
    device = next((leaf.device for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)), torch.device("cpu"))
    layers: list[dict[str, Any]] = []
    message: Message | None = None
    for name, layer in functions:
        if layers:
            message = message_of(inputs, f"measure: layer {layers[-1]['name']}")
        _check_device(layer, device, name)
        try:
            forward, backward, inputs = _time(layer, inputs, message, repeats)
        except Exception as error:
            raise PipelineError(f"measure: layer {name} failed: {type(error).__name__}: {error}") from error
        layers.append({"name": name, "forward_s": forward, "backward_s": backward})
    return layers


def _check_device(layer: Any, device: torch.device, name: str) -> None:
    """Raise PipelineError for a layer that is elsewhere than what it gets."""
    for param in layer.parameters() if isinstance(layer, nn.Module) else ():
        if param.device != device:
            raise PipelineError(
                f"measure: layer {name} is on {param.device}, and what it gets on {device}; bring inputs and module to "
                "one device, and build under torch.device(...) what is built here"
            )


@torch.enable_grad()
def _time(layer: Any, inputs: Any, message: Message | None, repeats: int) -> tuple[float, float, Any]:
    """Seconds of forward and backward, and the output. `message`: the inputs, if they are the output of a layer."""
    forward, backward, output = [], [], None
    for _ in range(UNCOUNTED + repeats):
        # Each time a copy, as if computed just now: a layer may write to what it gets.
        if message is None:
            given = tree_map_only(Tensor, Tensor.clone, inputs)
        else:
            copies = [tensor.detach().clone() for tensor in message.tensors]
            given, _ = arrived(Message(copies, message.wanted, message.form), grad=True)
        start = _now()
        output = layer(given)
        middle = _now()
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        ones = [torch.ones_like(tensor) for tensor in outputs]
        begin = _now()
        if outputs:
            torch.autograd.backward(outputs, ones)
        forward.append(middle - start)
        backward.append(_now() - begin if outputs else 0.0)
    median = statistics.median
    return median(forward[UNCOUNTED:]), median(backward[UNCOUNTED:]), output


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
