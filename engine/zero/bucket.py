"""Gradients that travel together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from ..comm.lane import Ticket
from .shard import ShardedParam

RUN: Final = 1 << 17
"""Elements that are copied into a bucket at once, so that small gradients cost no call each: so few are still in the
processor's cache, and take no more memory than a large gradient that comes."""


@dataclass(eq=False, slots=True)
class Bucket:
    """Parameters whose gradients travel together, each in columns of its own of `rows` [pieces, columns].

    The columns from `width` on are flags, one for each parameter: 1 from a rank that has a gradient for it. What
    arrives says whether any had. The last column is a flag of the bucket: 1 from a rank that is left with parts of
    gradients that came after their bucket had been sent.
    """

    params: list[ShardedParam]
    dtype: torch.dtype
    numel: int = 0
    offsets: list[int] = field(default_factory=list)
    width: int = 0
    waiting: set[ShardedParam] = field(default_factory=set)
    absent: list[int] = field(default_factory=list)
    """Places of the parameters that this rank has no gradient for."""
    rows: Tensor | None = None
    buffer: Tensor | None = None
    """What `rows` is the beginning of."""
    own: Tensor | None = None
    """Rows that stay this bucket's, because `reduced` is in them."""
    reduced: Tensor | None = None
    """The reduced gradients [columns], this rank's row: from the first micro-batch of a step to the step's end."""
    grads: list[Tensor] = field(default_factory=list)
    """Each parameter's part of `reduced`, in the shape of its master."""
    collected: list[Tensor | None] = field(default_factory=list)
    """What the masters were given as gradients at the last step."""
    landing: Tensor | None = None
    """Where a reduce-scatter writes what is on its way to host memory."""
    holds: bool = False
    """Whether `reduced` has the sum of earlier micro-batches, to be added to."""
    ticket: Ticket | None = None

    def seal(self) -> None:
        for param in self.params:
            self.offsets.append(self.width)
            self.width += param.cut.chunk
        self.waiting = set(self.params)

    @property
    def columns(self) -> int:
        return self.width + len(self.params) + 1

    @property
    def present(self) -> list[int]:
        """Places of the parameters that this rank has a gradient for."""
        absent = set(self.absent)
        return [place for place in range(len(self.params)) if place not in absent]

    @property
    def apart(self) -> bool:
        """Whether the masters, and with them the reduced gradients, are on another device than the parameters."""
        owner = self.params[0]
        return owner.master is not None and owner.master.device != owner.device

    def reduce_into(self, reduced: Tensor) -> None:
        """From now on have the reduced gradients in `reduced` [columns]."""
        self.reduced = reduced
        self.grads = [
            reduced[offset : offset + param.stop - param.start].view(param.master_shape)
            for param, offset in zip(self.params, self.offsets, strict=True)
        ]

    def runs(self, places: Iterable[int]) -> Iterator[list[int]]:
        """`places` in runs of neighbours, whose gradients are copied together: small, or one large one."""
        limit = min(RUN, self.numel // 16)
        run: list[int] = []
        size = 0
        for place in sorted(places):
            if run and (place != run[-1] + 1 or size + self.params[place].numel > limit):
                yield run
                run, size = [], 0
            run.append(place)
            size += self.params[place].numel
        if run:
            yield run

    def write(self, rows: Tensor, places: Sequence[int], grads: Sequence[Tensor], scale: float) -> None:
        """Write the gradients of the parameters at `places`, which are neighbours, times `scale` to `rows`."""
        if len(rows) == 1:
            source = torch._utils._flatten_dense_tensors(grads)[None]
        else:
            parts = [self.params[at].cut.to_rows(grad) for at, grad in zip(places, grads, strict=True)]
            source = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        start = self.offsets[places[0]]
        target = rows[:, start : start + source.shape[1]]
        if scale == 1.0:
            target.copy_(source)
        elif source.dtype == target.dtype:
            torch.mul(source, scale, out=target)
        else:
            target.copy_(source).mul_(scale)

    def flag(self, rows: Tensor, left: bool) -> None:
        """Write the flags to `rows`, and zeros for the absent gradients; `left` is the bucket's own flag."""
        rows[:, self.width :] = 1
        for place in self.absent:
            start = self.offsets[place]
            rows[:, start : start + self.params[place].cut.chunk] = 0
            rows[:, self.width + place] = 0
        rows[:, -1] = float(left)
