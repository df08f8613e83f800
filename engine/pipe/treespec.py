"""The form of what a stage returns: tensors by themselves, or in tuples, lists and dicts, with plain values between.

A form is text: JSON in which "tensor" stands for the next tensor, and what JSON has not is marked by its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from torch import Tensor

SINGLE: Final = '"tensor"'
"""The form of one tensor."""
SEVERAL: Final = '"tuple"'
"""The form of a tuple of as many tensors as there are."""


def of(output: Any) -> tuple[str, list[Tensor]]:
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
