"""Ulysses (Jacobs et al. 2023, arXiv 2309.14509): each rank has some of the positions for all heads; for the attention
an all-to-all gives it all positions for some of the heads, and another takes that back.

Both ways a rank sends the (P - 1) / P of its queries, keys and values that others need, so that the bytes a rank sends
fall with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.comm import Comm
from .layout import Layout

Attention = Callable[..., Tensor]


def ulysses(
    attention: Attention, comm: Comm, layout: Layout, query: Tensor, key: Tensor, value: Tensor,
    mask: Tensor | None, **how: Any,
) -> Tensor:  # fmt: skip
    """`attention(query, key, value, attn_mask=, **how)` of whole sequences, of which this rank has its positions.

    Shapes are [batch, heads, positions, features]. Keys and values of fewer heads are repeated as often as it takes
    that each rank gets as many. `mask` is that of whole sequences. Raises ValueError if heads do not divide.
    """
    ranks, heads = comm.size, query.shape[1]
    if heads % ranks:
        fits = [number for number in range(1, heads + 1) if heads % number == 0]
        raise ValueError(
            f"attention of {heads} heads cannot be divided over {ranks} ranks (sequence_parallel_size): every rank "
            f'computes as many of them; write one of {fits}, or "context_parallel": {{"attention": "ring"}}'
        )
    shared = heads // key.shape[1]  # queries that a key has
    copies = next(n for n in range(1, shared + 1) if shared % n == 0 and key.shape[1] * n % ranks == 0)
    if copies > 1:
        key, value = (tensor.repeat_interleave(copies, 1) for tensor in (key, value))
    if mask is not None and mask.dim() > 2 and mask.shape[-3] == heads:
        mask = mask.chunk(ranks, -3)[comm.rank]
    apply: Callable[..., Any] = _Exchange.apply
    query, key, value = apply(comm, layout, True, query, key, value)
    if key.shape[1] == query.shape[1]:
        how.pop("enable_gqa", None)
    result = attention(query, key, value, attn_mask=mask, **how)
    (mine,) = apply(comm, layout, False, result)
    found: Tensor = mine
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Comm, layout: Layout, to_heads: bool, *tensors: Tensor) -> Any:
        ctx.way = comm, layout, not to_heads
        return exchange(tensors, comm, layout.lengths, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        comm, layout, to_heads = ctx.way
        return None, None, None, *exchange(grads, comm, layout.lengths, to_heads)


def exchange(tensors: Sequence[Tensor], comm: Comm, lengths: Sequence[int], to_heads: bool) -> tuple[Tensor, ...]:
    """From some of the positions for all heads to all positions for some of the heads, or back, in one all-to-all.

    tensors: [batch, heads, positions, features] each, of one dtype. lengths: positions of each rank.
    """
    join = 2 if to_heads else 1
    parts = [tensor.chunk(comm.size, 1) if to_heads else tensor.split(list(lengths), 2) for tensor in tensors]
    sent = torch.cat([part[rank].reshape(-1) for rank in range(comm.size) for part in parts])
    mine = [list(part[comm.rank].shape) for part in parts]
    shapes = [[[*shape[:2], length, shape[3]] for shape in mine] if to_heads else mine for length in lengths]
    sizes = [sum(part[rank].numel() for part in parts) for rank in range(comm.size)]
    counts = [torch.Size(shape).numel() for of_rank in shapes for shape in of_rank]
    expected = [sum(counts[at : at + len(parts)]) for at in range(0, len(counts), len(parts))]
    received = sent.new_empty(sum(expected))
    comm.all_to_all(sent, received, "context-parallel", sizes, expected).wait()
    pieces = iter(received.split(counts))
    came = [[next(pieces).view(shape) for shape in of_rank] for of_rank in shapes]
    return tuple(torch.cat(of_tensor, join) for of_tensor in zip(*came, strict=True))
