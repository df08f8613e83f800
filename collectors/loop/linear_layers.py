"""The sizes of linear layers, which their speed in other number formats depends on: a fact, stated when a model's
modules are named (level full). Of a layer that ranks share, this rank's part, where that is known; else nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dsprof.schema import LINEAR_FACT

from ..capture import facts
from ..hooking.errors import count_error

MOST: Final = 4000
"""Layers of a model; further ones are left out."""


def state(named: Sequence[tuple[str, Any]]) -> None:
    """State the linear layers among these modules of a model: [name, inputs, outputs, type]. Never raises: a module may
    answer to any attribute, and a weight that is not made yet (LazyLinear) has no shape."""
    try:
        fully_sharded = any(hasattr(module, "unshard") for _, module in named)
        layers = [[name, *sizes] for name, module in named if (sizes := _sizes(module, fully_sharded)) is not None]
        if layers:
            facts.state({"fact": LINEAR_FACT, "layers": layers[:MOST]})
    except Exception as error:
        count_error("the sizes of linear layers", error)


def _sizes(module: Any, fully_sharded: bool) -> tuple[int, int, str] | None:
    """Inputs, outputs and type of a linear layer's weight. fully_sharded: the model is FSDP2's."""
    inputs, outputs = getattr(module, "in_features", None), getattr(module, "out_features", None)
    weight = getattr(module, "_parameters", {}).get("weight")
    if not isinstance(inputs, int) or not isinstance(outputs, int) or weight is None or not _has_shape(weight):
        return None
    dtype = str(weight.dtype).removeprefix("torch.")
    if weight.dim() > 2:  # several layers in one, such as those of all experts
        return None
    if weight.dim() < 2:  # flattened, or not here: a wrapper shards it, and has all of it when it runs
        return inputs, outputs, dtype
    if hasattr(weight, "device_mesh"):  # a DTensor's size is that of all ranks, be it sharded for memory or for work
        return (inputs, outputs, dtype) if fully_sharded and weight.device_mesh.ndim == 1 else None
    outputs, inputs = map(int, weight.shape)
    return inputs, outputs, dtype


def _has_shape(weight: Any) -> bool:
    """Whether it was made: that of a LazyLinear is when it is first called."""
    from torch.nn.parameter import is_lazy

    return not is_lazy(weight)
