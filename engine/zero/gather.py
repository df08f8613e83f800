"""Parameters brought back to full size: all-gathers of the shards, batched, on a lane.

After the optimizer's step, `publish` brings masters to the weights, and starts the gathers of those that stay whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Protocol
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.comm import Comm, Content, Rows
from ..comm.consensus import difference, gather_objects
from ..comm.lane import Ticket
from ..config import ZeroConfig
from ..tree import batches
from .shard import Packing, ShardedParam
from .shares import Partition, equal
from .storage import BufferPool

DIRECT: Final = 1 << 22
"""Elements from which on a parameter is gathered by itself, into its own storage: that takes no buffer and no copy."""
KEPT_BUFFERS: Final = 2
"""Of those that have been read: one is being filled while the other is."""

NOTHING: Final = Content(0, ("nothing",))


class Agreement(Packing, Protocol):
    """A packing by what all ranks agree on before."""

    def takes(self, param: ShardedParam) -> bool:
        """Whether it is for this one. Asked of each sharded parameter, in order."""

    def agree(self, comm: Comm) -> None:
        """On what holds for the present weights. On all ranks."""

    def lapse(self) -> None:
        """The weights change."""


@dataclass(eq=False, slots=True)
class _Batch:
    params: list[ShardedParam]
    widths: list[list[int]]
    """Columns of each, in each block of `rows`."""
    rows: Rows
    tickets: list[Ticket]
    comm: Comm
    persistent: _Persistent | None
    direct: bool
    """`rows` is the only parameter's own storage."""
    packing: Packing | None
    """By which `rows` are bytes, as `widths` are."""


class _Copied:
    """The ticket of what was put on the present stream so far."""

    def __init__(self) -> None:
        self._end = torch.cuda.Event()
        self._end.record()

    @property
    def done(self) -> bool:
        return bool(self._end.query())

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._end)


class _Persistent:
    """Parameters that stay whole and are gathered together after every step, with what takes long to find out."""

    def __init__(self, params: list[ShardedParam], comm: Comm) -> None:
        self.params = params
        self.content = content_of(params)
        self.packed = all(
            param.store is None and param.shard.device == param.device and param.shard.numel() == param.width
            for param in params
        )
        """Whether the shards fill their columns, so that they can be copied there together."""
        self.even = [at for at, param in enumerate(params) if param.partition.even]
        self.uneven = [at for at, param in enumerate(params) if not param.partition.even]
        self.others: list[tuple[int, slice, list[Tensor]]] = []
        """Each block of ranks, those before this one and after it, and where their rows go in the even parameters."""
        evens = [params[at] for at in self.even]
        for at, blocks in enumerate(zip(*(param.partition.blocks for param in evens), strict=True)):
            whole = [block.to_shards(param.flat) for block, param in zip(blocks, evens, strict=True)]
            ranks = range(blocks[0].count)
            mine = comm.rank - blocks[0].first
            for some in (slice(mine), slice(mine + 1, None)) if mine in ranks else (slice(None),):
                if ranks[some]:
                    self.others.append((at, some, [param[some] for param in whole]))

    def write(self, rows: Rows, widths: Sequence[Sequence[int]]) -> None:
        """Write the other ranks' `rows` to the parameters, which have `widths` columns each, block by block."""
        for at, some, targets in self.others:
            columns = rows.blocks[at][some].split(widths[at], 1)
            torch._foreach_copy_(targets, columns if not self.uneven else [columns[place] for place in self.even])
        if self.uneven:
            columns_of = _columns_of(rows, widths)
            for place in self.uneven:
                self.params[place].fill(columns_of[place])


def _columns_of(rows: Rows, widths: Sequence[Sequence[int]]) -> list[tuple[Tensor, ...]]:
    """The columns of each parameter, [ranks, width] of each block."""
    blocks = (block.split(columns, 1) for block, columns in zip(rows.blocks, widths, strict=True))
    return list(zip(*blocks, strict=True))


def _batches(params: Iterable[ShardedParam], limit: int) -> list[list[ShardedParam]]:
    """Batches of one dtype, of at most `limit` elements (one parameter at least), in order."""
    return batches(params, limit, attrgetter("numel"), attrgetter("dtype"))


class Gatherer:
    """Starts gathers and finishes them. Every rank must start the same ones in the same order.

    `near`, if there is one, is a smaller group (the ranks of a node) that holds a second, complete partition of what
    has been gathered since the last step (ZeRO++, Wang et al. 2023, arXiv 2306.10209: hpZ).
    """

    def __init__(self, comm: Comm, settings: ZeroConfig, near: Comm | None = None) -> None:
        self.comm = comm
        self._settings = settings
        self._near = near
        self._inflight: dict[ShardedParam, _Batch] = {}
        self.buffers = BufferPool(KEPT_BUFFERS)
        self._copies: torch.cuda.Stream | None = None
        """On a GPU whose shards are elsewhere."""
        self.agreement: Agreement | None = None
        """Of the weights that it takes."""
        self._published: dict[tuple[ShardedParam, ...], list[_Persistent]] = {}
        mixes = not comm.separates_contents or not settings.allgather_partitions
        self.order_check = OrderCheck(comm) if settings.stage == 3 and comm.size > 1 and mixes else None
        """Where gathers of different content could mix, whether they did."""

    def under_way(self, param: ShardedParam) -> bool:
        """Whether its gather has been started and not finished."""
        return param in self._inflight

    def publish(self, params: Sequence[ShardedParam]) -> None:
        """After the optimizer stepped `params`: bring their masters to the weights, and start gathering those that stay
        whole. `drain` ends it."""
        update_shards(params)
        if self.comm.size == 1 or not self._settings.stage:
            return
        key = tuple(params)  # usually the same
        if key not in self._published:
            persistent = _batches((p for p in params if p.persistent), self._settings.allgather_bucket_size)
            self._published[key] = [_Persistent(batch, self.comm) for batch in persistent]
        for batch in self._published[key]:
            self._start(batch.params, self.comm, None, batch)
            self.drain(2 if self._settings.overlap_comm else 0)

    def begin_pass(self) -> None:
        """A way through the model begins: weights that are packed by what all ranks agree on are so from now on."""
        if self.agreement is not None:
            self.agreement.agree(self.comm)

    def start(self, params: Sequence[ShardedParam], module: str | None = None, *, exact: bool = False) -> None:
        """Start gathering those of `params` that are not under way: one collective a dtype, group and packing, and one
        each for those that are gathered directly. `exact`: as they are, not packed, and not of what was."""
        kinds: dict[tuple[torch.dtype, bool, Packing | None, ShardedParam | None], list[ShardedParam]] = {}
        for param in params:
            if param not in self._inflight:
                near = param.secondary is not None and not (exact and param.packing is not None)
                packing = None if exact or near or param.packing is None else param.packing
                packing = packing if packing is not None and packing.ready(param) else None
                alone = param if packing is None and _is_direct(param) else None
                kinds.setdefault((param.dtype, near, packing, alone), []).append(param)
        for (_, near, packing, _), batch in kinds.items():
            comm = self._near if near and self._near is not None else self.comm
            self._start(batch, comm, module, packing=packing)

    def expect(self, params: Iterable[ShardedParam]) -> None:
        """Have those of `params` that are on a disk read ahead, as far as there is room for them."""
        for param in params:
            if param.store is None or param.resident or param in self._inflight or param.secondary is not None:
                continue
            if not param.store.expect(param):
                return

    def finish(self, params: Iterable[ShardedParam]) -> None:
        """Wait for `params`, and write them, with what came along, to their own storage."""
        for param in params:
            batch = self._inflight.get(param)
            if batch is None:
                continue
            for ticket in batch.tickets:
                ticket.wait()
            self._write(batch)

    def drain(self, leave: int = 0) -> None:
        """Finish the oldest gathers until `leave` are under way: each holds a buffer."""
        under_way = dict.fromkeys(self._inflight.values())
        for batch in list(under_way)[: max(0, len(under_way) - leave)]:
            self.finish(batch.params)

    def gather(self, params: Sequence[ShardedParam], limit: int) -> None:
        """Have all of `params` whole now, as they are, by gathers of at most `limit` elements. On all ranks."""
        for batch in _batches(params, limit):
            self.finish([param for param in batch if param.packing is not None])
            self.start([param for param in batch if not (param.packing is not None and param.there)], exact=True)
            self.finish(batch)

    def _start(
        self, params: list[ShardedParam], comm: Comm, module: str | None, persistent: _Persistent | None = None,
        packing: Packing | None = None,
    ) -> None:  # fmt: skip
        near = comm is self._near
        partitions = [near_partition(param, comm) if near else param.partition for param in params]
        blocks = list(zip(*(partition.blocks for partition in partitions), strict=True))
        widths = [[block.width for block in of_ranks] for of_ranks in blocks]
        if packing is not None:
            widths = [list(map(packing.nbytes, columns)) for columns in widths]
        like, direct = params[0], packing is None and _is_direct(params[0])
        if direct:
            rows = like.storage_rows()
        else:
            shapes = [(of_ranks[0].count, sum(columns)) for of_ranks, columns in zip(blocks, widths, strict=True)]
            size = sum(ranks * columns for ranks, columns in shapes)
            rows = Rows(self.buffers.take(size, like.dtype if packing is None else torch.uint8, like.device), shapes)
        mine = rows.of(comm.rank)  # what it sends
        columns = mine.split(widths[partitions[0].place(comm.rank)])
        content = content_of(params) if persistent is None else persistent.content
        if self.order_check is not None:
            self.order_check.add(content)
        tickets: list[Ticket] = []
        with self._beside(params, rows.flat, near, tickets):
            if persistent is not None and persistent.packed:
                torch.cat([param.shard for param in params], out=mine)
            elif packing is not None:
                for param, column in zip(params, columns, strict=True):
                    if param.width:
                        packing.pack(param, _padded_shard(param), column)
            else:
                self._read_shards(params, columns, near)
            if not self._settings.allgather_partitions:
                parts = enumerate(rows.each())
                tickets += [comm.broadcast(row, source, "parameter") for source, row in parts if row.numel()]
            else:
                tickets.append(comm.all_gather(rows, "parameter", module, content))
        batch = _Batch(params, widths, rows, tickets, comm, persistent, direct, packing)
        self._inflight.update(dict.fromkeys(params, batch))

    @contextlib.contextmanager
    def _beside(
        self, params: Sequence[ShardedParam], rows: Tensor, near: bool, tickets: list[Ticket]
    ) -> Iterator[None]:
        """Where shards come to a GPU from host memory or a disk: on a stream of their own, so that the computation
        waits for no copy before it uses the parameters. `tickets` get one of the copies' end."""
        if near or not rows.is_cuda or all(param.store is None and param.shard.is_cuda for param in params):
            yield
            return
        self._copies = self._copies or torch.cuda.Stream()
        self._copies.wait_stream(torch.cuda.current_stream())  # for what was done with the buffer and the shards
        rows.record_stream(self._copies)
        with torch.cuda.stream(self._copies):
            yield
            tickets.append(_Copied())

    def _read_shards(self, params: Sequence[ShardedParam], columns: Sequence[Tensor], near: bool) -> None:
        """Copy this rank's shard of each to its columns [n]."""
        for param, column in zip(params, columns, strict=True):
            if near:
                assert param.secondary is not None
                column[: param.secondary.numel()].copy_(param.secondary, non_blocking=True)
            else:
                param.read_shard(column[: param.stop - param.start])

    def _write(self, batch: _Batch) -> None:
        for param in batch.params:
            del self._inflight[param]
        if batch.direct:
            batch.params[0].fill(None)
            self._keep_near(batch.params[0])
            return
        if batch.persistent is not None:
            batch.persistent.write(batch.rows, batch.widths)
        else:
            near, packing = batch.comm is self._near, batch.packing
            for param, columns in zip(batch.params, _columns_of(batch.rows, batch.widths), strict=True):
                partition, shards = near_partition(param, batch.comm) if near else param.partition, columns
                if packing is not None:
                    pairs = zip(columns, partition.blocks, strict=True)
                    shards = tuple(
                        packing.unpack(param, packed, block.width) if block.width else packed for packed, block in pairs
                    )
                param.fill(shards, partition)
                param.exact = packing is None and not (near and param.packing is not None)
                self._keep_near(param)
        self.buffers.give(batch.rows.flat)

    def _keep_near(self, param: ShardedParam) -> None:
        """Keep this rank's shard of the hierarchical partition, where there is one, for the next gather."""
        if self._near is not None and param.secondary is None and not param.persistent:
            start, stop = near_partition(param, self._near).bounds(self._near.rank)
            with torch.inference_mode(False):
                param.secondary = param.flat[start:stop].clone()


class OrderCheck:
    """The gathers of this rank with the others of `comm` since the last step, to be held against theirs: NCCL has no
    tags, nor have broadcasts. What mixed is found before the optimizer steps by it."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._contents: list[Content] = []

    def add(self, content: Content) -> None:
        """It is being gathered."""
        self._contents.append(content)

    def check(self, hosts: Comm) -> None:
        """Begin anew. Raises RuntimeError on all ranks of the job if ranks that share parameters gathered different
        ones. `hosts` are all of them, in host memory. On all; costs one collective of 16 bytes a rank."""
        contents, self._contents = self._contents, []
        rows = torch.zeros(hosts.size, 2, dtype=torch.int64)
        tags = ",".join([str(content.tag) for content in contents])
        first = 0 if self._comm.group is None else dist.get_global_rank(self._comm.group, 0)
        rows[hosts.rank] = torch.tensor([first, crc32(tags.encode())])
        hosts.all_gather(rows, "parameter").wait()
        found = [tuple(row) for row in rows.tolist()]
        firsts = {first for first, _ in found}
        if len(set(found)) == len(firsts):
            return
        sets = [[rank for rank, (first, _) in enumerate(found) if first == each] for each in sorted(firsts)]
        mixed = difference(gather_objects(dict(enumerate(contents)), hosts), sets)
        assert mixed is not None  # equal contents have equal digests
        wanted = mixed.listed(lambda content: ", ".join((content or NOTHING).names[:4]), ("wanted", "wanted"))
        raise RuntimeError(
            "ZeRO stage 3: the ranks ran different modules in this step, and what they gathered for each other is "
            f"mixed up, first where {wanted}. All must run the same modules in the same order: where the data decide, "
            "run the branch on all ranks (times 0 where it is not wanted), or write a lower stage. The weights are "
            "those before this step"
        )


def _padded_shard(param: ShardedParam) -> Tensor:
    """This rank's shard on the parameter's device, with zeros behind it where others' are larger."""
    if param.store is None and param.shard.device == param.device and len(param.shard) == param.width:
        return param.shard
    padded = torch.zeros(param.width, dtype=param.dtype, device=param.device)
    param.read_shard(padded[: param.stop - param.start])
    return padded


def _is_direct(param: ShardedParam) -> bool:
    return param.numel >= DIRECT and not param.persistent and param.partition.even and param.secondary is None


def update_shards(params: Iterable[ShardedParam]) -> None:
    """Masters were stepped, or loaded: bring them to this rank's shards of the weights, in the model's precision."""
    changed, written = [], []
    shards: list[Tensor] = []
    masters: list[Tensor] = []
    for param in params:
        param.secondary = None
        if not param.trainable:
            continue
        if param.persistent:
            changed.append(param.param)
        if param.master_is_shard:
            continue
        master = param.master.data.view(-1)
        if param.persistent and param.store is None and param.shard.device == master.device:
            shards.append(param.shard)
            masters.append(master)
        else:
            param.write_shard(master)
        if param.persistent:
            written.append(param)
    if shards:  # on a GPU by a few kernels, in the place of one for each of them
        torch._foreach_copy_(shards, masters)
    # As changed in place, which fused optimizers do not say: a backward of a forward from before is autograd's error.
    torch.autograd.graph.increment_version(changed)
    for param in written:
        param.published()


def content_of(params: Sequence[ShardedParam]) -> Content:
    """What a gather of `params` brings."""
    numbers = ",".join([str(param.index) for param in params])
    return Content(crc32(numbers.encode()) & 0x7FFFFFFF, tuple([param.name for param in params]))


def near_partition(param: ShardedParam, near: Comm) -> Partition:
    """How a parameter is sharded in the hierarchical partition."""
    return Partition(param.numel, equal(near.size))
