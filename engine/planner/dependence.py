"""What depends on what: gradients of a trial say which outputs of one layer reach which inputs of another.

Between two layers lies whatever the model computes there; none of it needs to be understood. Where a gradient is
exactly zero there is no dependence, and where there is one, random numbers do not cancel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..tensor.sharding import TensorShard
from .tracer import Call, Trial

K = TypeVar("K", bound=Hashable)


class Source(NamedTuple):
    """Where a gradient can lead back to."""

    kind: str
    """`layer`, `parameter`, `buffer` or `input`."""

    name: str
    """Module, or name of the parameter or buffer."""

    number: int
    """Of the call, for a layer."""


@dataclass(frozen=True)
class Bands:
    """How the outputs of a layer are to be sharded: see `TensorShard`."""

    sizes: tuple[int, ...]
    copies: int = 1

    def shard(self, shape: Sequence[int], dim: int, size: int, rank: int) -> TensorShard:
        """What `rank` of `size` holds of a tensor of this `shape`, whose dimension `dim` they make up."""
        return TensorShard(shape=tuple(shape), dim=dim, bands=self.sizes, size=size, rank=rank, copies=self.copies)


@dataclass(frozen=True)
class Share:
    """How a parameter or buffer that is applied between two layers is sharded with what it is applied to."""

    dim: int
    bands: Bands


@dataclass(frozen=True)
class RowSharding:
    """What is to be sharded for a layer to be a row layer."""

    columns: dict[str, Bands]
    """Layers that it reads."""

    shares: dict[str, Share]
    """Parameters and buffers on the way from these."""


class Flow:
    """The dependences in one trial."""

    def __init__(self, trial: Trial) -> None:
        self._tensors: dict[Source, Tensor] = {}
        for index, call in enumerate(trial.calls):
            self._tensors[Source("layer", call.module, index)] = call.wrote
        buffers = dict(trial.module.named_buffers())
        for name, tensor in trial.stand_ins.items():
            if tensor.requires_grad:
                kind = "buffer" if name in buffers else "parameter"
                self._tensors[Source(kind, f"{trial.root}.{name}".strip("."), 0)] = tensor
        for index, tensor in enumerate(trial.inputs.tensors()):
            if tensor.requires_grad:
                self._tensors[Source("input", "", index)] = tensor

    def sources(self, x: Tensor) -> list[Source]:
        """What `x` depends on without another layer in between."""
        return list(self._gradients(x, list(self._tensors)))

    def reach(self, x: Tensor, sources: Sequence[Source], first: int, count: int) -> dict[Source, Tensor]:
        """What of each source reaches `count` features of `x` from the `first` on: booleans, of a layer [outputs], of
        any other in its shape."""
        gradients = self._gradients(x[..., first : first + count], sources)
        found = {}
        for source in sources:
            shape = self._tensors[source].shape
            gradient = gradients.get(source)
            reached = torch.zeros(shape, dtype=torch.bool) if gradient is None else _nonzero(gradient)
            found[source] = reached.reshape(-1, shape[-1]).any(0) if source.kind == "layer" else reached
        return found

    def _gradients(self, x: Tensor, sources: Sequence[Source]) -> dict[Source, Tensor]:
        found = gradients(x, weights_like(x), {source: self._tensors[source] for source in sources})
        return {source: gradient for source, gradient in found.items() if _nonzero(gradient).any()}


def weights_like(x: Tensor) -> Tensor:
    """Random weights of the elements of `x`, the same each time, and none of them near 0."""
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(1)).add_(0.5).to(x.dtype)


def gradients(x: Tensor, weights: Tensor, tensors: Mapping[K, Tensor]) -> dict[K, Tensor]:
    """The gradients of the weighted sum of `x`'s elements, for those of `tensors` that it depends on."""
    if not tensors or not x.requires_grad or not x.numel():
        return {}
    found = torch.autograd.grad((x * weights).sum(), list(tensors.values()), retain_graph=True, allow_unused=True)
    return {key: gradient for key, gradient in zip(tensors, found, strict=True) if gradient is not None}


def _nonzero(gradient: Tensor) -> Tensor:
    return gradient.ne(0)  # NaN is not equal to 0 either


def row_sharding(flow: Flow, call: Call, sources: Sequence[Source], count: int) -> RowSharding | None:
    """How the layers that `call` reads, and parameters and buffers on the way, are to be sharded so that each of
    `count` ranks has what its shard of the input's features needs; None if that cannot be."""
    features = call.read.shape[-1]
    if features % count:
        return None
    width = features // count
    reached = [flow.reach(call.read, sources, rank * width, width) for rank in range(count)]
    found = RowSharding({}, {})
    for source in sources:
        needed = [reach[source] for reach in reached]
        if source.kind == "layer":
            bands = _bands(needed)
            if bands is None or found.columns.setdefault(source.name, bands) != bands:
                return None
        elif (share := _share(needed)) is not None:
            found.shares[source.name] = share
    return found


def _share(needed: Sequence[Tensor]) -> Share | None:
    """From the elements that each rank needs of a tensor; None if there is no dimension along which they differ."""
    for dim in range(needed[0].dim()):
        if needed[0].shape[dim] < 2:
            continue
        along = [reached.movedim(dim, -1).reshape(-1, reached.shape[dim]).any(0) for reached in needed]
        bands = _bands(along) or _even(along)
        if bands is not None and bands.copies < len(needed):
            return Share(dim, bands)
    return None


def independent_parts(flow: Flow, call: Call, sources: Sequence[Source]) -> int:
    """Into how many independent parts the input of `call` falls at most: attention heads, or single features.

    Two features of one head depend on the same queries and keys, and on one value each.
    """
    features = call.read.shape[-1]
    first = flow.reach(call.read, sources, 0, 1)
    if all(int(reached.sum()) <= 1 for reached in first.values()):
        return features
    for width in (w for w in range(1, features) if features % w == 0):
        other = flow.reach(call.read, sources, width, 1)
        if any(int((other[source] & ~first[source]).sum()) > 1 for source in sources):
            return features // width
    return 1


def _even(needed: Sequence[Tensor]) -> Bands | None:
    """Equal stretches, where behind a norm and a ReLU some of the elements [count] seem to be needed by no rank."""
    stack = torch.stack(list(needed))
    ranks, count = stack.shape
    if count % ranks or not stack.any(1).all():
        return None
    others = stack.unflatten(1, (ranks, -1)).any(2) & ~torch.eye(ranks, dtype=torch.bool)
    return None if others.any() else Bands((count,))


def _bands(reached: Sequence[Tensor]) -> Bands | None:
    """From the outputs [features] that each rank needs."""
    needed = torch.stack(list(reached))
    runs: list[tuple[tuple[int, ...], int]] = []
    changes = (needed[:, 1:] != needed[:, :-1]).any(0).nonzero().flatten().add(1).tolist()
    edges = [0, *changes, needed.shape[1]]
    for begin, end in itertools.pairwise(edges):
        runs.append((tuple(needed[:, begin].nonzero().flatten().tolist()), end - begin))
    copies = len(runs[0][0])
    if not copies or len(reached) % copies:
        return None
    holders = [tuple(range(first, first + copies)) for first in range(0, len(reached), copies)]
    sizes = []
    for first in range(0, len(runs), len(holders)):
        band = runs[first : first + len(holders)]
        if [ranks for ranks, _ in band] != holders or len({length for _, length in band}) != 1:
            return None
        sizes.append(sum(length for _, length in band))
    return Bands(tuple(sizes), copies)


# --- gradients over the ranks
# What lies between layers is differentiated on every rank, too: an autograd function whose forward works on parts may
# have a backward that does not, as one that counts the features it is given. Each rank's trial gets its part of one
# gradient for the input of a layer. What comes out, for the layers before and the parameters on the way, has to add up
# over the ranks to what the whole model gives.

RTOL: Final = 1e-3
"""Of the largest element of a gradient: what may come of computing in fp32 in another order."""

NotEqual = Callable[[int | None, str], Exception]
"""Makes what is raised: of the region in which a gradient differs, and which one it is, in words."""


@dataclass(eq=False)
class _Point:
    """The input of one call of a layer, of which each rank has a part."""

    region: int | None
    weights: Tensor
    """The gradient of the whole input."""
    expected: dict[str, Tensor] = field(default_factory=dict)
    """Of what the input depends on, without a layer in between: its name, and its gradient in the whole model."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """The same over the ranks so far."""


class GradientSums:
    """Gradients of one trial, summed over the ranks that it is run as."""

    def __init__(self, trial: Trial) -> None:
        self._sources = dict(_sources(trial))
        """What gradients lead back to: answers of layers, parameters and buffers."""
        self._points: dict[tuple[str, int], _Point] = {}
        self._seen: set[str] = set()

    def add(self, call: Call, number: int, region: int | None, part: Callable[[Tensor], Tensor], x: Tensor) -> None:
        """`x` is what a rank has computed for the input of `call`, the layer's `number`-th: `part` of the whole.

        Between regions residual branches lead far back: there, each source is looked at once.
        """
        key = (call.module, number)
        if key not in self._points:
            self._points[key] = self._point(call, region)
        point = self._points[key]
        sources = {name: self._sources[name] for name in point.expected}
        for name, gradient in gradients(x, part(point.weights), sources).items():
            point.sums[name] = point.sums[name] + gradient if name in point.sums else gradient

    def check(self, error: NotEqual) -> None:
        """After the last rank: raise `error` for the first gradient that is not the whole model's."""
        for (module, _), point in self._points.items():
            for name, expected in point.expected.items():
                found = point.sums.get(name)
                allowed = RTOL * float(expected.abs().max())
                if found is None or not torch.allclose(found, expected, RTOL, allowed, equal_nan=True):
                    raise error(
                        point.region,
                        f"the gradient of {name} through the input of {module} is not what the whole model computes",
                    )

    def _point(self, call: Call, region: int | None) -> _Point:
        weights = weights_like(call.read)
        asked = {name: x for name, x in self._sources.items() if region is not None or name not in self._seen}
        found = gradients(call.read, weights, asked)
        self._seen.update(found)
        return _Point(region, weights, found)


def _sources(trial: Trial) -> Iterator[tuple[str, Tensor]]:
    for (module, number), call in trial.numbered().items():
        yield f"the output of {module}" + (f" (call {number + 1})" if number else ""), call.wrote
    for name, tensor in trial.stand_ins.items():
        if tensor.requires_grad:
            yield f"{trial.root}.{name}".strip("."), tensor
