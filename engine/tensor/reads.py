"""Decisions in Python on what one rank alone has of an activation: the others may decide otherwise.

`if h.sum() > 0:` of a part of `h` is no operation on tensors, so no comparison of tensors shows it: on the inputs of
a rehearsal all ranks may well go the same way. So parts are marked, and so is whatever is computed from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor
from torch.overrides import TorchFunctionMode

_READS: Final = frozenset({
    "__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "__array__", "item", "tolist",
    "numpy", "is_nonzero", "equal", "allclose",
})  # fmt: skip
"""Functions that give Python a value of a tensor."""

_CHECKS: Final = frozenset({"isnan", "isinf", "isfinite", "isposinf", "isneginf"})
"""Asked of activations to find faults, and to clamp each by itself; a part may be asked as well."""


class Decided(Exception):
    """Python has asked for a value of what is one rank's part; the text is the function that did."""


def mark(part: Tensor) -> Tensor:
    """Say of `part` that other ranks have other values."""
    part.of_one_rank = True  # type: ignore[attr-defined]
    return part


class Reads(TorchFunctionMode):
    """While it is on, what is computed from marked tensors is marked. Raises Decided where Python is given a value."""

    def __init__(self) -> None:
        super().__init__()
        self._aside = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done here is not the model's."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._aside or not (_is_marked(args) or _is_marked(kwargs)):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _READS:
            raise Decided(name.strip("_"))
        result = func(*args, **kwargs)
        if name not in _CHECKS:
            _mark_all(result)
        if name == "__setitem__":
            _mark_all(args[0])
        return result


def _is_marked(value: Any) -> bool:
    if isinstance(value, Tensor):
        return getattr(value, "of_one_rank", False)
    if isinstance(value, Mapping):
        return any(map(_is_marked, value.values()))
    return isinstance(value, tuple | list) and any(map(_is_marked, value))


def _mark_all(value: Any) -> None:
    if isinstance(value, Tensor):
        mark(value)
    elif isinstance(value, tuple | list):
        for item in value:
            _mark_all(item)
