"""A parametrization whose function keeps a weight for its backward itself, as no autograd does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return weight * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return 2 * grad * ctx.weight


class Squared(nn.Module):
    """The parametrization: the weight is the square of what is trained."""

    def forward(self, weight: Tensor) -> Tensor:
        y: Tensor = Square.apply(weight)
        return y
