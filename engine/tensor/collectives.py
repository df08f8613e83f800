"""The tensor-parallel communications, as operators with a gradient (Shoeybi et al. 2019, arXiv 1909.08053; for the
sequence Korthikanti et al. 2022, arXiv 2205.05198).

They come in pairs, each the transpose of the other, so that backward through one is the other:

    copy     the same on all ranks -> the same, read by each       reduce          terms -> their sum on all ranks
    gather   shards -> the whole, read by each rank's own layer    reduce_scatter  terms -> each rank's shard of the sum
    split    the same on all ranks -> each rank's shard            join            shards -> the same whole on all ranks

Each collective is reported as a span of purpose `tensor-parallel` with the module's name. A group of one does nothing.

At the end: cross-entropy over a vocabulary that is sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.comm import Comm
from .check_data import check_range


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


# --- Cross-entropy over a vocabulary that is sharded: nobody holds all logits of a token (arXiv 1909.08053, section 3)


def vocabulary_cross_entropy(
    logits: Tensor,
    target: Tensor,
    comm: Comm,
    *,
    vocabulary: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    module: str | None = None,
) -> Tensor:
    """`F.cross_entropy` of the whole logits, from this rank's columns of them: the same on every rank.

    `logits` [..., V / ranks] are those of a `column` head, `target` [...] has classes of the whole vocabulary, the
    same on all ranks. `vocabulary` is the number of real classes, if the last columns are padding. Computed in fp32 at
    least; with reduction `none` the loss is 0 where the target is `ignore_index`. Raises ValueError for shapes that do
    not fit, IndexError for a target outside the vocabulary.
    """
    here = logits.shape[-1]
    classes = here * comm.size if vocabulary is None else vocabulary
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"vocabulary_cross_entropy: logits {tuple(logits.shape)} need a target {tuple(logits.shape[:-1])}, "
            f"not {tuple(target.shape)}"
        )
    if not 0 < classes <= here * comm.size:
        raise ValueError(f"vocabulary_cross_entropy: {classes} classes in {comm.size} x {here} columns")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"vocabulary_cross_entropy: reduction is {reduction!r}; write mean, sum or none")
    ignored = target == ignore_index
    said = f"vocabulary_cross_entropy: targets from {{}} to {{}}, {classes} classes"
    check_range(target.masked_fill(ignored, 0), classes, said)
    operator: Any = _CrossEntropy
    losses: Tensor = operator.apply(logits, target, ignored, comm, classes, label_smoothing, module)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (~ignored).sum()


class VocabularyCrossEntropy(nn.Module):
    """The mean cross-entropy of logits [..., V] for classes [...]: a pipeline's loss_fn with which the logits of a head
    that is sharded stay sharded, so that no rank has all of them. Where nothing is sharded it is `F.cross_entropy`."""

    def __init__(self, *, ignore_index: int = -100, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self._parts: tuple[Comm, int | None] = Comm(None, None), None

    def shard(self, comm: Comm, vocabulary: int) -> None:
        """From now on logits are this rank's columns of them."""
        self._parts = comm, vocabulary

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """A scalar, the same on every rank that has a part of the logits."""
        comm, vocabulary = self._parts
        return vocabulary_cross_entropy(
            logits, target, comm, vocabulary=vocabulary, ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )  # fmt: skip


class _CrossEntropy(torch.autograd.Function):
    """Losses of all tokens [...]; the gradient of the logits needs no communication."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, ignored: Tensor, comm: Comm, classes: int, smoothing: float,
        module: str | None,
    ) -> Tensor:  # fmt: skip
        here = logits.shape[-1]
        first = comm.rank * here
        real = max(0, min(here, classes - first))
        x = logits.to(torch.promote_types(logits.dtype, torch.float32))
        top = x[..., :real].amax(-1) if real else x.new_full(x.shape[:-1], -torch.inf)
        comm.all_reduce(top, "tensor-parallel", dist.ReduceOp.MAX, module=module).wait()
        shifted = x - top.unsqueeze(-1)
        exponentials = shifted.exp()
        exponentials[..., real:] = 0
        local = target - first
        outside = ignored | (local < 0) | (local >= here)
        local = local.masked_fill(outside, 0).unsqueeze(-1)
        # Of every token: the sum of exponentials, the logit of its class, and the sum of logits.
        sums = torch.stack(
            [exponentials.sum(-1), shifted.gather(-1, local).squeeze(-1).masked_fill(outside, 0),
             shifted[..., :real].sum(-1) if smoothing else torch.zeros_like(top)]
        )  # fmt: skip
        comm.all_reduce(sums, "tensor-parallel", module=module).wait()
        total, own, all_classes = sums
        losses = total.log() - (1 - smoothing) * own - smoothing / classes * all_classes
        ctx.save_for_backward(exponentials / total.unsqueeze(-1), local, outside, ignored)
        ctx.about = logits.dtype, real, smoothing, classes
        kept: Tensor = losses.masked_fill(ignored, 0)
        return kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        softmax, local, outside, ignored = ctx.saved_tensors
        dtype, real, smoothing, classes = ctx.about
        slope = softmax.scatter_add(-1, local, (smoothing - 1) * (~outside).to(softmax.dtype).unsqueeze(-1))
        if smoothing:
            slope[..., :real] -= smoothing / classes
        slope *= grad.masked_fill(ignored, 0).unsqueeze(-1)
        return slope.to(dtype), None, None, None, None, None, None
