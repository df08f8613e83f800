"""Which positions of a sequence each rank has."""

from __future__ import annotations

from dataclasses import dataclass

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


def divide(length: int, ranks: int, *, zigzag: bool = False) -> Layout:
    """One piece for each rank, or in `zigzag` two: of 2 P pieces, rank r of P has the r-th from the front and the r-th
    from the back. Raises ValueError if one would be empty."""
    number = 2 * ranks if zigzag else ranks
    if length < number:
        raise ValueError(
            f"a sequence of {length} positions cannot be divided over {ranks} ranks{' in zigzag' * zigzag} "
            f"(sequence_parallel_size): give them {number} or more, or write fewer ranks"
        )
    pieces = [(length * at // number, length * (at + 1) // number) for at in range(number)]
    return Layout(length, tuple((pieces[r], pieces[-1 - r]) if zigzag else (pieces[r],) for r in range(ranks)))
