"""What others may know of a pipeline's layers, wherever these are: names, ties, and what is called instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from .layers import TiedLayerSpec
from .module import PipelineModule


@dataclass(frozen=True)
class TiedFunction:
    """A layer here that is a function of a tied module: a TiedLayerSpec's `forward_fn`."""

    at: int
    """Number in the row."""
    path: str
    """The module's name in the pipeline."""
    module: nn.Module
    function: Callable[[nn.Module, Any], Any]
    called_too: bool
    """Whether a layer here calls the module itself."""


def paths(model: PipelineModule) -> list[str]:
    """The name in the pipeline of every layer of the row; those of functions are nobody's."""
    return [layer.path for layer in model._layers]


def last_path(model: PipelineModule) -> str | None:
    """The name in the pipeline of the row's last layer, if that is a module that is here and is called itself."""
    layer = model._layers[-1]
    function = layer.source.forward_fn if isinstance(layer.source, TiedLayerSpec) else None
    return layer.path if isinstance(layer.built, nn.Module) and function is None else None


def places_of_tied(model: PipelineModule) -> dict[str, list[int]]:
    """Name of every tied module and shared parameter -> numbers of the layers that have it. On all ranks the same."""
    found = {name: list(where) for name, (_, where) in model._shared.items()}
    for at, layer in enumerate(model._layers):
        if layer.key is not None:
            found.setdefault(layer.path, []).append(at)
    return found


def tied_functions(model: PipelineModule) -> Iterator[TiedFunction]:
    """Those that are here."""
    here = [(at, layer) for at, layer in enumerate(model._layers) if isinstance(layer.source, TiedLayerSpec)]
    called = {layer.key for _, layer in here if layer.built is not None and layer.source.forward_fn is None}
    for at, layer in here:
        function = layer.source.forward_fn
        if function is not None and isinstance(layer.built, nn.Module):
            yield TiedFunction(at, layer.path, layer.built, function, layer.key in called)


def call_instead(model: PipelineModule, at: int, call: Callable[[Any], Any] | None) -> None:
    """Have `call` called in the place of what layer `at` does; None takes that back."""
    model._layers[at].call = call
