"""Optimizers that step tiles of masters: their common ground, Lion, and LAMB with norms of whole parameters."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

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


class Tile(NamedTuple):
    """The masters of one parameter group that have gradients, and these."""

    group: dict[str, Any]
    params: list[Tensor]
    grads: list[Tensor]


class TiledOptimizer(Optimizer, abc.ABC):
    """Finds the masters that have gradients; a subclass steps them."""

    def __init__(self, params: ParamsT, options: dict[str, Any], comm: Comm | None = None) -> None:
        """`options` are those of a section of the configuration (`build`). The ranks of `comm` have the other shards of
        each master, or, of whole masters, the same."""
        super().__init__(params, options)
        self._comm = comm or Comm(None, None)

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

    def _adam_moments(self, tile: Tile) -> tuple[list[Tensor], list[Tensor]]:
        """The averages of the gradients and of their squares, with those of this step."""
        group, params, grads = tile
        beta1, beta2 = group["betas"]
        first, second = self._moments(params, "exp_avg"), self._moments(params, "exp_avg_sq")
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        return first, second

    def _count(self, params: list[Tensor]) -> list[float]:
        """How many steps each parameter has taken, with this one. Kept as torch does: a scalar on the CPU."""
        for param in params:
            self.state[param].setdefault("step", torch.zeros(()))
        steps = [self.state[param]["step"] for param in params]
        torch._foreach_add_(steps, 1)
        return [float(step) for step in steps]


class Lion(TiledOptimizer):
    """p = (1 - lr * decay) * p - lr * sign(b1 * m + (1 - b1) * g), then m = b2 * m + (1 - b2) * g.

    Source: Chen et al. 2023, arXiv 2302.06675; the default betas are DeepSpeed's (the paper has b2 = 0.99).
    """

    def _step(self, tiles: list[Tile]) -> None:
        for group, params, grads in tiles:
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            momenta = self._moments(params, "exp_avg")
            updates = torch._foreach_lerp(momenta, grads, 1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            torch._foreach_add_(params, updates, alpha=-lr)
            torch._foreach_lerp_(momenta, grads, 1 - beta2)


class Lamb(TiledOptimizer):
    """p = p - lr * sqrt(1 - b2^t) / (1 - b1^t) * c * u, with u = m / (sqrt(v) + eps) + decay * p and c = |p| / |u|.

    m and v are Adam's moments. c is kept between `min_coeff` and `max_coeff`, and is 1 where a norm is 0. The norms are
    those of whole parameters: the squares of the shards are summed over the ranks, in one all-reduce for all of them.
    With `eps_inside_sqrt` the denominator is sqrt(v + eps); without `bias_correction` the factor after lr is left out.
    Source: You et al. 2019, arXiv 1904.00962, as in DeepSpeed (`csrc/lamb/fused_lamb_cuda_kernel.cu`).
    """

    def _step(self, tiles: list[Tile]) -> None:
        updates = [self._updates(tile) for tile in tiles]
        norms = self._norms(
            [param for tile in tiles for param in tile.params], [update for each in updates for update in each]
        )
        of_tiles = torch.split(norms, [len(tile.params) for tile in tiles], dim=1)
        for tile, update, (weight, length) in zip(tiles, updates, of_tiles, strict=True):
            group = tile.group
            ratio = (weight / length).clamp(group["min_coeff"], group["max_coeff"])
            ratio = torch.where((weight > 0) & (length > 0), ratio, 1.0)
            factors = ratio * torch.tensor(self._step_sizes(tile), dtype=ratio.dtype).to(ratio.device)
            torch._foreach_mul_(update, list(factors.to(tile.params[0].dtype).unbind()))
            torch._foreach_add_(tile.params, update, alpha=-1)

    def _updates(self, tile: Tile) -> list[Tensor]:
        group, params, _ = tile
        first, second = self._adam_moments(tile)
        if group["eps_inside_sqrt"]:
            lengths = torch._foreach_add(second, group["eps"])
            torch._foreach_sqrt_(lengths)
        else:
            lengths = torch._foreach_sqrt(second)
            torch._foreach_add_(lengths, group["eps"])
        updates = torch._foreach_div(first, lengths)
        if group["weight_decay"] != 0:
            torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        return list(updates)

    def _step_sizes(self, tile: Tile) -> list[float]:
        lr, (beta1, beta2) = float(tile.group["lr"]), tile.group["betas"]
        steps = self._count(tile.params)
        if not tile.group["bias_correction"]:
            return [lr] * len(steps)
        return [lr * math.sqrt(1 - beta2**step) / (1 - beta1**step) for step in steps]

    def _norms(self, params: list[Tensor], updates: list[Tensor]) -> Tensor:
        """Norms [2, n] of whole parameters and whole updates, in float64."""
        own = torch._foreach_norm([*params, *updates], 2.0)
        squares = torch.stack([norm.double() for norm in own]).square_().view(2, -1)
        self._comm.all_reduce(squares, "optimizer").wait()
        return squares.sqrt_()
