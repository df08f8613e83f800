"""Gradients before they travel: in which dtype they do, what they are multiplied by, and the sums of the micro-batches
of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..config import Config
from ..optim.loss_scaler import DTYPES
from .shard import ShardedParam


def travels_in(param: ShardedParam, config: Config) -> torch.dtype:
    """The dtype of its gradient on the wire: its own, unless the configuration says otherwise."""
    return DTYPES.get(config.communication_data_type or "", param.dtype)


def has_samples(config: Config) -> bool:
    """Whether gradients of this rank count: not those of one whose share of each micro-batch is 0 (`heterogeneous`). It
    sends zeros in their place, since what is not finite in them would stay so times 0."""
    return config.train_micro_batch_size_per_gpu != 0


def adds_up_in(param: ShardedParam, config: Config) -> torch.dtype:
    """The dtype in which its gradients of several micro-batches are added up, in every stage: its master's, which is
    fp32 for half precisions, unless the configuration says otherwise."""
    return DTYPES.get(config.data_types.grad_accum_dtype or "", param.master_dtype)


def scales(size: int, config: Config) -> tuple[float, float]:
    """What gradients are multiplied by before the sum over `size` ranks, and what remains after it for the mean.

    The second costs nothing where the step multiplies them anyway, to clip them or for a loss scale; the first, 1
    unless the configuration says otherwise, goes over all of a bucket once more.
    """
    factor = config.gradient_predivide_factor
    return (1.0 / size, 1.0) if config.prescale_gradients else (1.0 / factor, factor / size)


def is_quantized(param: ShardedParam, config: Config) -> bool:
    """Whether its gradient travels in int4: not that of a vector, such as a bias, as in DeepSpeed."""
    return config.zero_optimization.zero_quantized_gradients and len(param.shape) > 1


class MicrobatchSums(dict[ShardedParam, Tensor]):
    """Sums of the micro-batches of a step, where autograd would add them up in another dtype; dense, or of rows."""

    def __init__(self, params: Iterable[ShardedParam], config: Config) -> None:
        super().__init__()
        self._dtypes = {param: adds_up_in(param, config) for param in params}
        self.needed = any(dtype != param.dtype for param, dtype in self._dtypes.items())
        """Whether autograd does so of any."""

    def add(self, params: Iterable[ShardedParam]) -> None:
        """Add the gradients of these, if they are of another dtype; those are freed."""
        for param in params:
            dtype, grad = self._dtypes[param], param.param.grad
            if grad is None or dtype == grad.dtype:
                continue
            if param in self:
                self[param].add_(grad)
            else:
                self[param] = grad.to(dtype)
            param.param.grad = None

    def whole(self, param: ShardedParam) -> Tensor | None:
        """The gradient of this one, of all micro-batches so far, contiguous, in memory that can be written to; it stays
        where it is."""
        if param in self:
            self.add([param])
        grad = self.get(param, param.param.grad)
        if grad is not None and not grad.is_contiguous():
            grad = grad.contiguous()
            if param in self:
                self[param] = grad
            else:
                param.param.grad = grad
        return grad

    def take(self, params: Sequence[ShardedParam]) -> list[Tensor]:
        """The gradients of these that have one, of all micro-batches so far; nothing of them is left here."""
        if self:
            self.add(param for param in params if param in self)
        grads = [self.pop(param, param.param.grad) for param in params]
        for param in params:
            param.param.grad = None
        return [grad for grad in grads if grad is not None]


def as_master(grad: Tensor, master: Tensor) -> Tensor:
    """A whole gradient as its master is: device, dtype, shape and memory format, which a fused optimizer takes for the
    master's."""
    grad = grad.to(master.device).to(master.dtype).reshape(master.shape)
    return grad if grad.stride() == master.stride() else torch.empty_like(master).copy_(grad)
