"""Which positions of a sequence each rank has."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

Piece = tuple[int, int]
"""Positions from the first to before the second."""


@dataclass(frozen=True)
class Layout:
    """A sequence of `length` positions, divided over ranks. Lengths need not divide: pieces differ by one position."""

    length: int
    pieces: tuple[tuple[Piece, ...], ...]
    """Of each rank, in the order of the sequence."""

    @property
    def lengths(self) -> list[int]:
        """Positions of each rank."""
        return [sum(stop - start for start, stop in pieces) for pieces in self.pieces]

    def part(self, whole: Tensor, dim: int, rank: int) -> Tensor:
        """What `rank` has of a tensor with a dimension of all positions."""
        pieces = [whole.narrow(dim, start, stop - start) for start, stop in self.pieces[rank]]
        return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].contiguous()

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """The positions of `rank` [its length], int64."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self.pieces[rank]])


def divide(length: int, ranks: int) -> Layout:
    """One piece for each rank. Raises ValueError if a rank would have no position."""
    if length < ranks:
        raise ValueError(
            f"a sequence of {length} positions cannot be divided over {ranks} ranks (sequence_parallel_size): give "
            "them longer ones, or write fewer ranks"
        )
    return of_sizes([length * (rank + 1) // ranks - length * rank // ranks for rank in range(ranks)])


def of_sizes(sizes: list[int]) -> Layout:
    """One piece for each rank, of so many positions."""
    bounds = [0, *accumulate(sizes)]
    return Layout(bounds[-1], tuple((piece,) for piece in pairwise(bounds)))
