"""Ring attention (Liu et al. 2023, arXiv 2310.01889): each rank keeps its queries, and keys and values go round the
ranks, one step ahead of the computation.

Under a causal mask a rank computes nothing with what comes behind its own positions. Of contiguous pieces the last rank
then has most to do; in zigzag, two pieces for each rank, one from the front and one from the back, all have as much
(Zhu 2024, ring-flash-attention).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..comm.comm import Comm
from ..comm.lane import Done, Ticket
from . import blocks
from .layout import Layout

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
                found, its = blocks.forward(query[:, :, rows], keys, values, up_to, scale)
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
                found = blocks.backward(
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
