"""What an optimizer must know of a master that is a shard of a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm.comm import Comm


@dataclass(frozen=True, slots=True)
class Shard:
    """Which elements of a parameter each rank's master holds.

    The ranks of `comm` take their steps together, on the main thread: no lane may use its group meanwhile. Without one
    the master is the whole parameter, flattened or in its own shape.
    """

    shape: torch.Size
    """Of the whole parameter."""
    bounds: tuple[tuple[int, int], ...]
    """First element, and the one after the last, of each rank's shard of the flattened parameter; it may be empty."""
    comm: Comm | None = None
    muon: bool = False
    """Whether Muon is to step it (`wants_muon`)."""

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the whole; the filters of a convolution count as rows."""
        return self.shape[0], self.shape[1:].numel()

    @property
    def whole(self) -> bool:
        """Whether the master is the whole parameter."""
        return self.comm is None

    def sizes(self) -> list[int]:
        """Elements of each rank's shard."""
        return [stop - start for start, stop in self.bounds]

    def mine(self, tensor: Tensor) -> Tensor:
        """This rank's elements of a tensor that has the parameter's shape, flattened."""
        start, stop = self.bounds[0 if self.comm is None else self.comm.rank]
        return tensor.reshape(-1)[start:stop]


Shards = Mapping[Any, Shard]
"""Master -> its shard. A master that is missing is whole. (Keys are Any because they are invariant: a mapping from
parameters is none from tensors.)"""


def comm_of(shards: Shards) -> Comm:
    """Of the ranks that have the other shards of each; of one rank where masters are whole. It is one for all."""
    return next((shard.comm for shard in shards.values() if shard.comm is not None), Comm(None, None))


def whole(master: Tensor, muon: bool = False) -> Shard:
    """The shard of a master that is a whole parameter in its own shape."""
    return Shard(master.shape, ((0, master.numel()),), None, muon)


def wants_muon(name: str, parameter: Tensor) -> bool:
    """Whether Muon is to step a parameter of the model: its attribute `use_muon` if it has one, else DeepSpeed's rule.

    That is: matrices, but for embeddings and the output layer, which are known by "embed" or "lm_head" in their names.
    """
    chosen = getattr(parameter, "use_muon", None)
    if chosen is not None:
        return bool(chosen)
    return parameter.ndim >= 2 and not any(word in name.lower() for word in ("embed", "lm_head"))
