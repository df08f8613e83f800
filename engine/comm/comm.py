"""The collectives the engine uses, each on a lane and with what is reported of it.

Buffers are given as rows, one a rank: [size, n], or `Rows` of different lengths. A group of one communicates nothing.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ..hooks import Purpose
from .lane import CpuLane, Done, Lane, Ticket, Waiter, Work

# torch 2.13 renamed the first two and warns of the old names; 2.11 has only those.
_all_gather: Final[Callable[..., Any]] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Final[Callable[..., Any]] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Rows:
    """A buffer with a row for each rank. Neighbours whose rows are equally long are a block: [ranks, columns]."""

    def __init__(self, flat: Tensor, shapes: Sequence[tuple[int, int]]) -> None:
        """flat [n], of which the blocks of these `shapes`, ranks and columns, take all."""
        parts = flat.split([ranks * columns for ranks, columns in shapes]) if len(shapes) > 1 else [flat]
        self.flat = flat
        self.blocks = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def of(self, rank: int) -> Tensor:
        """The row of one rank [columns]."""
        for block in self.blocks:
            if rank < len(block):
                row: Tensor = block[rank]
                return row
            rank -= len(block)
        raise IndexError("there is no such rank")

    def each(self) -> list[Tensor]:
        """All rows, in the order of the ranks."""
        return [row for block in self.blocks for row in block]


def as_rows(buffer: Tensor | Rows) -> Rows:
    """`buffer`, [size, ...] where it is a tensor."""
    return buffer if isinstance(buffer, Rows) else Rows(buffer.view(-1), [(len(buffer), buffer.numel() // len(buffer))])


@dataclass(frozen=True, slots=True)
class Content:
    """What a communication brings, where that depends on what the model does: it has to be the same on every rank."""

    tag: int
    """A hash of it, as a message's tag: below 2^31."""
    names: tuple[str, ...]
    """Of the parameters."""


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A communication that was begun and has not ended, the oldest of its group: those behind it wait for it."""

    seq: int
    content: Content | None


class Comm:
    """One process group, and the lane its collectives run on. Every rank must call the same methods in the same order.

    Without a `group` there is one rank, and nothing is sent.
    """

    def __init__(self, group: dist.ProcessGroup | None, lane: Lane | None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self._lane = lane
        self._seq = 0
        self._begun: deque[tuple[UnderWay, Ticket]] | None = None
        self._scratch: Tensor | None = None
        # gloo's all-gather takes four times the CPU of plain sends, and its reduce-scatter is an all-reduce and a copy.
        self._direct = group is not None and dist.get_backend(group) == "gloo"

    def all_reduce(
        self,
        tensor: Tensor,
        purpose: Purpose,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        module: str | None = None,
        wait: Callable[[dist.Work, dist.ProcessGroup], None] | None = None,
    ) -> Ticket:
        """Sum `tensor` over the ranks, in place. `wait` is how to wait for that, where it is not to be simply waited
        for."""

        def reduce() -> None:
            work = dist.all_reduce(tensor, op, group=self.group, async_op=wait is not None)
            if wait is not None and work is not None and self.group is not None:
                wait(work, self.group)

        return self._submit(reduce, "all_reduce", tensor, purpose, module)

    def reduce_scatter(
        self, buffer: Tensor | Rows, mine: Tensor, purpose: Purpose, accumulate: bool, module: str | None = None
    ) -> Ticket:
        """Sum the rows of `buffer` over the ranks, in their precision, and write this rank's row to `mine` [n], or add
        it. `buffer` may be used up."""
        rows = as_rows(buffer)
        own = rows.of(self.rank)
        if self.size == 1:
            _put(own, mine, accumulate)
            return Done()

        def scatter() -> None:
            got = torch.empty_like(own) if accumulate or mine.dtype != own.dtype else mine
            if len(rows.blocks) == 1:
                _reduce_scatter(got, rows.flat, group=self.group)
            else:  # which NCCL does by a reduction to each rank, all at once
                dist.reduce_scatter(got, rows.each(), group=self.group)
            if got is not mine:
                _put(got, mine, accumulate)

        def exchange() -> None:
            got = [own if peer == self.rank else row for peer, row in enumerate(self._scratch_like(own))]
            self._exchange(rows.each(), got)
            _sum(got, mine, accumulate)

        return self._submit(exchange if self._direct else scatter, "reduce_scatter", rows.flat, purpose, module)

    def all_gather(
        self, buffer: Tensor | Rows, purpose: Purpose, module: str | None = None, content: Content | None = None
    ) -> Ticket:
        """Bring every rank's own row of `buffer` to all others.

        On gloo, ranks whose `content` differs get nothing from each other: they wait, and their rows stay apart.
        """
        rows = as_rows(buffer)
        own = rows.of(self.rank)

        def exchange() -> None:
            self._exchange([own] * self.size, rows.each(), 0 if content is None else content.tag)

        def gather() -> None:
            if len(rows.blocks) == 1:
                _all_gather(rows.flat, own, group=self.group)
            else:  # which NCCL does by a broadcast of each rank, all at once
                dist.all_gather(rows.each(), own, group=self.group)

        return self._submit(exchange if self._direct else gather, "all_gather", rows.flat, purpose, module, content)

    def all_to_all(
        self, sent: Tensor, received: Tensor, purpose: Purpose,
        sizes: Sequence[int] | None = None, expected: Sequence[int] | None = None,
    ) -> Ticket:  # fmt: skip
        """Send each rank its part of `sent` [n], and have theirs in `received` [m]: equal parts, or of so many elements
        as `sizes` and `expected` have for each rank."""

        def exchange() -> None:
            # As bytes: not every backend takes bf16.
            into, of = ([each * sent.itemsize for each in cut or ()] for cut in (expected, sizes))
            dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), into, of, group=self.group)

        return self._submit(exchange, "all_to_all", max(sent, received, key=Tensor.numel), purpose)

    def broadcast(self, tensor: Tensor, source: int, purpose: Purpose) -> Ticket:
        """Bring rank `source`'s (of this group) `tensor` to all, in place."""
        if self.group is None:
            return Done()
        origin = dist.get_global_rank(self.group, source)
        return self._submit(lambda: dist.broadcast(tensor, origin, group=self.group), "broadcast", tensor, purpose)

    def send(self, tensor: Tensor, to: int) -> None:
        """Send the rank `to` of the group a tensor, as bytes, which every backend takes, and wait for that."""
        if tensor.numel():
            flat = tensor.detach().reshape(-1).to(self.device or "cpu")
            dist.send(flat.view(torch.uint8), group=self.group, group_dst=to)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """A tensor of this shape whose elements the rank `source` sends."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device or "cpu")
        if tensor.numel():
            dist.recv(tensor.view(-1).view(torch.uint8), group=self.group, group_src=source)
        return tensor

    @property
    def device(self) -> torch.device | None:
        """Where buffers have to be; None if that is all the same."""
        if self.group is None or dist.get_backend(self.group) != "nccl":
            return None
        return torch.device("cuda", torch.cuda.current_device())

    def poll(self) -> None:
        """Report the collectives that have ended on a device since."""
        if self._lane is not None:
            self._lane.poll()

    # --- where ranks may come to wait for each other, on gloo

    @property
    def separates_contents(self) -> bool:
        """Whether gathers of different content do not mix."""
        return self._direct

    def watch(self, waiter: Waiter) -> None:
        """From now on whoever waits for this lane does it by `waiter`, and `begun` and `under_way` are known."""
        if isinstance(self._lane, CpuLane):
            self._begun = deque()
            self._lane.waiter = waiter

    @property
    def begun(self) -> int:
        """Communications that were submitted to the lane so far."""
        return self._seq

    @property
    def under_way(self) -> UnderWay | None:
        """The oldest that has not ended."""
        self._forget_ended()
        return self._begun[0][0] if self._begun else None

    def _forget_ended(self) -> None:
        while self._begun and self._begun[0][1].done:
            self._begun.popleft()

    def abort(self, error: BaseException) -> None:
        """Have everything that is under way on this lane, or comes later, fail. On all ranks."""
        if isinstance(self._lane, CpuLane):
            self._lane.abort(error)
        break_connections(self.group)

    def close(self) -> None:
        """Finish what is under way, end the lane, and destroy the group. On all ranks; again is of no effect."""
        if self._lane is not None:
            self._lane.close()
        close_group(self.group)

    def _submit(
        self,
        work: Work,
        name: str,
        payload: Tensor,
        purpose: Purpose,
        module: str | None = None,
        content: Content | None = None,
    ) -> Ticket:
        if self.group is None or self._lane is None:
            return Done()
        ticket = self._lane.submit(
            work, name, purpose=purpose, bytes=payload.numel() * payload.element_size(),
            dtype=str(payload.dtype).removeprefix("torch."), module=module, group=self.group.group_name, seq=self._seq,
        )  # fmt: skip
        if self._begun is not None:
            self._forget_ended()
            self._begun.append((UnderWay(self._seq, content), ticket))
        self._seq += 1
        return ticket

    def _exchange(self, send: list[Tensor], receive: list[Tensor], tag: int = 0) -> None:
        """Send `send[r]` to each other rank r, and get what it sends into `receive[r]`."""
        assert self.group is not None
        ahead = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        behind = [(self.rank - distance) % self.size for distance in range(1, self.size)]
        sent = [(send[to], to) for to in ahead if send[to].numel()]
        pass_on(self.group, sent, [(receive[of], of) for of in behind if receive[of].numel()], tag)

    def _scratch_like(self, row: Tensor) -> Tensor:
        """A buffer for such a row of each rank, which is kept: fresh pages cost as much as the exchange. For the lane
        alone, one job at a time."""
        size = self.size * row.numel() * row.element_size()
        if self._scratch is None or self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8, device=row.device)
        return self._scratch[:size].view(row.dtype).view(self.size, row.numel())


def pass_on(
    group: dist.ProcessGroup, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]], tag: int = 0
) -> None:
    """Send tensors to ranks of `group` and have those that others send written into `received`, and wait for all.

    gloo sends what is in host memory: a device's tensors go through it.
    """
    works, landed = [], []
    copies: dict[int, Tensor] = {}  # of what goes to several ranks, one; kept until all has been sent
    for tensor, source in received:
        into = torch.empty_like(tensor, device="cpu") if _by_host(tensor, group) else tensor
        works.append(dist.irecv(into, group=group, group_src=source, tag=tag))
        landed.append((into, tensor))
    for tensor, to in sent:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.cpu() if _by_host(tensor, group) else tensor
        works.append(dist.isend(copies[id(tensor)], group=group, group_dst=to, tag=tag))
    wait_all(works)
    for into, tensor in landed:
        if into is not tensor:
            tensor.copy_(into)


def _by_host(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    return tensor.is_cuda and dist.get_backend(group) == "gloo"


def wait_all(works: Iterable[dist.Work | None]) -> None:
    """Wait for sends and receives, to and from other ranks; only of this one's own there is no Work."""
    for work in works:
        assert work is not None
        work.wait()


def _sum(values: list[Tensor], into: Tensor, accumulate: bool) -> None:
    """Sum `values` in their own precision, the wire's, as NCCL does, and write or add it. They are used up."""
    first, *others = values
    if len(others) == 1 and first.dtype == into.dtype and not accumulate:
        torch.add(first, others[0], out=into)
        return
    for value in others:
        first.add_(value)
    _put(first, into, accumulate)


def _put(value: Tensor, into: Tensor, accumulate: bool) -> None:
    if accumulate:
        into.add_(value)
    else:
        into.copy_(value)


def _timeout() -> timedelta | None:
    """That of the job's own group: `new_group` would take the backend's default."""
    world = dist.distributed_c10d._get_default_group()
    timeouts = [world._get_backend(device).options._timeout for device in world._device_types]
    return max(timeouts, default=None)


def open_group(sets: Iterable[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup | None:
    """The group of that of the disjoint `sets` of global ranks that this process is in; None if it is alone there.

    Every rank of the job must call this with the same sets: each takes part in making all groups.
    """
    mine = None
    for ranks in sets:
        if len(ranks) > 1 and dist.is_initialized():
            group = dist.new_group(list(ranks), timeout=_timeout(), backend=backend)
            mine = group if dist.get_rank() in ranks else mine
    return mine


def close_group(group: dist.ProcessGroup | None) -> None:
    """Destroy a group of `open_group`. On all ranks; one that is gone already is passed over."""
    if group is not None and dist.is_initialized():
        with contextlib.suppress(ValueError):
            dist.destroy_process_group(group)


def break_connections(group: dist.ProcessGroup | None) -> None:
    """Have what waits for this rank in a gloo group fail; of no effect on other groups.

    gloo ends no communication by itself, but closes all connections of a rank as soon as one of its messages is late.
    So receive one that nobody sends, from each other rank, since nothing is late where a connection is closed already.
    """
    if group is None or dist.get_backend(group) != "gloo":
        return
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for distance in range(1, size):
        with contextlib.suppress(RuntimeError):  # that it is late, or that the other rank was first
            work = dist.irecv(torch.empty(1), group=group, group_src=(rank + distance) % size, tag=2**31 - 1)
            assert work is not None
            work.wait(timedelta(milliseconds=1))


def open_host_group(sets: Iterable[Sequence[int]], like: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group over the ranks of `like`, one of `sets`, that carries what is in host memory: itself, if it does."""
    if dist.get_backend(like) == "gloo":
        return like
    group = open_group(sets, "gloo")
    assert group is not None
    return group


def open_comm(sets: Iterable[Sequence[int]], make_lane: Callable[[], Lane]) -> Comm:
    """A communicator over that of the disjoint `sets` of global ranks that this process is in, with a group of its own.

    Every rank of the job must call this with the same sets.
    """
    group = open_group(sets)
    return Comm(None, None) if group is None else Comm(group, make_lane())
