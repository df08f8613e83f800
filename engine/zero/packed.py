"""Weights and gradients that travel in fewer bytes than they have: in blocks of small whole numbers, with a scale each.

ZeRO++ (Wang et al. 2023, arXiv 2306.10209): weights are gathered in int8 (qwZ), and gradients are reduced in int4
(qgZ) by an all-to-all, within machines first where there are several. Each number is off by half a step at most, and a
step is the largest of its block over 127, or over 7. What is not finite makes all of its block so, and overflow is
found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ..comm.comm import Comm
from ..comm.lane import Ticket
from ..hooks import Purpose
from .shard import ShardedParam

BLOCK: Final = 256
"""Elements that share a scale, a float32."""
_ALIGNED: Final = 4
"""Bytes of which messages have whole numbers, so that scales can be read where they are."""


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


@dataclass(frozen=True)
class Blocks:
    """Numbers of so many bits, 8 or 4."""

    bits: int

    def nbytes(self, elements: int) -> int:
        """Of so many elements, with their scales."""
        return self._nbytes(elements) + 4 * -(-elements // BLOCK)

    def encode(self, values: Tensor, into: Tensor) -> None:
        """Write `values` [..., n], of any floating dtype, to `into` [..., nbytes(n)], bytes."""
        count = values.shape[-1]
        blocks = F.pad(values.float(), (0, -count % BLOCK)).unflatten(-1, (-1, BLOCK))
        scales = torch.linalg.vector_norm(blocks, torch.inf, -1) / (2 ** (self.bits - 1) - 1)
        numbers = (blocks / scales.clamp(min=1e-38)[..., None]).round_().to(torch.int8).flatten(-2)[..., :count]
        if self.bits == 4:
            pairs = F.pad(numbers, (0, count % 2)).add_(8).view(torch.uint8).unflatten(-1, (-1, 2))
            numbers = pairs[..., 0] | pairs[..., 1] << 4
        into[..., : numbers.shape[-1]] = numbers.view(torch.uint8)
        into[..., self._nbytes(count) :].view(torch.float32).copy_(scales)

    def decode(self, rows: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """The `count` values of each row [..., count] of `rows` [..., nbytes(count)]."""
        scales = rows[..., self._nbytes(count) :].view(torch.float32)
        if self.bits == 4:
            pairs = rows[..., : -(-count // 2)]
            numbers = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).view(torch.int8).sub_(8)
        else:
            numbers = rows.view(torch.int8)
        whole = count // BLOCK * BLOCK
        found = torch.empty(*rows.shape[:-1], count, dtype=dtype, device=rows.device)
        split = (whole // BLOCK, BLOCK)
        torch.mul(
            numbers[..., :whole].unflatten(-1, split), scales[..., : split[0], None],
            out=found[..., :whole].unflatten(-1, split),
        )  # fmt: skip
        if whole < count:
            torch.mul(numbers[..., whole:count], scales[..., -1:], out=found[..., whole:])
        return found

    def _nbytes(self, elements: int) -> int:
        """Without the scales."""
        return _aligned(-(-elements * self.bits // 8))


_INT8: Final = Blocks(8)
_INT4: Final = Blocks(4)


@dataclass(frozen=True)
class Int8Shards:
    """How shards are gathered in int8: each rank's by itself, rounded anew from what it is."""

    def ready(self, param: ShardedParam) -> bool:
        return True

    def nbytes(self, elements: int) -> int:
        return _INT8.nbytes(elements)

    def pack(self, param: ShardedParam, shard: Tensor, into: Tensor) -> None:
        _INT8.encode(shard, into)

    def unpack(self, param: ShardedParam, rows: Tensor, columns: int) -> Tensor:
        return _INT8.decode(rows, columns, param.dtype)


@dataclass(frozen=True, slots=True)
class Nodes:
    """The ranks of this one's machine, and those of its place on all machines, in the order of the machines."""

    near: Comm
    far: Comm


class QuantizedReduction:
    """A reduce-scatter in int4, under way. Sums are taken in float32, in the order of the ranks, so that all runs have
    the same.

    With machines there are two all-to-alls: what is for one place on all machines is summed within a machine first, so
    that over the network there goes one row a machine, and not one a rank.
    """

    def __init__(
        self, rows: Tensor, width: int, mine: Tensor, accumulate: bool, comm: Comm, nodes: Nodes | None,
        purpose: Purpose = "gradient",
    ) -> None:  # fmt: skip
        """rows [ranks, columns]: those of all ranks; the columns from `width` on are flags, which travel as they are.
        mine [columns]: where this rank's goes, or is added. On all ranks."""
        self._width, self._mine, self._accumulate, self._purpose = width, mine, accumulate, purpose
        self._nodes = nodes
        self._ended = False
        self._flags = rows.shape[1] - width
        near = comm if nodes is None else nodes.near
        places = rows.view(-1, near.size, rows.shape[1]).transpose(0, 1)
        self._ticket, self._arrived = self._send(places[..., :width], places[..., width:], near)

    @property
    def done(self) -> bool:
        return self._ended

    def wait(self) -> None:
        """This rank's sums are in their place."""
        if self._ended:
            return
        values, flags = self._sums()
        if self._nodes is not None:
            self._ticket, self._arrived = self._send(values[:, None], flags[:, None], self._nodes.far)
            values, flags = self._sums()
        found = torch.cat([values[0], flags[0].to(values.dtype)])
        if self._accumulate:
            self._mine.add_(found)
        else:
            self._mine.copy_(found)
        self._ended = True

    def _send(self, values: Tensor, flags: Tensor, comm: Comm) -> tuple[Ticket, Tensor]:
        """Send each rank its part of `values` [ranks, rows, width] and of `flags` [ranks, rows, n]."""
        packed = _INT4.nbytes(self._width)
        sent = values.new_zeros(*values.shape[:2], packed + _aligned(flags.shape[-1]), dtype=torch.uint8)
        for part, into in zip(values, sent, strict=True):  # each by itself, as it is widened to float32 meanwhile
            _INT4.encode(part, into[..., :packed])
        sent[..., packed : packed + flags.shape[-1]] = flags != 0
        arrived = torch.empty_like(sent)
        return comm.all_to_all(sent.view(-1), arrived.view(-1), self._purpose), arrived

    def _sums(self) -> tuple[Tensor, Tensor]:
        """Over the ranks, of what each has sent: values [rows, width], and whether any has set a flag [rows, n]."""
        self._ticket.wait()
        arrived, packed = self._arrived, _INT4.nbytes(self._width)
        if arrived.is_cuda:  # which may be read on another stream than the one its memory is of
            arrived.record_stream(torch.cuda.current_stream())
        values = _INT4.decode(arrived[0, :, :packed], self._width, torch.float32)
        for rank in range(1, len(arrived)):
            values += _INT4.decode(arrived[rank, :, :packed], self._width, torch.float32)
        return values, arrived[:, :, packed : packed + self._flags].amax(0)
