"""Cross-entropy over a vocabulary that is sharded: nobody holds all logits of a token (arXiv 1909.08053, section 3)."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.comm import Comm
from .check_data import check_range


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
