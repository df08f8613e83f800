"""Parameters that tensor-parallel ranks have in parts, and how these come from one cut to another.

Part R of N of a parameter NAME is a tensor of its own in a checkpoint, NAME@R/N, and so is that part of what the
optimizer keeps for each element. Who has the parameter cut the same way reads its own part; anybody else reads all
parts of one parameter, joins them, and takes from the whole what is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..tensor.cut import TensorCut, cut_of
from ..zero.shard import ShardedParam
from .pieces import Contents, Piece


def tensor_cut(param: ShardedParam) -> TensorCut | None:
    """How `param` is cut over tensor-parallel ranks; None if each of them has the whole."""
    return cut_of(param.param)


def whole_shape(param: ShardedParam) -> torch.Size:
    """Of the parameter before layers were cut."""
    cut = tensor_cut(param)
    return param.shape if cut is None else torch.Size(cut.shape)


def part_name(name: str, cut: TensorCut | None) -> str:
    """What the part of `name` is called that a rank with this `cut` has."""
    return name if cut is None else f"{name}@{cut.rank}/{cut.size}"


def alike(one: TensorCut | None, other: TensorCut | None) -> bool:
    """Whether two cuts have the same parts, whichever of them a rank has."""
    return one is other if one is None or other is None else one.of_rank(other.rank) == other


@dataclass(frozen=True, slots=True)
class Wanted:
    """Elements to be read: those of `piece`, which are some of this rank's part of the tensor of that name."""

    piece: Piece
    cut: TensorCut | None = None
    """How the parameter is cut here."""
    saved: TensorCut | None = None
    """How it is cut in the checkpoint, by any of its ranks."""

    @property
    def direct(self) -> bool:
        """Whether the part that the checkpoint has is the one that is wanted."""
        return alike(self.cut, self.saved)

    def sources(self, device: str) -> list[Piece]:
        """What is to be read: to where it belongs, or parts that are to be `put` there, with memory on `device`."""
        if self.direct:
            return [replace(self.piece, name=part_name(self.piece.name, self.cut))]
        if self.piece.flat.numel() == 0:
            return []
        if self.saved is None:
            assert self.cut is not None
            parts = [(None, self.cut.shape)]
        else:
            parts = [(self.saved.of_rank(rank), self.saved.local_shape) for rank in range(self.saved.size)]
        numel = torch.Size(parts[0][1]).numel()
        return [
            Piece(part_name(self.piece.name, part), torch.empty(numel, dtype=self.piece.flat.dtype, device=device), numel)
            for part, _ in parts
        ]

    def put(self, sources: Sequence[Piece]) -> None:
        """Fill `piece` from its `sources`, which have been read."""
        if self.saved is None:
            assert self.cut is not None
            whole = sources[0].flat.view(self.cut.shape)
        else:
            whole = self.saved.join([source.flat.view(self.saved.local_shape) for source in sources])
        mine = whole if self.cut is None else self.cut.take(whole)
        start, length = self.piece.start, self.piece.flat.numel()
        self.piece.flat.copy_(mine.reshape(-1)[start : start + length])


def read(contents: Contents, wanted: Sequence[Wanted]) -> None:
    """Fill what is wanted. Of what is cut another way, one parameter's tensor at a time is in memory as a whole."""
    contents.read([piece for each in wanted if each.direct for piece in each.sources("cpu")])
    for each in wanted:
        if not each.direct:
            sources = each.sources("cpu")
            contents.read(sources)
            if sources:
                each.put(sources)
