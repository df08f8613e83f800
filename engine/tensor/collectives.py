"""The tensor-parallel communications, as operators with a gradient (Shoeybi et al. 2019, arXiv 1909.08053; for the
sequence Korthikanti et al. 2022, arXiv 2205.05198).

They come in pairs, each the transpose of the other, so that backward through one is the other:

    copy     the same on all ranks -> the same, read by each       reduce          terms -> their sum on all ranks
    gather   pieces -> the whole, read by each rank's own layer    reduce_scatter  terms -> each rank's piece of the sum
    split    the same on all ranks -> each rank's piece            join            pieces -> the same whole on all ranks

Each collective is told as a span of purpose `tensor-parallel` with the module's name. A group of one does nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm.comm import Comm


def copy(x: Tensor, comm: Comm, module: str | None = None) -> Tensor:
    """`x`, which all ranks hold alike, for a layer that is cut: its gradient is summed over the ranks."""
    return _apply(_Copy, x, comm, module)


def reduce(x: Tensor, comm: Comm, module: str | None = None, *, fresh: bool = False) -> Tensor:
    """The sum of every rank's `x`. `fresh`: nobody else needs `x`, which may be overwritten."""
    return _apply(_Reduce, x, comm, module, fresh)


def gather(x: Tensor, comm: Comm, dim: int, module: str | None = None) -> Tensor:
    """Every rank's `x`, concatenated along `dim`, for a layer that is cut: its gradient is summed, then cut again."""
    return _apply(_Gather, x, comm, dim, module)


def reduce_scatter(x: Tensor, comm: Comm, dim: int, module: str | None = None) -> Tensor:
    """This rank's piece along `dim` of the sum of every rank's `x`."""
    return _apply(_ReduceScatter, x, comm, dim, module)


def split(x: Tensor, comm: Comm, dim: int, module: str | None = None) -> Tensor:
    """This rank's piece along `dim` of `x`, which all ranks hold alike."""
    return _apply(_Split, x, comm, dim, module)


def join(x: Tensor, comm: Comm, dim: int, module: str | None = None) -> Tensor:
    """Every rank's `x`, concatenated along `dim`, for a computation that all ranks do alike."""
    return _apply(_Join, x, comm, dim, module)


def _apply(operator: Any, x: Tensor, comm: Comm, *where: Any) -> Tensor:
    if comm.size == 1:
        return x
    y: Tensor = operator.apply(x, comm, *where)
    return y


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, module: str | None) -> Tensor:
        ctx.where = comm, module
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return reduce(grad, *ctx.where), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, module: str | None, fresh: bool) -> Tensor:
        ctx.where = comm, module
        if fresh and x.is_contiguous() and not x._is_view():
            ctx.mark_dirty(x)
        else:
            x = x.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(x, "tensor-parallel", module=module).wait()
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return copy(grad, *ctx.where), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, dim: int, module: str | None) -> Tensor:
        ctx.where = comm, dim, module
        return _all_gather(x, comm, dim, module)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return reduce_scatter(grad, *ctx.where), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, dim: int, module: str | None) -> Tensor:
        ctx.where = comm, dim, module
        rows = torch.stack(_pieces(x, comm, dim, module))
        mine = torch.empty_like(rows[0])
        comm.reduce_scatter(
            rows.view(comm.size, -1), mine.view(-1), "tensor-parallel", accumulate=False, module=module
        ).wait()
        return mine

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather(grad, *ctx.where), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, dim: int, module: str | None) -> Tensor:
        ctx.where = comm, dim, module
        return _pieces(x, comm, dim, module)[comm.rank].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return join(grad, *ctx.where), None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, dim: int, module: str | None) -> Tensor:
        ctx.where = comm, dim, module
        return _all_gather(x, comm, dim, module)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return split(grad, *ctx.where), None, None, None


def _all_gather(x: Tensor, comm: Comm, dim: int, module: str | None) -> Tensor:
    rows = x.new_empty((comm.size, *x.shape))
    rows[comm.rank] = x
    comm.all_gather(rows.view(comm.size, -1), "tensor-parallel", module=module).wait()
    return torch.cat(rows.unbind(), dim)


def _pieces(x: Tensor, comm: Comm, dim: int, module: str | None) -> tuple[Tensor, ...]:
    if x.shape[dim] % comm.size:
        raise ValueError(
            f"{module or 'tensor parallelism'}: dimension {dim} of an activation of shape {tuple(x.shape)} is cut "
            f"over {comm.size} tensor-parallel ranks, and {x.shape[dim]} does not divide by {comm.size}: pad it"
        )
    return x.chunk(comm.size, dim)
