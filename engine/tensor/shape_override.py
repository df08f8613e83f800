"""Activations that report another shape than they have.

Attention often takes its sizes from its input: `b, t, c = x.shape`, then `y.view(b, t, c)` of what comes out of the
layers that are sharded. There, the input reports the width of the rank's own part, and the whole length where the
sequence is sharded. Whatever is computed with it is computed with the tensor as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..forward import Undo, wrap_forward


@dataclass(frozen=True)
class ShapeOverride:
    """What the inputs of a module report as their shape."""

    width: tuple[int, int] | None = None
    """An input whose last dimension is the first of these reports the second."""

    dim: int = 1
    """Dimension of the sequence."""

    factor: int = 1
    """The length of the sequence is reported this many times as large."""

    def __str__(self) -> str:
        parts = [] if self.width is None else [f"width {self.width[0]} as {self.width[1]}"]
        return ", ".join(parts + ([f"the whole length of dimension {self.dim}"] if self.factor > 1 else []))

    def shape(self, x: Tensor) -> torch.Size:
        """What `x` reports."""
        shape = list(x.shape)
        if self.width is not None and shape[-1] == self.width[0]:
            shape[-1] = self.width[1]
        shape[self.dim] *= self.factor
        return torch.Size(shape)

    def applies(self, x: Any) -> bool:
        """To activations: floating-point, and with batch, sequence and features."""
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 3:
            return False
        return self.width is None or x.shape[-1] == self.width[0]


_SHAPE: Final = Tensor.shape.__get__  # type: ignore[attr-defined]


class OverriddenTensor(Tensor):
    """A tensor that reports another shape."""

    as_is: Tensor
    reported: torch.Size

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _SHAPE:
            return args[0].reported
        if func is Tensor.size:
            dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim")
            return args[0].reported if dim is None else args[0].reported[dim]
        return func(*_plain(args), **_plain(kwargs or {}))


def plain(x: Tensor) -> Tensor:
    """The tensor as it is."""
    return x.as_is if isinstance(x, OverriddenTensor) else x


def override_shapes(module: nn.Module, override: ShapeOverride) -> Undo:
    """Have the inputs of `module` report to its forward the shapes of `override`; call the result to stop that.

    What is put around the forward later (recomputation, hooks) is around this.
    """

    def call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _plain(forward(*(_reporting(value, override) for value in args),
                              **{key: _reporting(value, override) for key, value in kwargs.items()}))  # fmt: skip

    return wrap_forward(module, call, type(module).__name__, "its input was made to report another shape")


def _reporting(value: Any, override: ShapeOverride) -> Any:
    if not override.applies(value):
        return value
    found = value.as_subclass(OverriddenTensor)
    found.as_is, found.reported = value, override.shape(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, OverriddenTensor):
        return value.as_is
    if type(value) in (tuple, list):
        return type(value)(map(_plain, value))
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    return value
