"""What a training loop passes to a model, and what it gets, and what pipeline stages send each other: nested values."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

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


_ENDS: Final = (Tensor, str, bytes, int, float, type(None))
"""What holds nothing, as most values."""


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What lies in nested mappings, sequences and dataclasses, each with the keys, numbers and names that lead to it.
    Of an empty one, itself."""
    inner: Any = ()
    if isinstance(value, _ENDS):
        yield path, value
        return
    if isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, Sequence):
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


def output_of(model: Callable[..., Any], batch: Any) -> Any:
    """What `model` returns for a batch, which is its arguments."""
    if isinstance(batch, dict | UserDict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def loss_of(model: Callable[..., Any], batch: Any) -> Tensor:
    """The loss in what `model` returns for a batch: that is it, or has it first or as `loss`.

    Raises TypeError for anything else.
    """
    output = output_of(model, batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    loss = loss[0] if isinstance(loss, tuple) else loss
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"train_batch: the model returned a {type(output).__name__}; it must return its loss, or something "
            "that begins with it or has it as `loss`"
        )
    return loss


# --- the form of nested values, in which their tensors can be put again: JSON in which "tensor" stands for the next of
# them, and what JSON has not is marked by its name

SINGLE: Final = '"tensor"'
"""The form of one tensor."""
SEVERAL: Final = '"tuple"'
"""The form of a tuple of as many tensors as there are."""


def form_of(output: Any) -> tuple[str, list[Tensor]]:
    """The form of `output`, and the tensors in it, in order.

    Raises TypeError, with what is the matter in words, for what cannot be made again from these: objects of classes
    other than those above, among them named tuples and transformers' ModelOutput.
    """
    if isinstance(output, Tensor):
        return SINGLE, [output]
    if type(output) is tuple and all(isinstance(item, Tensor) for item in output):
        return SEVERAL, list(output)
    tensors: list[Tensor] = []
    described = _described(output, tensors, type(output).__name__)
    return json.dumps(described), tensors


def filled(form: str, tensors: Sequence[Any]) -> Any:
    """What has this form, with `tensors` in it."""
    if form == SINGLE:
        return tensors[0]
    if form == SEVERAL:
        return tuple(tensors)
    return _filled(json.loads(form), iter(tensors))


def _described(value: Any, tensors: list[Tensor], where: str) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return "tensor"
    kind = type(value)
    if kind in (tuple, list):
        return {kind.__name__: [_described(item, tensors, where) for item in value]}
    if kind is dict:
        for key in value:
            if type(key) not in (str, int, bool, float, type(None)):
                raise TypeError(f"a dict with a {type(key).__name__} as a key")
        return {"dict": [[key, _described(item, tensors, where)] for key, item in value.items()]}
    if value is None or kind in (bool, int, float, str):
        return {"value": value}
    raise TypeError(f"a {where}" if kind.__name__ == where else f"a {where} with a {kind.__name__} in it")


def _filled(described: Any, tensors: Iterator[Any]) -> Any:
    if described == "tensor":
        return next(tensors)
    ((kind, inner),) = described.items()
    if kind == "value":
        return inner
    if kind == "dict":
        return {key: _filled(item, tensors) for key, item in inner}
    items = [_filled(item, tensors) for item in inner]
    return tuple(items) if kind == "tuple" else items
