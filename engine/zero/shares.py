"""How a parameter is divided among ranks: into parts of its flattened elements, in proportion to what each is to hold.

That depends on the parameter and the ranks' shares alone. Bucket, prefetch and persistence sizes only decide what is
communicated together, so they can change at any time and no checkpoint depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from itertools import groupby
from typing import Final

from torch import Tensor


class Shares:
    """In what proportion ranks hold what they divide: `parts` are numbers of at least 0, in any unit, one above 0.

    Neighbours whose shares are equal are a run: they are divided among, and communicated with, as one block.
    """

    def __init__(self, parts: Sequence[float]) -> None:
        self.ranks: Final = len(parts)
        self.runs: Final[list[tuple[int, Fraction]]] = []
        """Ranks of each run, and where it ends of the whole, 1."""
        total, end = sum(map(Fraction, parts)), Fraction(0)
        for part, run in groupby(parts):
            count = len(list(run))
            end += count * Fraction(part) / total
            self.runs.append((count, end))


@cache
def equal(ranks: int) -> Shares:
    """As much for each."""
    return Shares([1] * ranks)


@dataclass(frozen=True, slots=True)
class Block:
    """Elements `start` to `stop` of a flattened tensor, in equal shards of `width` for `count` ranks from `first` on;
    the last ones are shorter, or empty.

    The rank `first` + r has shard (r + `rotation`) modulo `count`, and row r of a communication buffer is that one.
    """

    first: int
    count: int
    start: int
    stop: int
    rotation: int
    whole: bool
    """Whether it is all of the tensor."""
    width: int = field(init=False)
    even: bool = field(init=False)
    """Whether the ranks' shards one after the other are the elements."""

    def __post_init__(self) -> None:
        width = -(-(self.stop - self.start) // self.count)
        object.__setattr__(self, "width", width)
        object.__setattr__(self, "even", self.rotation == 0 and self.stop - self.start == self.count * width)

    def bounds(self, rank: int) -> tuple[int, int]:
        """First element of the shard of `rank`, one of these, and the one after its last."""
        begin = self.start + (rank - self.first + self.rotation) % self.count * self.width
        return min(begin, self.stop), min(begin + self.width, self.stop)

    def to_shards(self, tensor: Tensor) -> Tensor:
        """Its elements as these ranks' shards [count, width], padded with zeros; a view of it if they are even."""
        if self.even:
            mine = tensor if self.whole else tensor.reshape(-1)[self.start : self.stop]
            return mine.reshape(self.count, self.width)
        shards = tensor.new_zeros(self.count, self.width)
        for source, target in self._pairs(tensor.reshape(-1), shards, None):
            target.copy_(source)
        return shards

    def from_shards(self, shards: Tensor, flat: Tensor, but: int | None) -> None:
        """Write the ranks' `shards` [count, width], that of the rank `but` excepted, to the flattened tensor."""
        for target, source in self._pairs(flat, shards, but):
            target.copy_(source)

    def _pairs(self, flat: Tensor, shards: Tensor, but: int | None) -> list[tuple[Tensor, Tensor]]:
        """Parts of `flat` with the parts of `shards` that correspond to them."""
        ranks = range(self.first, self.first + self.count)
        if self.even and but not in ranks:
            return [(flat[self.start : self.stop].view(self.count, self.width), shards)]
        pairs = []
        for row, rank in enumerate(ranks):
            start, stop = self.bounds(rank)
            if stop > start and rank != but:
                pairs.append((flat[start:stop], shards[row, : stop - start]))
        return pairs


class Partition:
    """`numel` elements divided by `shares`, a block for each run of ranks with equal ones.

    With `rotation` the ranks of a block have its shards in another order.
    """

    __slots__ = ("blocks", "even", "num_shards", "numel")

    def __init__(self, numel: int, shares: Shares, rotation: int = 0) -> None:
        self.numel: Final = numel
        self.num_shards: Final = shares.ranks
        first = start = 0
        blocks = []
        for count, end in shares.runs:
            stop = numel if end == 1 else round(numel * end)
            whole = stop - start == numel
            blocks.append(Block(first, count, start, stop, rotation % count, whole))
            first, start = first + count, stop
        self.blocks: Final = tuple(blocks)
        self.even: Final = all(block.even for block in blocks)
        """Whether the ranks' shards one after the other are the flattened tensor."""

    def place(self, rank: int) -> int:
        """Which of the blocks `rank` is in."""
        return next(at for at, block in enumerate(self.blocks) if rank < block.first + block.count)

    def bounds(self, rank: int) -> tuple[int, int]:
        """First element of the shard of `rank`, and the one after its last."""
        return self.blocks[self.place(rank)].bounds(rank)

    def from_shards(self, shards: Sequence[Tensor], flat: Tensor, but: int | None = None) -> None:
        """Write the ranks' `shards`, [ranks, width] of each block, `but` one rank's perhaps, to a flattened tensor
        [numel]."""
        for block, rows in zip(self.blocks, shards, strict=True):
            block.from_shards(rows, flat, but)

    @property
    def largest(self) -> int:
        """Elements of the largest shard."""
        return max(block.width for block in self.blocks)
