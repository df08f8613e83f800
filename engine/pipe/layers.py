"""Layers of a pipeline that are made where they are needed: only the ranks of a stage build its layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor, nn

from dsprof.words import did_you_mean

from ..comm.consensus import first_difference
from .p2p import PipelineError

TIED: Final = "tied_modules"
"""Where layers of a TiedLayerSpec are, by their key."""


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


@dataclass(eq=False, slots=True)
class PipelineLayer:
    """One of the pipeline's layers: what it is made of, and, where it is, the thing itself."""

    name: str
    source: Any
    """A LayerSpec, a module, or any other callable."""
    built: Callable[..., Any] | None = None
    call: Callable[[Any], Any] | None = None
    """What is called in the place of its own function, if anything."""

    @property
    def kind(self) -> str:
        """Its class, or the name of a function: what `type:REGEX` looks at, and what errors say."""
        if isinstance(self.source, LayerSpec):
            return self.source.class_name
        return type(self.source).__name__ if isinstance(self.source, nn.Module) else name_of(self.source)

    @property
    def key(self) -> str | None:
        """By which it is tied to others."""
        return self.source.key if isinstance(self.source, TiedLayerSpec) else None

    @property
    def forward_fn(self) -> Callable[[nn.Module, Any], Any] | None:
        """Called with its module and the inputs, in the place of the module's own forward, if anything."""
        return self.source.forward_fn if isinstance(self.source, TiedLayerSpec) else None

    @property
    def path(self) -> str:
        """The name in the pipeline that its module has; that of a function is nobody's."""
        return self.name if self.key is None else f"{TIED}.{self.key}"

    def build(self) -> nn.Module:
        """Of a LayerSpec. Raises PipelineError, which names the layer, for whatever its class raises."""
        try:
            return self.source.build()  # type: ignore[no-any-return]
        except Exception as error:
            where = f" on rank {dist.get_rank()}" if dist.is_initialized() else ""
            raise PipelineError(
                f"layer {self.name} ({self.kind}) could not be built{where}: {type(error).__name__}: {error}"
            ) from error

    def function(self, built: Callable[..., Any]) -> Callable[[Any], Any]:
        """What is called on the output of the layer before."""
        if self.call is not None:
            return self.call
        if isinstance(self.source, TiedLayerSpec) and self.source.forward_fn is not None:
            return functools.partial(self.source.forward_fn, built)  # type: ignore[arg-type]
        return built

    def where_raised(self, inputs: Any, *, by_name: bool) -> str:
        """Where an error was raised: here, called on `inputs`. `by_name`: this is one of the modules of a model."""
        plain = isinstance(inputs, Tensor) and not inputs.is_nested  # a nested one has no shape
        what = f"a tensor of shape {tuple(inputs.shape)}" if plain else f"a {type(inputs).__name__}"
        where = f"in layer {self.name} ({self.kind}) of the pipeline, called on {what}"
        if not by_name:
            return where
        return (
            f"{where} and nothing else: the model's own forward does not run, and what it makes for its modules "
            "(masks, positions) has to be made in a layer"
        )


def named(layers: Sequence[Any] | nn.Sequential) -> list[PipelineLayer]:
    """The layers of a list. Raises TypeError for one that cannot be called."""
    found = _children(layers) if isinstance(layers, nn.Sequential) else [(str(at), x) for at, x in enumerate(layers)]
    children = dict(found)
    for at, layer in enumerate(children.values()):
        made = layer.func if isinstance(layer, functools.partial) else layer
        if isinstance(made, type) and issubclass(made, nn.Module):
            raise TypeError(
                f"PipelineModule: layer {at} is the class {made.__name__}, which makes layers and is none; write "
                f"LayerSpec({made.__name__}, ...), with its arguments"
            )
        if not isinstance(layer, LayerSpec) and not callable(layer):
            raise TypeError(
                f"PipelineModule: layer {at} is a {type(layer).__name__}; a layer is a LayerSpec, a module or a "
                "function"
            )
    return [PipelineLayer(name, layer) for name, layer in children.items()]


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of a list, in order; one that is there twice is called twice."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _is_list(module: nn.Module) -> bool:
    """Whether `module` stands for its children: it does not if it has a forward of its own."""
    return isinstance(module, nn.ModuleList) or (
        isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    )


def of_model(model: nn.Module, names: Iterable[Any]) -> list[PipelineLayer]:
    """The modules of `model` called `names`, in this order."""
    modules = dict(model.named_modules(remove_duplicate=False))
    layers: list[PipelineLayer] = []
    for name in names:
        if name not in modules:
            raise ValueError(f"PipelineModule: the model has no module {name!r}{did_you_mean(name, modules)}")
        module = modules[name]
        inner = _children(module) if _is_list(module) else []
        layers += [PipelineLayer(f"{name}.{part}", child) for part, child in inner] or [PipelineLayer(name, module)]
    taken = {param for layer in layers for param in layer.source.parameters()}
    missing = [name for name, param in model.named_parameters() if param not in taken]
    if missing:
        raise ValueError(
            f"PipelineModule: no layer has the parameter {missing[0]}"
            + (f" ({len(missing)} such in all)" if len(missing) > 1 else "")
            + "; name the modules of all parameters, in the order in which they are called. What the model's own "
            "forward does between them does not run: wrap those whose outputs it adds in a module that does so, and "
            "name that"
        )
    return layers


def shared_parameters(
    layers: Sequence[PipelineLayer], model: nn.Module | None
) -> dict[str, tuple[nn.Parameter, list[int]]]:
    """Parameters that several modules of the list have: name in `model`, or in the first of them -> the parameter,
    numbers of the layers."""
    called = {} if model is None else {param: name for name, param in model.named_parameters()}
    found: dict[nn.Parameter, tuple[str, list[int]]] = {}
    for at, layer in enumerate(layers):
        if isinstance(layer.source, nn.Module):
            for name, param in layer.source.named_parameters():
                found.setdefault(param, (called.get(param, f"{layer.name}.{name}"), []))[1].append(at)
    return {name: (param, where) for param, (name, where) in found.items() if len(where) > 1}


# --- what all ranks of a pipeline must have alike


def described(layers: Sequence[PipelineLayer], shared: Mapping[str, Any]) -> dict[str, Any]:
    """The layers, each in words, and which parameters several of them share, for `check_agreement`."""
    return {
        "number of layers": len(layers),
        **{
            f"layer {number}": f"{each.name} ({each.kind}{'' if each.key is None else f', tied as {each.key!r}'})"
            for number, each in enumerate(layers)
        },
        "shared parameters": {name: list(where) for name, (_, where) in shared.items()},
    }


def check_agreement(mine: Mapping[str, Any]) -> None:
    """Raise PipelineError on all ranks of the job unless all ask for the same; name the first that they do not."""
    found = first_difference(mine)
    if found is not None:
        raise PipelineError(
            f"the ranks of the job have different pipelines: {found.key}: {found.listed()}; give all ranks the same"
        )
