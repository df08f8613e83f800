"""The layers that are sharded: existing ones, whose class becomes one that is derived from what it was.

`isinstance(layer, nn.Linear)` keeps holding, and a subclass that adds to `super().forward(...)` goes on doing so.
transformers' Conv1D is a linear layer with its weight transposed; it is recognised by what it consists of.

At the end: batch norms between layers that are sharded.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..comm.comm import Comm
from .check_data import check_range
from .collectives import enter, join, operate, reduce, reduce_scatter, split, view
from .rng import RankStream
from .shape_override import plain
from .sharding import TensorShard

_log: Final = logging.getLogger(__name__)

Kind = Literal["linear", "conv1d", "embedding", "attention"]


@dataclass(frozen=True)
class Layer:
    """A layer that can be sharded."""

    kind: Kind
    inputs: int
    """Features it reads; of an embedding, its rows."""

    outputs: int
    """Features it writes."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the whole weight; an attention has several."""
        return (self.outputs, self.inputs) if self.kind == "linear" else (self.inputs, self.outputs)

    @property
    def output_dim(self) -> int:
        """Dimension of the weight along which the outputs lie."""
        return 0 if self.kind == "linear" else 1


def layers_of(model: nn.Module) -> dict[str, Layer]:
    """The layers of `model` that can be sharded, by name. What lies inside an attention is its own affair."""
    found: dict[str, Layer] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        layer = None if module in inside else layer_of(module)
        if layer is not None:
            found[name] = layer
            inside.update(module.children())
    return found


def layer_of(module: nn.Module) -> Layer | None:
    """What there is to know of `module`; None if it is no layer that can be sharded."""
    if isinstance(module, nn.MultiheadAttention):
        plain_keys = module.bias_k is None and not module.add_zero_attn
        return Layer("attention", module.embed_dim, module.embed_dim) if plain_keys else None
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2:
        return None
    rows, columns = weight.shape
    if isinstance(module, nn.Linear):
        return Layer("linear", columns, rows)
    if isinstance(module, nn.Embedding):
        return Layer("embedding", rows, columns)
    bias = module._parameters.get("bias")
    conv1d = type(module).__name__ == "Conv1D" and getattr(module, "nf", None) == columns
    return Layer("conv1d", rows, columns) if conv1d and bias is not None and bias.shape == (columns,) else None


def derive(module: nn.Module, base: type[nn.Module]) -> None:
    """Have the class of `module` derive from `base`."""
    module.__class__ = derived(module, base)


def derived(module: nn.Module, base: type[nn.Module]) -> type[nn.Module]:
    """The class of `module` with `base` right before torch's own layer; of a layer which does without torch's own, such
    as a Conv1D, with `base` first."""
    made: Any = _derived
    found: type[nn.Module] = made(type(module), base, _computes_itself(module))
    return found


class _Reached(Exception):
    """torch's own forward has been called."""


class _Probe(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise _Reached


def _computes_itself(module: nn.Module) -> bool:
    """Whether a subclass of nn.Linear computes what that does, and does not call it: tried on a small weight."""
    cls = type(module)
    if not isinstance(module, nn.Linear) or cls.forward is nn.Linear.forward:
        return False
    weight, bias, x = torch.eye(3, 2) + 0.5, torch.arange(3.0), torch.arange(8.0).view(2, 2, 2)
    parameters = {**module._parameters, "weight": weight, "bias": None if module.bias is None else bias}
    made: Any = _derived
    small = object.__new__(made(cls, _Probe, False))
    vars(small).update(vars(module), _parameters=parameters, in_features=2, out_features=3)
    try:
        found = cls.forward(small, x)
        return torch.equal(found, F.linear(x, weight, parameters["bias"]))
    except Exception:  # it needs more than that, or calls torch's
        _log.debug("%s does not compute by itself what a linear layer does", cls.__name__, exc_info=True)
        return False


@functools.cache
def _derived(cls: Any, base: Any, first: bool) -> Any:  # mypy does not take a class for hashable
    (stock,) = base.__bases__
    if cls is stock:
        return base
    bases = (base, cls) if first or stock is nn.Module else (cls, base)
    return type(cls.__name__, bases, {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


@dataclass(eq=False)
class State:
    """What a sharded layer needs beside its parameters. A copy of the layer communicates in the same group."""

    comm: Comm
    name: str

    def __deepcopy__(self, memo: object) -> Self:
        return self


# --- what enters a region


class Entrance:
    """Where a replicated activation enters a sharded region. Layers that read the same one share its communication."""

    def __init__(self, comm: Comm, readers: int, *, sequence_dim: int | None = None, stream: RankStream | None = None):
        self._comm = comm
        self._readers = readers
        self._sequence_dim = sequence_dim
        self._stream = stream
        self._given: weakref.ref[Tensor] | None = None
        self._key: tuple[int, bool] | None = None
        self._entered: Tensor | None = None
        self._left = 0

    def __call__(self, x: Tensor, training: bool, name: str) -> Tensor:
        """`x` as the layer `name` is to read it."""
        key = (0 if x.is_inference() else x._version), torch.is_grad_enabled()
        if self._entered is not None and self._given is not None and self._given() is x and self._key == key:
            entered = self._entered
        else:
            entered = enter(x, self._comm, self._sequence_dim, name)
            self._given, self._key, self._entered, self._left = weakref.ref(x), key, entered, self._readers
        self._left -= 1
        if self._left <= 0:
            self._entered = None
        if self._stream is not None and training:
            self._stream.enter(x.device, name)
        return entered


# --- column: each rank holds some of the outputs


@dataclass(eq=False)
class Column(State):
    """Of a column layer."""

    entrance: Entrance
    shard: TensorShard
    """Of the weight."""

    gathered: bool = False
    """Whether its output is made whole again on every rank."""

    def compute(self, product: Callable[..., Tensor], layer: Any, x: Tensor) -> Tensor:
        """x [..., in] -> this rank's part [..., out / ranks] of the output, or all of it [..., out].

        `product(x, weight, bias)` is what `layer` computes.
        """
        x = self.entrance(plain(x), layer.training, self.name)
        weight, bias, shard = layer.weight, layer.bias, self.shard
        if shard.copies > 1:
            weight = share_gradient(weight, self.comm, shard.copies, self.name)
            bias = None if bias is None else share_gradient(bias, self.comm, shard.copies, self.name)
        y = product(x, weight, bias)
        if self.gathered:
            y = join(y, self.comm, -1, self.name)
            return y[..., : shard.shape[shard.dim]].contiguous() if shard.padding else y
        if shard.real < y.shape[-1]:  # padding never wins, and gets no gradient
            return y.masked_fill(torch.arange(y.shape[-1], device=y.device) >= shard.real, -math.inf)
        return y


def _addmm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As Conv1D itself computes it: what puts off weight gradients in a pipeline looks for this call."""
    bias = weight.new_zeros(weight.shape[1]) if bias is None else bias
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])


# --- row: each rank holds some of the inputs


@dataclass(eq=False)
class Exit(State):
    """Where a sharded region is left: its ranks' terms are summed."""

    sequence_dim: int | None = None
    """Along which the output is sharded again; None: every rank gets all of it."""

    stream: RankStream | None = None

    def sum(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """The sum of every rank's `y`, or this rank's shard of it, with the bias added once."""
        if self.sequence_dim is None:
            y = reduce(y, self.comm, self.name, fresh=True)
        else:
            y = reduce_scatter(y, self.comm, self.sequence_dim, self.name)
        return y if bias is None else y + bias


@dataclass(eq=False)
class Row(Exit):
    """Of a row layer."""

    splits: bool = False
    """Whether its input comes whole."""

    def compute(self, product: Callable[..., Tensor], layer: Any, x: Tensor) -> Tensor:
        """This rank's part [..., in / ranks] of the input -> [..., out]; the bias is added once, to the sum."""
        if self.stream is not None:
            self.stream.leave()
        x = split(plain(x), self.comm, -1, self.name) if self.splits else plain(x)
        return self.sum(product(x, layer.weight), layer.bias)


# --- what column and row layers become: each holds some of the weight, which a Conv1D has transposed


def _computing(name: str, stock: type[nn.Module], product: Callable[..., Tensor]) -> type[nn.Module]:
    """A layer whose `tensor`, a Column or a Row, computes."""
    return type(name, (stock,), {"forward": lambda self, x: self.tensor.compute(product, self, x)})


ColumnLinear, RowLinear = (_computing(name, nn.Linear, F.linear) for name in ("ColumnLinear", "RowLinear"))
ColumnConv1D, RowConv1D = (_computing(name, nn.Module, _addmm) for name in ("ColumnConv1D", "RowConv1D"))


# --- vocabulary: each rank holds some of the rows of an embedding


@dataclass(eq=False)
class Vocabulary(State):
    """Of a vocabulary layer."""

    shard: TensorShard
    padding_idx: int | None


class VocabularyEmbedding(nn.Embedding):
    """Holds a band of the rows; a token of another band embeds to zero here, and the sum over the ranks restores it."""

    tensor: Vocabulary

    def forward(self, ids: Tensor) -> Tensor:
        tensor = self.tensor
        rows, here = tensor.shard.shape[0], self.weight.shape[0]
        check_range(ids, rows, f"{tensor.name}: ids from {{}} to {{}}, and there are {rows} rows")
        first = tensor.comm.rank * here
        local = ids - first
        outside = (local < 0) | (local >= here)
        pad = None if tensor.padding_idx is None else tensor.padding_idx - first
        y = F.embedding(local.masked_fill(outside, 0), self.weight, pad if pad in range(here) else None,
                        sparse=self.sparse)  # fmt: skip
        return reduce(y.masked_fill(outside.unsqueeze(-1), 0), tensor.comm, tensor.name, fresh=True)


# --- a part that several ranks hold


def share_gradient(param: Tensor, comm: Comm, copies: int, module: str) -> Tensor:
    """`param`, of which `copies` neighbouring ranks hold the same; its gradient is summed over these.

    There is no group for them alone, so each part has a slot in an all-reduce over all: these are few key-value heads.
    """
    return operate(param, comm, view, _sum_over_copies, copies, module)


def _sum_over_copies(grad: Tensor, comm: Comm, copies: int, module: str) -> Tensor:
    slots = grad.new_zeros((comm.size // copies, *grad.shape))
    slots[comm.rank // copies] = grad
    comm.all_reduce(slots, "tensor-parallel", module=module).wait()
    return slots[comm.rank // copies]


# --- Batch norms between layers that are sharded: each rank normalizes its own features

# The running statistics stay whole on every rank, as buffers are in a checkpoint; each rank computes its part of them.


def is_batch_norm(module: nn.Module) -> bool:
    """Whether `module` is one that is computed as torch does."""
    return isinstance(module, _BatchNorm) and type(module).forward in (_BatchNorm.forward, FeaturesNorm.forward)


@dataclass(eq=False)
class Features(State):
    """Of the batch norm of a rank's features."""

    shard: TensorShard
    """Of the features."""


class FeaturesNorm(_BatchNorm):
    """Has the scale and shift of some of the features, and the running statistics of all."""

    tensor: Features

    def forward(self, x: Tensor) -> Tensor:
        """x [n, features / ranks, ...] -> the same, normalized."""
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        if self.running_mean is None or self.running_var is None or (self.training and not self.track_running_stats):
            return super().forward(x)
        shard = self.tensor.shard
        mean, var = shard.take(self.running_mean), shard.take(self.running_var)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else factor
        y = F.batch_norm(x, mean, var, self.weight, self.bias, self.training, factor, self.eps)
        if self.training:
            rows = torch.stack([torch.cat([mean, var])] * shard.size)
            self.tensor.comm.all_gather(rows, "tensor-parallel", module=self.tensor.name).wait()
            means, variances = rows.chunk(2, 1)
            self.running_mean.copy_(shard.join(list(means)))
            self.running_var.copy_(shard.join(list(variances)))
        return y


def shard_batch_norm(module: nn.Module, state: Features) -> None:
    """Have `module` normalize this rank's features; its parameters are sharded besides. May be said of each
    statistic."""
    if not isinstance(module, FeaturesNorm):
        derive(module, FeaturesNorm)
    module.tensor = state  # type: ignore[assignment]
