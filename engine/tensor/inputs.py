"""Made-up inputs on which a model can be tried, so that the planner sees how data flows through it.

Their values do not matter: layers answer with stand-ins (trial.py). What has to be right is their kind and shape.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .layers import layer_of

_BATCH: Final = 2


@dataclass(frozen=True)
class Inputs:
    """Arguments of a model's forward."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        """The tensors among them, in whatever tuples, lists and dicts."""
        return [leaf for leaf in pytree.tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Tensor)]

    def replaced(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """The same with `function` of each tensor."""
        args, kwargs = pytree.tree_map_only(Tensor, function, (self.args, dict(self.kwargs)))
        return Inputs(args, kwargs)


def given_inputs(example: Any) -> Inputs:
    """What the user passed as `example`: a tuple of arguments, a dict of them by name, or the only one."""
    if isinstance(example, Inputs):
        return example
    if isinstance(example, Mapping):
        return Inputs(kwargs=dict(example))
    return Inputs(args=tuple(example) if isinstance(example, tuple | list) else (example,))


def guesses(model: nn.Module, tokens: int) -> Iterator[Inputs]:
    """Inputs that `model` might take, the likeliest first, with sequences of a multiple of `tokens`.

    The kind is read off the layers in the order in which they are registered: an embedding wants token ids, a
    convolution an image, a linear layer or a norm features. A module of transformers names its main input.
    """
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return
    several = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in several if p.default is p.empty]
    named = getattr(model, "main_input_name", None)
    more: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
    for value in _values(model, tokens):
        if isinstance(named, str) and named in parameters:
            ids = {"decoder_input_ids": value} if "decoder_input_ids" in parameters else {}
            yield Inputs(kwargs={named: value, **ids, **more})
        elif len(required) <= 1 and several:
            yield Inputs(args=(value,), kwargs=more)
        elif required:
            yield Inputs(args=(value,) * len(required), kwargs=more)
            yield Inputs(args=(value, *[None] * (len(required) - 1)), kwargs=more)
        elif not several and any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
            yield Inputs(args=(value,), kwargs=more)


def variants(model: nn.Module, inputs: Inputs) -> Iterator[Inputs]:
    """The same with what else `model` may be given and would compute in another way: a mask over padding."""
    tensors = inputs.tensors()
    if "attention_mask" in inspect.signature(model.forward).parameters and tensors and not inputs.args:
        mask = torch.ones(tensors[0].shape[:2], dtype=torch.int64)
        mask[0, -1] = 0
        yield Inputs(kwargs={**inputs.kwargs, "attention_mask": mask})


def _values(model: nn.Module, tokens: int) -> Iterator[Tensor]:
    kinds: dict[str, nn.Module] = {}
    for module in model.modules():
        kind = _kind(module)
        if kind is not None:
            kinds.setdefault(kind, module)
    for kind, module in kinds.items():
        if kind == "image":
            for side in _sides(model):
                yield torch.rand(_BATCH, int(module.in_channels), *side)  # type: ignore[arg-type]
            continue
        for length in _lengths(model, tokens):
            if kind == "ids":
                rows = int(module.num_embeddings)  # type: ignore[arg-type]
                yield torch.arange(_BATCH * length).view(_BATCH, length) % rows
            else:
                yield torch.rand(_BATCH, length, _width(module))
        if kind == "features":
            yield torch.rand(_BATCH * 4, _width(module))


def _kind(module: nn.Module) -> str | None:
    if isinstance(module, nn.Embedding):
        return "ids"
    if isinstance(module, nn.Conv2d):
        return "image"
    return "features" if _width(module) else None


def _width(module: nn.Module) -> int:
    layer = layer_of(module)
    if layer is not None and layer.kind != "embedding":
        return layer.inputs
    weight = module._parameters.get("weight")  # a norm's
    return weight.shape[0] if weight is not None and weight.dim() == 1 else 0


def _lengths(model: nn.Module, tokens: int) -> list[int]:
    """Of a sequence: a few tokens; and, for a model that takes but one length, that of its position table."""
    tables = [p.shape[-2] for p in model.parameters() if p.dim() == 3 and p.shape[0] == 1 and p.shape[1] > 1]
    return list(dict.fromkeys([2 * tokens * -(-3 // tokens), *([tokens] if tokens > 1 else [2]), *tables]))


def _sides(model: nn.Module) -> list[tuple[int, int]]:
    """Height and width of an image: what the model or its configuration says, else the usual ones."""
    said = []
    for holder in (model, getattr(model, "config", None), *model.modules()):
        for name in ("image_size", "img_size", "input_size"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                said.append((value, value))
            elif isinstance(value, Sequence) and len(value) == 2 and all(isinstance(side, int) for side in value):
                said.append((value[0], value[1]))
    return list(dict.fromkeys([*said, (224, 224), (32, 32), (28, 28), (64, 64)]))
