"""Lion: the sign of an interpolated momentum is the update."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from .shard import Tile, TiledOptimizer


class Lion(TiledOptimizer):
    """p = (1 - lr * decay) * p - lr * sign(b1 * m + (1 - b1) * g), then m = b2 * m + (1 - b2) * g.

    Source: Chen et al. 2023, arXiv 2302.06675; the default betas are DeepSpeed's (the paper has b2 = 0.99).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _step(self, tiles: list[Tile]) -> None:
        for group, params, grads in tiles:
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            momenta = self._moments(params, "exp_avg")
            updates = torch._foreach_lerp(momenta, grads, 1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            torch._foreach_add_(params, updates, alpha=-lr)
            torch._foreach_lerp_(momenta, grads, 1 - beta2)
