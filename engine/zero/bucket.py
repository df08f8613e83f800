"""Gradients that travel together: a bucket, its way through a collective, and the memory that it uses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..comm.comm import Comm, Rows
from ..comm.lane import Ticket
from ..config import Config
from .gradients import adds_up_in, is_quantized, travels_in
from .packed import Nodes, QuantizedReduction
from .shard import ShardedParam
from .storage import BufferPool

RUN: Final = 1 << 17
"""Elements that are copied into a bucket at once, so that small gradients cost no call each: so few are still in the
processor's cache, and take no more memory than a large gradient that comes."""


@dataclass(eq=False, slots=True)
class Bucket:
    """Parameters whose gradients travel together, each in columns of its own of `rows`, of which each rank has one.

    The columns from a row's width on are flags, one for each parameter: 1 from a rank that has a gradient for it. What
    arrives says whether any had. The last column is a flag of the bucket: 1 from a rank that is left with parts of
    gradients that came after their bucket had been sent.

    Its tensors, those of BucketExchange.rows, launch and drain; the last two are kept from step to step:

    rows     [ranks, columns]   of the pool, from the first copy until it is reduced and read, or `own`; what is sent
    landing  [columns]          new, from launch to drain; what a reduce-scatter brings for masters on another device
    reduced  [columns]          new, where the masters are; or the row of `own`
    own      [1, columns]       the first `rows`: only in stage 0, with masters of the bucket's dtype
    """

    params: list[ShardedParam]
    dtype: torch.dtype
    quantized: bool = False
    numel: int = 0
    offsets: list[tuple[int, ...]] = field(default_factory=list)
    """Each parameter's first column, in each block of `rows`."""
    widths: list[int] = field(default_factory=list)
    """Columns of gradients in each block."""
    waiting: set[ShardedParam] = field(default_factory=set)
    absent: list[int] = field(default_factory=list)
    """Places of the parameters that this rank has no gradient for."""
    rows: Rows | None = None
    landing: Tensor | None = None
    reduced: Tensor | None = None
    """The reduced gradients, this rank's row: they are there from the first micro-batch of a step to its end."""
    own: Rows | None = None
    grads: list[Tensor] = field(default_factory=list)
    """Each parameter's part of `reduced`, in the shape of its master."""
    collected: list[Tensor | None] = field(default_factory=list)
    """What the masters were given as gradients at the last step."""
    holds: bool = False
    """Whether `reduced` has the sum of earlier micro-batches, to be added to."""
    ticket: Ticket | None = None
    copied: torch.cuda.Event | None = None
    """After it `reduced` is in host memory, where a GPU's gradients go there."""

    def add(self, param: ShardedParam) -> None:
        self.params.append(param)
        self.numel += param.numel
        blocks = param.partition.blocks
        ends = self.widths or [0] * len(blocks)
        self.offsets.append(tuple(ends))
        self.widths = [end + block.width for end, block in zip(ends, blocks, strict=True)]
        self.waiting.add(param)

    @property
    def width(self) -> int:
        """Columns of gradients in this rank's row."""
        return self.widths[self.params[0].place]

    @property
    def columns(self) -> int:
        """Of this rank's row."""
        return self.width + len(self.params) + 1

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Ranks and columns of the blocks of `rows`."""
        blocks, flags = self.params[0].partition.blocks, len(self.params) + 1
        return [(block.count, width + flags) for block, width in zip(blocks, self.widths, strict=True)]

    @property
    def present(self) -> list[int]:
        """Places of the parameters that this rank has a gradient for."""
        absent = set(self.absent)
        return [place for place in range(len(self.params)) if place not in absent]

    @property
    def memory(self) -> list[Tensor]:
        rows = [rows.flat for rows in (self.rows, self.own) if rows is not None]
        return rows + [tensor for tensor in (self.reduced, self.landing) if tensor is not None]

    @property
    def apart(self) -> bool:
        """Whether the masters, and with them the reduced gradients, are on another device than the parameters."""
        return self.params[0].master.device != self.params[0].device

    def reduce_into(self, reduced: Tensor) -> None:
        """From now on have the reduced gradients in `reduced` [columns]."""
        self.reduced = reduced
        self.grads = [
            reduced[offsets[param.place] :][: param.stop - param.start].view(param.master_shape)
            for param, offsets in zip(self.params, self.offsets, strict=True)
        ]

    def runs(self, places: Iterable[int]) -> Iterator[list[int]]:
        """`places` in runs of neighbours, whose gradients are copied together: small, or one large one."""
        limit = min(RUN, self.numel // 16)
        run: list[int] = []
        size = 0
        for place in sorted(places):
            if run and (place != run[-1] + 1 or size + self.params[place].numel > limit):
                yield run
                run, size = [], 0
            run.append(place)
            size += self.params[place].numel
        if run:
            yield run

    def write(self, rows: Rows, places: Sequence[int], grads: Sequence[Tensor], scale: float) -> None:
        """Write the gradients of the parameters at `places`, which are neighbours, times `scale` to `rows`."""
        whole = self.params[0].partition.num_shards == 1
        for at, block in enumerate(rows.blocks):
            columns = self._columns(at, places[0], places[-1])
            if columns.start == columns.stop:
                continue
            target = block[:, columns]
            if not whole:
                pairs = zip(places, grads, strict=True)
                parts = [self.params[place].partition.blocks[at].to_shards(grad) for place, grad in pairs]
                target.copy_(parts[0] if len(parts) == 1 else torch.cat(parts, 1))
            elif grads[0].dtype == target.dtype:  # at once, with no copy in between
                torch.cat([grad if grad.dim() == 1 else grad.reshape(-1) for grad in grads], out=target[0])
            else:  # torch.cat(out=) would turn each by itself to the other dtype: on a GPU by a kernel each
                target[0].copy_(torch._utils._flatten_dense_tensors(grads))
            if scale != 1.0:
                target.mul_(scale)

    def _columns(self, at: int, first: int, last: int) -> slice:
        """Those of the parameters at the places `first` to `last`, in block `at`."""
        return slice(self.offsets[first][at], self.offsets[last][at] + self.params[last].partition.blocks[at].width)

    def flag(self, rows: Rows, left: bool) -> None:
        """Write the flags to `rows`, and zeros for the absent gradients; `left` is the bucket's own flag."""
        for at, (block, width) in enumerate(zip(rows.blocks, self.widths, strict=True)):
            block[:, width:] = 1
            for place in self.absent:
                block[:, self._columns(at, place, place)] = 0
                block[:, width + place] = 0
            block[:, -1] = float(left)


def divide(
    order: Iterable[ShardedParam], config: Config, stages: Mapping[nn.Parameter, frozenset[int]] | None = None
) -> list[Bucket]:
    """Buckets of parameters whose gradients come in this `order`; of the same `stages`, where these are given."""
    open_buckets: dict[tuple[Any, ...], Bucket] = {}
    buckets: list[Bucket] = []
    for param in order:
        dtype = travels_in(param, config)
        quantized = is_quantized(param, config)
        key = (dtype, quantized, param.device, param.master.device, None if stages is None else stages[param.param])
        bucket = open_buckets.setdefault(key, Bucket([], dtype, quantized))
        bucket.add(param)
        if bucket.numel >= config.zero_optimization.reduce_bucket_size:
            buckets.append(open_buckets.pop(key))
    return [*buckets, *open_buckets.values()]


def await_host_copies(buckets: Iterable[Bucket]) -> None:
    """Copies of reduced gradients to host memory are over when this returns, on whatever stream they are: that of a
    backward need not be the present one."""
    for bucket in buckets:
        if bucket.copied is not None:
            bucket.copied.synchronize()
            bucket.copied = None


def read_flags(buckets: Sequence[Bucket]) -> list[list[float]]:
    """Those of each bucket, none where it holds nothing. Each reading waits for the device, so of those on one device
    there is one."""
    found: list[list[float]] = [[] for _ in buckets]
    places: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for at, bucket in enumerate(buckets):
        if bucket.reduced is not None and bucket.holds:
            places.setdefault(bucket.reduced.device, []).append((at, bucket.reduced[bucket.width :]))
    for here in places.values():
        rows = [row for _, row in here]
        read = iter(torch.cat([row.float() for row in rows]).tolist() if len(rows) > 1 else rows[0].tolist())
        for at, row in here:
            found[at] = list(islice(read, len(row)))
    return found


class BucketExchange:
    """Reduces buckets over one communicator: the buffers they are copied into, what is under way, and where the reduced
    gradients stay until the step."""

    def __init__(self, comm: Comm, config: Config, nodes: Nodes | None = None) -> None:
        """`nodes`: where there are several machines, for gradients that are quantized."""
        self._comm = comm
        self._nodes = nodes
        self._config = config
        self._settings = config.zero_optimization
        self._scatters = self._settings.stage >= 1 and self._settings.reduce_scatter
        self.buffers = BufferPool()
        self._inflight: list[Bucket] = []
        self._copies: torch.cuda.Stream | None = None
        """On a GPU whose gradients go to host memory."""

    def rows(self, bucket: Bucket) -> Rows:
        """Where gradients are copied before they are reduced."""
        if bucket.rows is None and bucket.own is not None and not bucket.holds:
            bucket.rows = bucket.own
        if bucket.rows is None:
            shapes = bucket.shapes
            size = sum(ranks * columns for ranks, columns in shapes)
            bucket.rows = Rows(self.buffers.take(size, bucket.dtype, bucket.params[0].device), shapes)
        return bucket.rows

    def launch(self, bucket: Bucket) -> None:
        """Reduce a bucket whose rows are filled. On all ranks, in one order."""
        rows = self.rows(bucket)
        if self._scatters:
            target, adds = self._reduced(bucket), bucket.holds
            if bucket.apart:
                target, adds = torch.empty_like(target, device=rows.flat.device), False
                bucket.landing = target
            if bucket.quantized:
                bucket.ticket = QuantizedReduction(rows.blocks[0], bucket.width, target, adds, self._comm, self._nodes)
            else:
                bucket.ticket = self._comm.reduce_scatter(rows, target, "gradient", adds)
        else:
            bucket.ticket = self._comm.all_reduce(rows.flat, "gradient")
        self._inflight.append(bucket)
        self.drain(2 if self._settings.overlap_comm else 0)

    def drain(self, leave: int) -> None:
        """Wait for the oldest buckets until `leave` are under way: each holds a buffer."""
        while len(self._inflight) > leave:
            bucket = self._inflight.pop(0)
            with self._beside(bucket):
                self._take(bucket)

    def abandon(self, bucket: Bucket) -> None:
        """What was copied into a bucket that has not been launched is not wanted."""
        if bucket.rows is not None and bucket.rows is not bucket.own:
            self.buffers.give(bucket.rows.flat)
        bucket.rows = None

    # --- inside

    def _take(self, bucket: Bucket) -> None:
        """Have what a bucket brings where the reduced gradients are, and give its buffer back."""
        assert bucket.ticket is not None
        assert bucket.rows is not None
        bucket.ticket.wait()
        arrived = self._arrived(bucket)
        if self._settings.stage == 0 and bucket.params[0].master.dtype == bucket.dtype and not bucket.holds:
            if bucket.own is None:
                bucket.own = bucket.rows
                bucket.reduce_into(arrived)
        else:
            if arrived is not bucket.reduced:
                self._add(bucket, arrived)
            self.buffers.give(bucket.rows.flat)
        bucket.rows = bucket.landing = None
        bucket.holds = True
        bucket.absent.clear()
        bucket.ticket = None

    def _beside(self, bucket: Bucket) -> contextlib.AbstractContextManager[object]:
        """Where gradients of a GPU go to host memory: a stream that waits for the bucket's lane alone, so that the
        computation waits for no copy. What is given back there waits for the copies (`BufferPool`)."""
        if not bucket.apart or bucket.params[0].device.type != "cuda":
            return contextlib.nullcontext()
        self._copies = self._copies or torch.cuda.Stream()
        if bucket.landing is not None:
            bucket.landing.record_stream(self._copies)
        return torch.cuda.stream(self._copies)

    def _reduced(self, bucket: Bucket) -> Tensor:
        """Where the bucket's reduced gradients are, from the first micro-batch of a step to the step's end: with their
        masters, which may be in host memory.
        """
        if bucket.reduced is None:
            first = bucket.params[0]
            master = first.master
            dtype = master.dtype if self._settings.stage == 0 else adds_up_in(first, self._config)
            pin = first.device.type == "cuda" and master.device.type == "cpu"
            bucket.reduce_into(torch.empty(bucket.columns, dtype=dtype, device=master.device, pin_memory=pin))
        assert bucket.reduced is not None
        return bucket.reduced

    def _arrived(self, bucket: Bucket) -> Tensor:
        """What this rank got, on the device; earlier micro-batches included if it is where these are."""
        assert bucket.rows is not None
        if self._scatters:
            return self._reduced(bucket) if bucket.landing is None else bucket.landing
        return bucket.rows.of(0 if self._settings.stage == 0 else self._comm.rank)

    def _add(self, bucket: Bucket, arrived: Tensor) -> None:
        """Write what arrived to where the reduced gradients are, or add it. The device does the adding."""
        reduced = self._reduced(bucket)
        if bucket.apart:
            if bucket.copied is not None:
                torch.cuda.current_stream().wait_event(bucket.copied)
            if bucket.holds:
                arrived = reduced.to(arrived.device, non_blocking=True) + arrived
            reduced.copy_(arrived.to(reduced.dtype), non_blocking=True)
            if arrived.is_cuda:
                bucket.copied = torch.cuda.Event()
                bucket.copied.record()
        elif bucket.holds:
            reduced.add_(arrived)
        else:
            reduced.copy_(arrived)
