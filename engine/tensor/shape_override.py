"""Activations that tell code the shape it is to reckon with.

Attention often takes its sizes from its input: `b, t, c = x.shape`, then `y.view(b, t, c)` of what comes out of the
layers that are cut. There, the input tells the width of the rank's own part, and the whole length where the sequence is
cut. Whatever is computed with it is computed with the tensor as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..forward import Undo, wrap_forward


@dataclass(frozen=True)
class Telling:
    """What the inputs of a module tell of their shape."""

    width: tuple[int, int] | None = None
    """An input whose last dimension is the first of these tells the second."""

    dim: int = 1
    """Dimension of the sequence."""

    factor: int = 1
    """The length of the sequence is told this many times as large."""

    def __str__(self) -> str:
        said = [] if self.width is None else [f"width {self.width[0]} as {self.width[1]}"]
        return ", ".join(said + ([f"the whole length of dimension {self.dim}"] if self.factor > 1 else []))

    def shape(self, x: Tensor) -> torch.Size:
        """What `x` tells."""
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


class Told(Tensor):
    """A tensor that tells another shape."""

    as_is: Tensor
    told: torch.Size

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _SHAPE:
            return args[0].told
        if func is Tensor.size:
            dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim")
            return args[0].told if dim is None else args[0].told[dim]
        return func(*_plain(args), **_plain(kwargs or {}))


def plain(x: Tensor) -> Tensor:
    """The tensor as it is."""
    return x.as_is if isinstance(x, Told) else x


def tell(module: nn.Module, telling: Telling) -> Undo:
    """Have the inputs of `module` tell its forward what `telling` says; call the result to stop that.

    What is put around the forward later (recomputation, hooks) is around this.
    """

    def call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _plain(forward(*(_told(value, telling) for value in args),
                              **{key: _told(value, telling) for key, value in kwargs.items()}))  # fmt: skip

    return wrap_forward(module, call, type(module).__name__, "its input was made to tell another shape")


def _told(value: Any, telling: Telling) -> Any:
    if not telling.applies(value):
        return value
    told = value.as_subclass(Told)
    told.as_is, told.told = value, telling.shape(value)
    return told


def _plain(value: Any) -> Any:
    if isinstance(value, Told):
        return value.as_is
    if type(value) in (tuple, list):
        return type(value)(map(_plain, value))
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    return value
