"""Made-up inputs on which a model can be tried, so that the planner sees how data flows through it.

Their values do not matter: layers answer with stand-ins (`tracer`). What has to be right is their kind and shape.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..tensor.layers import layer_of

_BATCH: Final = 2
_WIDTHS: Final = 3
"""Of features that are tried."""


@dataclass(frozen=True)
class Inputs:
    """Arguments of a model's forward."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    fixed: frozenset[int] = frozenset()
    """Numbers, among its tensors, of those to which no gradient flows."""

    def tensors(self) -> list[Tensor]:
        """The tensors among them, in whatever tuples, lists and dicts."""
        return [leaf for leaf in pytree.tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Tensor)]

    def replaced(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """The same with `function` of each tensor."""
        args, kwargs = pytree.tree_map_only(Tensor, function, (self.args, dict(self.kwargs)))
        return Inputs(args, kwargs, self.fixed)

    def leaves(self) -> Inputs:
        """The same, with floating-point tensors as leaves of a graph, unless they are fixed."""
        numbers = itertools.count()
        return self.replaced(
            lambda x: x.detach().requires_grad_(next(numbers) not in self.fixed and x.is_floating_point())
        )


def given_inputs(example: Any) -> Inputs:
    """What the user passed as `example`: a tuple of arguments, a dict of them by name, or the only one; on any device,
    and on the CPU here, as all that a model is tried with."""
    if isinstance(example, Inputs):
        return example
    if isinstance(example, Mapping):
        found = Inputs(kwargs=dict(example))
    else:
        found = Inputs(args=tuple(example) if isinstance(example, tuple | list) else (example,))
    return found.replaced(lambda x: x.cpu())


_NAMED: Final = {"input_ids": "ids", "pixel_values": "image", "input_features": "signal", "input_values": "signal"}
"""What transformers calls a main input -> its kind."""


def guesses(model: nn.Module, tokens: int) -> Iterator[Inputs]:
    """Inputs that `model` might take, the likeliest first, with sequences of a multiple of `tokens`.

    The kind is read off the layers in the order in which they are registered: an embedding wants token ids, a
    convolution an image or a signal, a linear layer or a norm features. A module of transformers names its main input,
    and may take several kinds at once.
    """
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return
    several = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in several if p.default is p.empty]
    named = getattr(model, "main_input_name", None)
    more: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
    values = _values(model, tokens)
    if isinstance(named, str) and named in parameters:
        if "decoder_input_ids" in parameters and "ids" in values:
            more["decoder_input_ids"] = values["ids"][0]
        kinds = sorted(values, key=lambda kind: kind != _NAMED.get(named))
        others = {name: values[kind] for name, kind in _NAMED.items()
                  if name in parameters and name != named and kind in values}  # fmt: skip
        for value in (value for kind in kinds for value in values[kind]):
            for chosen in itertools.product(*others.values()) if others else ():
                yield Inputs(kwargs={named: value, **dict(zip(others, chosen, strict=True)), **more})
            yield Inputs(kwargs={named: value, **more})
        return
    for value in (value for kind in values.values() for value in kind):
        if len(required) <= 1 and several:
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


def _values(model: nn.Module, tokens: int) -> dict[str, list[Tensor]]:
    """Kind -> values of that kind; kinds in the order of the layers that want them."""
    firsts: dict[str, nn.Module] = {}
    for module in model.modules():
        kind = _kind(module)
        if kind is not None:
            firsts.setdefault(kind, module)
    found: dict[str, list[Tensor]] = {}
    for kind, module in firsts.items():
        if isinstance(module, nn.Conv2d):
            found[kind] = [made_up(_BATCH, module.in_channels, *side) for side in _sides(model, module)]
        elif isinstance(module, nn.Conv1d):
            lengths = _signal_lengths(model)
            found[kind] = [made_up(_BATCH, module.in_channels, length) for length in lengths]
            if module.in_channels == 1:
                found[kind] += [made_up(_BATCH, length) for length in lengths]
        elif isinstance(module, nn.Embedding):
            found[kind] = [torch.arange(_BATCH * length).view(_BATCH, length) % module.num_embeddings
                           for length in _lengths(model, tokens)]  # fmt: skip
        else:
            shapes = [
                (*lead, width)
                for width in _widths(model)
                for lead in (*((_BATCH, length) for length in _lengths(model, tokens)), (_BATCH * 4,))
            ]
            found[kind] = [made_up(*shape) for shape in shapes]
    return found


def made_up(*shape: int) -> Tensor:
    """Numbers between 0 and 1."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


_KINDS: Final = {nn.Embedding: "ids", nn.Conv2d: "image", nn.Conv1d: "signal"}


def _kind(module: nn.Module) -> str | None:
    kind = next((kind for layer, kind in _KINDS.items() if isinstance(module, layer)), None)
    return kind or ("features" if _width(module) else None)


def _width(module: nn.Module) -> int:
    layer = layer_of(module)
    if layer is not None and layer.kind != "embedding":
        return layer.inputs
    weight = module._parameters.get("weight")  # a norm's
    return weight.shape[0] if weight is not None and weight.dim() == 1 else 0


def _widths(model: nn.Module) -> list[int]:
    """Of features: what the first module that has them wants, and some others; a block may register in any order."""
    widths = (_width(module) for module in model.modules() if _kind(module) == "features")
    return list(itertools.islice(dict.fromkeys(widths), _WIDTHS))


def _lengths(model: nn.Module, tokens: int) -> list[int]:
    """Of a sequence: a few tokens; and, for a model that takes but one length, that of its position table."""
    tables = [p.shape[-2] for p in model.parameters() if p.dim() == 3 and p.shape[0] == 1 and p.shape[1] > 1]
    return list(dict.fromkeys([2 * tokens * -(-3 // tokens), *([tokens] if tokens > 1 else [2]), *tables]))


def _sides(model: nn.Module, conv: nn.Conv2d) -> list[tuple[int, int]]:
    """Height and width of an image: what the model or its configuration says; what its table of positions would be for,
    if these are of square patches, with a class token or two; else the usual ones."""
    said = []
    for holder in (model, getattr(model, "config", None), *model.modules()):
        for name in ("image_size", "img_size", "input_size"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                said.append((value, value))
            elif isinstance(value, Sequence) and len(value) == 2 and all(isinstance(side, int) for side in value):
                said.append((value[0], value[1]))
    for rows in _tables(model):
        for patches in (rows, rows - 1, rows - 2):
            side = math.isqrt(max(0, patches))
            if side > 1 and side * side == patches:
                said.append((side * conv.stride[0], side * conv.stride[1]))
    return list(dict.fromkeys([*said, (32, 32), (28, 28), (64, 64), (224, 224)]))


def _signal_lengths(model: nn.Module) -> list[int]:
    """Of a signal: what the table of positions would be for, behind all convolutions; else enough for a few tokens."""
    convs = [module for module in model.modules() if isinstance(module, nn.Conv1d)]
    step = math.prod(conv.stride[0] for conv in convs)
    field, jump = 1, 1
    for conv in convs:
        field += (conv.kernel_size[0] - 1) * conv.dilation[0] * jump
        jump *= conv.stride[0]
    return list(dict.fromkeys([*(step * rows for rows in _tables(model)), field + 5 * step]))


def _tables(model: nn.Module) -> list[int]:
    """Rows of what may be tables of positions: parameters [1, rows, width] or [rows, width], and embeddings."""
    found = []
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None and (
                (param.dim() == 3 and param.shape[0] == 1)
                or (param.dim() == 2 and (layer_of(module) is None or isinstance(module, nn.Embedding)))
            ):
                found.append(param.shape[-2])
    return list(dict.fromkeys(rows for rows in found if rows > 1))
