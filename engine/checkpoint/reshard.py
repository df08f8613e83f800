"""Parameters that tensor-parallel ranks have in parts, and how these come from one sharding to another.

Part P of N of a parameter NAME is a tensor of its own in a checkpoint, NAME@P/N, and so is that part of what the
optimizer keeps for each element. Who has the parameter sharded into the same parts reads its own; anybody else reads
all parts of one parameter, joins them, and takes from the whole what is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..tensor.sharding import TensorShard, shard_of
from ..zero.shard import ShardedParam
from .dcp import Contents, Piece


def tensor_shard(param: ShardedParam) -> TensorShard | None:
    """How `param` is sharded over tensor-parallel ranks; None if each of them has the whole."""
    return shard_of(param.param)


def whole_shape(param: ShardedParam) -> torch.Size:
    """Of the parameter before layers were sharded."""
    shard = tensor_shard(param)
    return param.shape if shard is None else torch.Size(shard.shape)


def part_name(name: str, shard: TensorShard | None) -> str:
    """What the part of `name` is called that a rank with this `shard` has."""
    return name if shard is None else f"{name}@{shard.rank // shard.copies}/{shard.num_shards}"


def join(shard: TensorShard, parts: Sequence[Tensor]) -> Tensor:
    """The whole, from each of the different parts once, in order."""
    return shard.join([parts[rank // shard.copies].view(shard.local_shape) for rank in range(shard.size)])


def same_sharding(one: TensorShard | None, other: TensorShard | None) -> bool:
    """Whether two shardings make the same parts, whichever of them a rank has, and however many ranks have the same."""
    if one is None or other is None:
        return one is other
    same = one.dim == other.dim and one.bands == other.bands and one.num_shards == other.num_shards
    return same and one.shape == other.shape


@dataclass(frozen=True, slots=True)
class Wanted:
    """Elements to be read: those of `piece`, which are some of this rank's part of the tensor of that name."""

    piece: Piece
    shard: TensorShard | None = None
    """How the parameter is sharded here."""
    saved: TensorShard | None = None
    """How it is sharded in the checkpoint, by any of its ranks."""

    @property
    def direct(self) -> bool:
        """Whether the part that the checkpoint has is the one that is wanted."""
        return same_sharding(self.shard, self.saved)

    def sources(self, device: str) -> list[Piece]:
        """What is to be read: to where it belongs, or parts that are to be `put` there, with memory on `device`."""
        if self.direct:
            return [replace(self.piece, name=part_name(self.piece.name, self.shard))]
        if self.piece.flat.numel() == 0:
            return []
        name, dtype = self.piece.name, self.piece.flat.dtype
        shard = self.saved
        parts = [None] if shard is None else [shard.of_rank(rank) for rank in range(0, shard.size, shard.copies)]
        numel = self._shape.numel()
        return [Piece(part_name(name, part), torch.empty(numel, dtype=dtype, device=device), numel) for part in parts]

    def put(self, sources: Sequence[Piece]) -> None:
        """Fill `piece` from its `sources`, which have been read."""
        flats = [source.flat for source in sources]
        whole = flats[0].view(self._shape) if self.saved is None else join(self.saved, flats)
        mine = whole if self.shard is None else self.shard.take(whole)
        start, length = self.piece.start, self.piece.flat.numel()
        self.piece.flat.copy_(mine.reshape(-1)[start : start + length])

    @property
    def _shape(self) -> torch.Size:
        """Of what is read where it is not what is wanted: of the whole, or of each of the parts in the checkpoint."""
        if self.saved is not None:
            return torch.Size(self.saved.local_shape)
        assert self.shard is not None
        return torch.Size(self.shard.shape)


def read(contents: Contents, wanted: Sequence[Wanted]) -> None:
    """Fill what is wanted. Of what is sharded another way, one parameter's tensor at a time is in memory as a whole."""
    contents.read([piece for each in wanted if each.direct for piece in each.sources("cpu")])
    for each in wanted:
        if not each.direct:
            sources = each.sources("cpu")
            contents.read(sources)
            if sources:
                each.put(sources)
