"""Batch norms between layers that are sharded: each rank normalizes its own features.

The running statistics stay whole on every rank, as buffers are in a checkpoint; each rank computes its part of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .layers import State, derive
from .sharding import TensorShard


def is_batch_norm(module: nn.Module) -> bool:
    """Whether `module` is one that is computed as torch does."""
    return isinstance(module, _BatchNorm) and type(module).forward in (_BatchNorm.forward, FeaturesNorm.forward)


@dataclass(eq=False)
class Features(State):
    """Of the batch norm of a rank's features."""

    shard: TensorShard
    """Of the features."""


class FeaturesNorm(_BatchNorm):
    """Has the scale and shift of some of the features, and the running statistics of all."""

    tensor: Features

    def forward(self, x: Tensor) -> Tensor:
        """x [n, features / ranks, ...] -> the same, normalized."""
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        if self.running_mean is None or self.running_var is None or (self.training and not self.track_running_stats):
            return super().forward(x)
        shard = self.tensor.shard
        mean, var = shard.take(self.running_mean), shard.take(self.running_var)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else factor
        y = F.batch_norm(x, mean, var, self.weight, self.bias, self.training, factor, self.eps)
        if self.training:
            rows = torch.stack([torch.cat([mean, var])] * shard.size)
            self.tensor.comm.all_gather(rows, "tensor-parallel", module=self.tensor.name).wait()
            means, variances = rows.chunk(2, 1)
            self.running_mean.copy_(shard.join(list(means)))
            self.running_var.copy_(shard.join(list(variances)))
        return y


def shard_batch_norm(module: nn.Module, state: Features) -> None:
    """Have `module` normalize this rank's features; its parameters are sharded besides. May be said of each
    statistic."""
    if not isinstance(module, FeaturesNorm):
        derive(module, FeaturesNorm)
    module.tensor = state  # type: ignore[assignment]
