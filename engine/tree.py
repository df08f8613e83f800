"""What a training loop passes to a model, and what it gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `change` made to each tensor in it, at any depth of tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: each_tensor(item, change) for key, item in value.items()}
    if isinstance(value, tuple | list):
        make = getattr(type(value), "_make", type(value))  # a named tuple takes its fields one by one
        return make(each_tensor(item, change) for item in value)
    return value


def to_device(value: Any, device: torch.device) -> Any:
    """The tensors in a batch, however nested, on `device`."""
    return each_tensor(value, lambda tensor: tensor.to(device, non_blocking=True))


def loss_of(model: Callable[..., Any], batch: Any) -> Tensor:
    """What `model` returns for a batch, which is its arguments: its loss, or something that has it first or as `loss`.

    Raises TypeError for anything else.
    """
    if isinstance(batch, dict):
        output = model(**batch)
    elif isinstance(batch, tuple | list):
        output = model(*batch)
    else:
        output = model(batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    loss = loss[0] if isinstance(loss, tuple) else loss
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"train_batch: the model returned a {type(output).__name__}; it must return its loss, or something "
            "that begins with it or has it as `loss`"
        )
    return loss
