"""Layers of a pipeline that are made where they are needed: only the ranks of a stage build its layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn


def name_of(function: Any) -> str:
    """The name that a class or a function was defined with; of another object, that of its class."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


class LayerSpec:
    """A layer to be: `typename(*module_args, **module_kwargs)`, called on the ranks that have it. As DeepSpeed's."""

    def __init__(self, typename: Callable[..., nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        """Raises TypeError for a module that has been built already."""
        if not callable(typename) or isinstance(typename, nn.Module):
            raise TypeError(
                f"LayerSpec takes a class and its arguments, and got a {type(typename).__name__}; a layer that is "
                "built already goes into the list as it is"
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    @property
    def class_name(self) -> str:
        """The layer's class, by which `type:REGEX` counts it."""
        return name_of(self.typename)

    def build(self) -> nn.Module:
        """The layer, a new one each time."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.class_name})"


class TiedLayerSpec(LayerSpec):
    """A layer whose parameters are those of all others of the same `key`, on whichever stages they are.

    `forward_fn(layer, inputs)` is called in the place of the layer's own forward, as an output projection needs that is
    made of an embedding's weight.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] | None = None,
        **module_kwargs: Any,
    ) -> None:
        """`tied_weight_attr` says which parameters are tied, as in DeepSpeed; here that is always the whole layer, and
        naming less is an error when the layer is built."""
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else tied_weight_attr

    def build(self) -> nn.Module:
        """The layer. Raises ValueError if it has parameters that `tied_weight_attr` does not name."""
        layer = super().build()
        if self.tied_weight_attr is not None:
            rest = sorted({name for name, _ in layer.named_parameters()} - set(self.tied_weight_attr))
            if rest:
                raise ValueError(
                    f"TiedLayerSpec({self.key!r}, {self.class_name}): tied_weight_attr leaves out {', '.join(rest)}, "
                    "and the layers of a key share all their parameters; make what is not shared a layer of its own"
                )
        return layer
