"""Gradients that travel together."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..comm.lane import Ticket
from .shard import ShardedParam


@dataclass(eq=False, slots=True)
class Bucket:
    """Parameters whose gradients travel together, each in columns of its own of `rows` [pieces, width + parameters].

    The last columns are flags: 1 from a rank that has a gradient for the parameter. What arrives says whether any had.
    """

    params: list[ShardedParam]
    dtype: torch.dtype
    numel: int = 0
    offsets: list[int] = field(default_factory=list)
    width: int = 0
    waiting: set[ShardedParam] = field(default_factory=set)
    absent: list[ShardedParam] = field(default_factory=list)
    rows: Tensor | None = None
    buffer: Tensor | None = None
    """What `rows` is the beginning of."""
    lent: Tensor | None = None
    """A buffer that `reduced` is in, until the step's end."""
    reduced: Tensor | None = None
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
    def apart(self) -> bool:
        """Whether the masters, and with them the reduced gradients, are on another device than the parameters."""
        owner = self.params[0]
        return owner.master is not None and owner.master.device != owner.device
