"""An optimizer whose step sees all parameter groups at once, so that it can communicate once for all of them."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer


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
