"""Ring attention (Liu et al. 2023, arXiv 2310.01889): each rank keeps its queries, and keys and values go round the
ranks, one step ahead of the computation.

Under a causal mask a rank computes nothing with what comes behind its own positions. Of contiguous pieces the last rank
then has most to do; in zigzag, two pieces for each rank, one from the front and one from the back, all have as much
(Zhu 2024, ring-flash-attention).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from ..comm.comm import Comm
from ..comm.lane import Done, Ticket
from .layout import Layout

Gradients = tuple[Tensor, Tensor, Tensor]

_FLASH_ON_CPU: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_FLASH_ON_CUDA: Final = (torch.float16, torch.bfloat16)


def attend_block(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """The attention [batch, heads, queries, features], and the log-sum-exp [batch, heads, queries] in float32 or
    float64. Keys and values may have fewer heads, each for as many of the queries'. `causal`: of as many queries as
    keys, each attends to those up to its own place."""
    flash = _flash(query, value)
    if flash == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
        return out, lse
    if flash == "cuda":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, *_repeated(query, key, value), 0.0, causal, False, scale=scale
        )
        return out, lse
    key, value = _repeated(query, key, value)
    scores = _scores(query, key, causal, scale)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ value.to(scores.dtype)).to(query.dtype), lse


def block_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float | None,
) -> Gradients:  # fmt: skip
    """Of the queries, keys and values of one block, whose part of the attention `out` over all blocks has `lse`."""
    flash = _flash(query, value)
    if flash == "cpu":
        found: Gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, causal, scale=scale
        )
        return found
    keys, values = _repeated(query, key, value)
    if flash == "cuda":
        of_query, of_keys, of_values = _flash_backward(grad, query, keys, values, out, lse, causal, scale)
    else:
        scores = _scores(query, keys, causal, scale)
        wide = scores.dtype
        weights, grad_wide = (scores - lse[..., None]).exp(), grad.to(wide)
        of_values = weights.transpose(-1, -2) @ grad_wide
        rest = (grad_wide * out.to(wide)).sum(-1, keepdim=True)
        of_scores = weights * (grad_wide @ values.to(wide).transpose(-1, -2) - rest) * _scale(query, scale)
        of_query, of_keys = of_scores @ keys.to(wide), of_scores.transpose(-1, -2) @ query.to(wide)
    return of_query, _summed(of_keys, key), _summed(of_values, value)


def _flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float | None,
) -> Gradients:  # fmt: skip
    none: Any = None  # bounds of sequences of several lengths
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # of dropout, of which there is none
    found: Gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, out, lse, none, none, query.shape[2], key.shape[2], 0.0, causal, seed, seed[:0],
        scale=scale,
    )  # fmt: skip
    return found


def _flash(query: Tensor, value: Tensor) -> str:
    """The device whose fused attention takes these; empty for plain matrix products."""
    features, device = query.shape[-1], query.device
    if value.shape[-1] != features:
        return ""
    if device.type == "cpu" and query.dtype in _FLASH_ON_CPU:
        return "cpu"
    fits = device.type == "cuda" and query.dtype in _FLASH_ON_CUDA and features % 8 == 0 and features <= 256
    return "cuda" if fits and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0) else ""


def _scale(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float | None) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) * _scale(query, scale)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def _repeated(query: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Each with as many heads as the queries."""
    times = query.shape[1] // tensors[0].shape[1]
    return [tensor.repeat_interleave(times, 1) if times > 1 else tensor for tensor in tensors]


def _summed(grad: Tensor, of: Tensor) -> Tensor:
    """The gradient of what was repeated so."""
    return grad if grad.shape[1] == of.shape[1] else grad.unflatten(1, (of.shape[1], -1)).sum(2)


Part = tuple[slice, slice, bool]
"""Which of a rank's queries attend to which of another's keys, and whether only up to their own place."""

EVERY = slice(None)


def ring(
    comm: Comm, layout: Layout, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
) -> Tensor:
    """The attention of this rank's queries to all keys of the ranks of `comm`.

    Shapes are [batch, heads, positions, features]; keys and values may have fewer heads.
    """
    apply: Callable[..., Tensor] = _Ring.apply
    return apply(comm, layout, causal, scale, query, key, value)


def part_of(layout: Layout, rank: int, source: int, causal: bool) -> Part | None:
    """What `rank` computes with the keys of `source`; None for nothing."""
    if not causal or rank == source:
        return EVERY, EVERY, causal
    if len(layout.pieces[rank]) == 1:
        return (EVERY, EVERY, False) if source < rank else None
    first = layout.pieces[min(source, rank)][0]
    front = first[1] - first[0]
    return (EVERY, slice(front), False) if source < rank else (slice(front, None), EVERY, False)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, comm: Comm, layout: Layout, causal: bool, scale: float | None, query: Tensor, key: Tensor,
        value: Tensor,
    ) -> Tensor:  # fmt: skip
        wide = torch.promote_types(query.dtype, torch.float32)
        out, lse = query.new_zeros((*query.shape[:3], value.shape[3]), dtype=wide), torch.empty(0)
        travel = _Travel(comm, layout, key, value)
        for source in travel.sources:
            held, coming = travel.of(source)
            part = part_of(layout, comm.rank, source, causal)
            if part is not None:
                rows, columns, up_to = part
                keys, values = (each[:, :, columns] for each in held)
                found, its = attend_block(query[:, :, rows], keys, values, up_to, scale)
                if source == comm.rank:
                    out, lse = found.to(wide), its.clone()
                else:
                    before = lse[:, :, rows]
                    after = torch.logaddexp(before, its)
                    kept, added = ((each - after).exp()[..., None] for each in (before, its))
                    out[:, :, rows] = out[:, :, rows] * kept + found * added
                    lse[:, :, rows] = after
            coming.wait()
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.how = comm, layout, causal, scale
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        comm, layout, causal, scale = ctx.how
        query, key, value, out, lse = ctx.saved_tensors
        wide, grad = torch.promote_types(query.dtype, torch.float32), grads[0]
        of_query = torch.zeros_like(query, dtype=wide)
        travel = _Travel(comm, layout, key, value)
        summed: Tensor | None = None  # gradients of the keys and values that are here, which follow them round
        following: Ticket | None = None
        for source in travel.sources:
            held, coming = travel.of(source)
            mine = [torch.zeros_like(each, dtype=wide) for each in held]
            part = part_of(layout, comm.rank, source, causal)
            if part is not None:
                rows, columns, up_to = part
                keys, values = (each[:, :, columns] for each in held)
                found = block_gradients(
                    grad[:, :, rows], query[:, :, rows], keys, values, out[:, :, rows], lse[:, :, rows], up_to, scale
                )
                of_query[:, :, rows] += found[0]
                for each, more in zip(mine, found[1:], strict=True):
                    each[:, :, columns] = more
            added = torch.cat([each.flatten() for each in mine])
            if following is not None and summed is not None:
                following.wait()
                added += summed
            summed, following = travel.pass_on(added, source)
            coming.wait()
        assert summed is not None
        assert following is not None
        following.wait()
        of_key, of_value = travel.unpacked(summed, comm.rank)
        return (
            None, None, None, None, of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)
        )  # fmt: skip


class _Travel:
    """Keys and values on their way: first this rank's own, then those of the one before it, and so on."""

    def __init__(self, comm: Comm, layout: Layout, key: Tensor, value: Tensor) -> None:
        self._comm, self._lengths = comm, layout.lengths
        self._shapes = [key.shape, value.shape]
        self._held = torch.cat([key.flatten(), value.flatten()])
        self.sources = [(comm.rank - step) % comm.size for step in range(comm.size)]
        """Whose are here, step by step."""

    def of(self, source: int) -> tuple[list[Tensor], Ticket]:
        """The keys and values of `source`, the next in order, and what brings those behind them."""
        held = self._held
        if source == self.sources[-1]:
            return self.unpacked(held, source), Done()
        self._held, coming = self.pass_on(held, source)
        return self.unpacked(held, source), coming

    def pass_on(self, held: Tensor, source: int) -> tuple[Tensor, Ticket]:
        """Send what is of `source` to the next rank, and get what the one before it has of the source before."""
        comm = self._comm
        received = held.new_empty(sum(map(torch.Size.numel, self._of((source - 1) % comm.size))))
        sizes, expected = [0] * comm.size, [0] * comm.size
        sizes[(comm.rank + 1) % comm.size] = held.numel()
        expected[(comm.rank - 1) % comm.size] = received.numel()
        return received, comm.all_to_all(held, received, "context-parallel", sizes, expected)

    def unpacked(self, flat: Tensor, source: int) -> list[Tensor]:
        """[batch, heads, positions, features] of the keys and the values of `source`."""
        shapes = self._of(source)
        return [each.view(shape) for each, shape in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]

    def _of(self, source: int) -> list[torch.Size]:
        return [torch.Size((*shape[:2], self._lengths[source], shape[3])) for shape in self._shapes]
