"""What an optimizer must know of a master that is a piece of a parameter."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class Shard:
    """Which elements of a parameter each rank's master holds.

    The ranks of `group` take their steps together, on the main thread: no lane may use it meanwhile. Without a group
    the master is the whole parameter, flattened or in its own shape.
    """

    shape: torch.Size
    """Of the whole parameter."""
    bounds: tuple[tuple[int, int], ...]
    """First element, and the one after the last, of each rank's piece of the flattened parameter; it may be empty."""
    group: dist.ProcessGroup | None = None
    muon: bool = False
    """Whether Muon is to step it (`wants_muon`)."""

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the whole; the filters of a convolution count as rows."""
        return self.shape[0], self.shape[1:].numel()

    @property
    def whole(self) -> bool:
        """Whether the master is the whole parameter."""
        return self.group is None

    def sizes(self) -> list[int]:
        """Elements of each rank's piece."""
        return [stop - start for start, stop in self.bounds]

    def mine(self, tensor: Tensor) -> Tensor:
        """This rank's elements of a tensor that has the parameter's shape, flattened."""
        start, stop = self.bounds[0 if self.group is None else dist.get_rank(self.group)]
        return tensor.reshape(-1)[start:stop]


Shards = Mapping[Any, Shard]
"""Master -> its shard. A master that is missing is whole. (Keys are Any because they are invariant: a mapping from
parameters is none from tensors.)"""


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


class Tile(NamedTuple):
    """The masters of one parameter group that have gradients, and these."""

    group: dict[str, Any]
    params: list[Tensor]
    grads: list[Tensor]


class TiledOptimizer(Optimizer, abc.ABC):
    """Finds the masters that have gradients; a subclass steps them."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step every master that has a gradient; returns what `closure` returns, which computes them first if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tiles = []
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                tiles.append(Tile(group, params, [param.grad for param in params]))
        if any(grad.is_sparse for tile in tiles for grad in tile.grads):
            raise RuntimeError(f"{type(self).__name__} cannot step sparse gradients; make them dense")
        if tiles:
            self._step(tiles)
        return loss

    @abc.abstractmethod
    def _step(self, tiles: list[Tile]) -> None:
        """Step the masters of the tiles."""

    def _moments(self, params: list[Tensor], name: str) -> list[Tensor]:
        """The state `name` of each parameter, zeros at first."""
        for param in params:
            if name not in self.state[param]:
                self.state[param][name] = torch.zeros_like(param)
        return [self.state[param][name] for param in params]

    def _count(self, params: list[Tensor]) -> list[float]:
        """How many steps each parameter has taken, with this one. Kept as torch does: a scalar on the CPU."""
        for param in params:
            self.state[param].setdefault("step", torch.zeros(()))
        steps = [self.state[param]["step"] for param in params]
        torch._foreach_add_(steps, 1)
        return [float(step) for step in steps]
