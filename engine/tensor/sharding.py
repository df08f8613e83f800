"""How one parameter is sharded over the tensor-parallel ranks, and what is marked on parameters.

Marks lie in mappings beside the parameters, so that these can be copied and saved like any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(frozen=True, kw_only=True)
class TensorShard:
    """The part of a parameter that one rank holds.

    Dimension `dim` consists of `bands`, one behind the other, such as the query, key and value rows of a fused
    projection. Each is sharded by itself into equal shards, one a rank, or one for `copies` neighbouring ranks; a
    rank's part is its shards, concatenated.
    """

    shape: tuple[int, ...]
    """Of the whole parameter."""

    dim: int
    bands: tuple[int, ...]
    """Sizes along `dim`; they sum to `shape[dim] + padding`."""

    size: int
    """Tensor-parallel ranks."""

    rank: int
    copies: int = 1
    """Ranks that hold the same part: more than 1 where there are fewer key-value heads than ranks."""

    padding: int = 0
    """Zeros behind the last element along `dim`, with which the only band divides."""

    def __post_init__(self) -> None:
        if not 0 <= self.dim < len(self.shape) or sum(self.bands) != self.shape[self.dim] + self.padding:
            raise ValueError(f"bands {self.bands} do not make up dimension {self.dim} of {self.shape}")
        if not 0 <= self.rank < self.size or self.size % self.copies:
            raise ValueError(f"rank {self.rank} of {self.size} ranks, {self.copies} of which share a part")
        if any(band % self.num_shards for band in self.bands) or (self.padding and len(self.bands) > 1):
            raise ValueError(f"bands {self.bands} with {self.padding} of padding do not divide by {self.num_shards}")

    @property
    def num_shards(self) -> int:
        """Different shards there are."""
        return self.size // self.copies

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of every rank's part."""
        return (*self.shape[: self.dim], sum(self.bands) // self.num_shards, *self.shape[self.dim + 1 :])

    @property
    def counts(self) -> bool:
        """Whether this rank's part is to be counted into a norm: of several copies, the first is."""
        return self.rank % self.copies == 0

    @property
    def real(self) -> int:
        """How many of this rank's elements along `dim` are not padding; they come first."""
        mine = sum(self.bands) // self.num_shards
        return max(0, min(mine, self.shape[self.dim] - self.rank // self.copies * mine)) if self.padding else mine

    def index(self) -> Tensor:
        """Positions along `dim` that this rank holds, in their order [local size]; those past the end are padding."""
        starts = torch.tensor([0, *self.bands]).cumsum(0).tolist()
        mine = self.rank // self.copies
        widths = [band // self.num_shards for band in self.bands]
        return torch.cat([torch.arange(at + mine * w, at + (mine + 1) * w)
                          for at, w in zip(starts, widths, strict=False)])  # fmt: skip

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part of `whole` [shape], with storage of its own."""
        if tuple(whole.shape) != self.shape:
            raise ValueError(f"a tensor of shape {tuple(whole.shape)} is to be sharded as one of {self.shape}")
        parts = []
        for band in self._pad(whole).split(self.bands, self.dim):
            width = band.shape[self.dim] // self.num_shards
            parts.append(band.narrow(self.dim, self.rank // self.copies * width, width))
        return torch.cat(parts, self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole [shape], from every rank's part in order: the inverse of `take`, whichever rank's shard this is"""
        if len(parts) != self.size or any(tuple(part.shape) != self.local_shape for part in parts):
            raise ValueError(
                f"{len(parts)} parts of shapes {[tuple(p.shape) for p in parts]}: a sharding of {self.shape} over "
                f"{self.size} ranks has {self.size} of {self.local_shape}"
            )
        widths = [band // self.num_shards for band in self.bands]
        split = [part.split(widths, self.dim) for part in parts[:: self.copies]]
        whole = torch.cat([shard for band in zip(*split, strict=True) for shard in band], self.dim)
        return whole.narrow(self.dim, 0, self.shape[self.dim]) if self.padding else whole

    def of_rank(self, rank: int) -> TensorShard:
        """The shard of another rank."""
        return dataclasses.replace(self, rank=rank)

    def to_dict(self) -> dict[str, int | list[int]]:
        """As integers and lists, for a checkpoint."""
        fields = dataclasses.asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> TensorShard:
        """The inverse of `to_dict`. Raises ValueError for what cannot be one."""
        plain: dict[str, Any] = {
            key: tuple(map(int, value)) if isinstance(value, Sequence) else int(value) for key, value in saved.items()
        }
        try:
            return TensorShard(**plain)
        except TypeError as error:
            raise ValueError(f"not a sharding: {dict(saved)}: {error}") from error

    def _pad(self, whole: Tensor) -> Tensor:
        if not self.padding:
            return whole
        shape = (*self.shape[: self.dim], self.padding, *self.shape[self.dim + 1 :])
        return torch.cat([whole, whole.new_zeros(shape)], self.dim)


def even_shard(shape: Sequence[int], dim: int, size: int, rank: int) -> TensorShard:
    """`dim` in one band, padded to a multiple of `size`."""
    padding = -shape[dim] % size
    return TensorShard(
        shape=tuple(shape), dim=dim, bands=(shape[dim] + padding,), size=size, rank=rank, padding=padding
    )  # fmt: skip


# --- what is marked on parameters

_SHARDS: Final[MutableMapping[Tensor, TensorShard]] = WeakIdKeyDictionary()
_PARTIAL: Final[MutableMapping[Tensor, bool]] = WeakIdKeyDictionary()


def shard_of(param: Tensor) -> TensorShard | None:
    """How `param` is sharded; None for one that every tensor-parallel rank holds whole."""
    return _SHARDS.get(param)


def shard_in_place(param: Tensor, shard: TensorShard) -> None:
    """Leave this rank's part in `param`, which stays the same object, so that what is tied to it stays tied.

    One that has been sharded the same way already, as tied ones have, is left alone; ValueError if it was another way.
    """
    before = _SHARDS.get(param)
    if before is not None:
        if before != shard:
            raise ValueError(f"a parameter of shape {shard.shape} that is sharded already is to be sharded another way")
        return
    param.data = shard.take(param.data)
    param.grad = None
    _SHARDS[param] = shard


def mark_partial(param: nn.Parameter) -> None:
    """Say that each rank computes only a part of the gradient of `param`, which is whole on all of them."""
    _PARTIAL[param] = True


def partial_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The replicated parameters whose gradient is a sum over the tensor-parallel ranks, in the model's order.

    After backward each rank holds one term of it. They are applied where activations are sharded: by head, as the norms
    of queries and keys are, or along the sequence.
    """
    return [param for param in model.parameters() if param in _PARTIAL]


def sharded_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, TensorShard]]:
    """Name, parameter and shard of every parameter that is sharded."""
    for name, param in model.named_parameters():
        shard = _SHARDS.get(param)
        if shard is not None:
            yield name, param, shard
