"""The tensor-parallel communications, as operators with a gradient (Shoeybi et al. 2019, arXiv 1909.08053; for the
sequence Korthikanti et al. 2022, arXiv 2205.05198).

They come in pairs, each the transpose of the other, so that backward through one is the other:

    copy     the same on all ranks -> the same, read by each       reduce          terms -> their sum on all ranks
    gather   shards -> the whole, read by each rank's own layer    reduce_scatter  terms -> each rank's shard of the sum
    split    the same on all ranks -> each rank's shard            join            shards -> the same whole on all ranks

Each collective is reported as a span of purpose `tensor-parallel` with the module's name. A group of one does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..comm.comm import Comm


def copy(x: Tensor, comm: Comm, module: str | None = None) -> Tensor:
    """`x`, which all ranks hold alike, for a layer that is sharded: its gradient is summed over the ranks."""
    return operate(x, comm, view, reduce, module)


def reduce(x: Tensor, comm: Comm, module: str | None = None, *, fresh: bool = False) -> Tensor:
    """The sum of every rank's `x`. `fresh`: nobody else needs `x`, which may be overwritten."""
    return operate(x, comm, _sum_in_place if fresh else _sum, copy, module)


def gather(x: Tensor, comm: Comm, dim: int, module: str | None = None) -> Tensor:
    """Every rank's `x`, concatenated along `dim`, for a layer that is sharded: its gradient is summed, then sharded
    again."""
    return operate(x, comm, _all_gather, reduce_scatter, dim, module)


def reduce_scatter(x: Tensor, comm: Comm, dim: int, module: str | None = None) -> Tensor:
    """This rank's shard along `dim` of the sum of every rank's `x`."""
    return operate(x, comm, _sum_of_shards, gather, dim, module)


def enter(x: Tensor, comm: Comm, sequence_dim: int | None, module: str | None = None) -> Tensor:
    """`x` for a layer that is sharded: all ranks hold it alike, or each a shard of it along `sequence_dim`."""
    return copy(x, comm, module) if sequence_dim is None else gather(x, comm, sequence_dim, module)


def split(x: Tensor, comm: Comm, dim: int, module: str | None = None) -> Tensor:
    """This rank's shard along `dim` of `x`, which all ranks hold alike."""
    return operate(x, comm, _own_shard, join, dim, module)


def join(x: Tensor, comm: Comm, dim: int, module: str | None = None) -> Tensor:
    """Every rank's `x`, concatenated along `dim`, for a computation that all ranks do alike."""
    return operate(x, comm, _all_gather, split, dim, module)


def operate(
    x: Tensor, comm: Comm, operator: Callable[..., Tensor], transpose: Callable[..., Tensor], *where: Any
) -> Tensor:
    """`operator(x, comm, *where)`, linear in `x`, whose gradient is `transpose(gradient, comm, *where)`."""
    if comm.size == 1:
        return x
    apply: Callable[..., Tensor] = _Operator.apply
    return apply(x, comm, operator, transpose, *where)


class _Operator(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Comm, operator: Callable[..., Tensor], transpose: Callable[..., Tensor], *where: Any
    ) -> Tensor:
        ctx.back = transpose, comm, where
        y = operator(x, comm, *where)
        if y is x:
            ctx.mark_dirty(x)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        transpose, comm, where = ctx.back
        return transpose(grad, comm, *where), None, None, None, *[None] * len(where)


# --- what is computed


def view(x: Tensor, *_: Any) -> Tensor:
    """`x` itself: the forward of an operator that does something to the gradient alone."""
    return x.view_as(x)


def _sum(x: Tensor, comm: Comm, module: str | None) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(x, "tensor-parallel", module=module).wait()
    return x


def _sum_in_place(x: Tensor, comm: Comm, module: str | None) -> Tensor:
    if not x.is_contiguous() or x._is_view():
        return _sum(x, comm, module)
    comm.all_reduce(x, "tensor-parallel", module=module).wait()
    return x


def _sum_of_shards(x: Tensor, comm: Comm, dim: int, module: str | None) -> Tensor:
    rows = torch.stack(_shards(x, comm, dim, module))
    mine = torch.empty_like(rows[0])
    comm.reduce_scatter(
        rows.view(comm.size, -1), mine.view(-1), "tensor-parallel", accumulate=False, module=module
    ).wait()
    return mine


def _own_shard(x: Tensor, comm: Comm, dim: int, module: str | None) -> Tensor:
    return _shards(x, comm, dim, module)[comm.rank].clone(memory_format=torch.contiguous_format)


def _all_gather(x: Tensor, comm: Comm, dim: int, module: str | None) -> Tensor:
    rows = x.new_empty((comm.size, *x.shape))
    rows[comm.rank] = x
    comm.all_gather(rows.view(comm.size, -1), "tensor-parallel", module=module).wait()
    return torch.cat(rows.unbind(), dim)


def _shards(x: Tensor, comm: Comm, dim: int, module: str | None) -> tuple[Tensor, ...]:
    if x.shape[dim] % comm.size:
        raise ValueError(
            f"{module or 'tensor parallelism'}: dimension {dim} of an activation of shape {tuple(x.shape)} is sharded "
            f"over {comm.size} tensor-parallel ranks, and {x.shape[dim]} does not divide by {comm.size}: pad it"
        )
    return x.chunk(comm.size, dim)
