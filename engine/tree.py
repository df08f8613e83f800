"""What a training loop passes to a model, and what it gets; things in batches."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `change` made to each tensor in it, at any depth of tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict | UserDict):
        changed = {} if type(value) is dict else copy.copy(value)
        for key, item in value.items():
            changed[key] = each_tensor(item, change)
        return changed
    if isinstance(value, tuple | list):
        make = getattr(type(value), "_make", type(value))  # a named tuple takes its fields one by one
        return make(each_tensor(item, change) for item in value)
    return value


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What lies in nested mappings, sequences and dataclasses, each with the keys, numbers and names that lead to it.
    Of an empty one, itself."""
    inner: Any = ()
    if isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        inner = list(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = getattr(value, "__dict__", {}).items()
    if not inner:
        yield path, value
    for key, item in inner:
        yield from leaves(item, (*path, key))


def batches(
    items: Iterable[T], limit: int, size: Callable[[T], int], kind: Callable[[T], object] = lambda item: None
) -> list[list[T]]:
    """`items` in order, in lists of one `kind` and of at most `limit` in `size`, or of one item."""
    found: list[list[T]] = []
    filled, same = 0, None
    for item in items:
        more, mine = size(item), kind(item)
        if not found or filled + more > limit or mine != same:
            found.append([])
            filled, same = 0, mine
        found[-1].append(item)
        filled += more
    return found


def to_device(value: Any, device: torch.device) -> Any:
    """The tensors in a batch, however nested, on `device`."""
    return each_tensor(value, lambda tensor: tensor.to(device, non_blocking=True))


def loss_of(model: Callable[..., Any], batch: Any) -> Tensor:
    """What `model` returns for a batch, which is its arguments: its loss, or something that has it first or as `loss`.

    Raises TypeError for anything else.
    """
    if isinstance(batch, dict | UserDict):
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
