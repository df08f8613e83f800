"""Buckets of gradients on their way through a collective: the buffers they are copied into, what is under way, and
where the reduced gradients stay until the step."""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.comm import Comm
from .bucket import Bucket
from .settings import ZeroSettings


class BucketExchange:
    """Reduces buckets over one communicator."""

    def __init__(self, comm: Comm, settings: ZeroSettings) -> None:
        self._comm = comm
        self._settings = settings
        self._scatters = settings.stage >= 1 and settings.reduce_scatter
        self._free: list[Tensor] = []
        self._inflight: list[Bucket] = []

    def rows(self, bucket: Bucket) -> Tensor:
        """Where gradients are copied before they are reduced [pieces, columns]."""
        if bucket.rows is None and bucket.own is not None and not bucket.holds:
            bucket.rows = bucket.own
        if bucket.rows is None:
            pieces = bucket.params[0].cut.pieces
            bucket.buffer = self._buffer(pieces * bucket.columns, bucket)
            bucket.rows = bucket.buffer[: pieces * bucket.columns].view(pieces, bucket.columns)
        return bucket.rows

    def launch(self, bucket: Bucket) -> None:
        """Reduce a bucket whose rows are filled. On all ranks, in one order."""
        rows = self.rows(bucket)
        if self._scatters and bucket.apart:
            bucket.landing = torch.empty_like(self._reduced(bucket), device=rows.device)
            bucket.ticket = self._comm.reduce_scatter(rows, bucket.landing, "gradient", False)
        elif self._scatters:
            bucket.ticket = self._comm.reduce_scatter(rows, self._reduced(bucket), "gradient", bucket.holds)
        else:
            bucket.ticket = self._comm.all_reduce(rows, "gradient")
        self._inflight.append(bucket)
        self.drain(2 if self._settings.overlap_comm else 0)

    def drain(self, leave: int) -> None:
        """Wait for the oldest buckets until `leave` are under way: each holds a buffer."""
        while len(self._inflight) > leave:
            bucket = self._inflight.pop(0)
            assert bucket.ticket is not None
            assert bucket.rows is not None
            bucket.ticket.wait()
            arrived = self._arrived(bucket)
            if self._settings.stage == 0 and self._shares(bucket) and not bucket.holds:
                if bucket.own is None:
                    bucket.own = bucket.rows
                    bucket.reduce_into(arrived)
            else:
                if arrived is not bucket.reduced:
                    self._add(bucket, arrived)
                self._give_back(bucket.buffer)
            bucket.rows = bucket.buffer = None
            bucket.landing = None
            bucket.holds = True
            bucket.absent.clear()
            bucket.ticket = None

    def forget_buffers(self) -> None:
        """Free the buffers that are kept for the next buckets, which have other sizes."""
        self._free.clear()

    # --- inside

    def _buffer(self, size: int, bucket: Bucket) -> Tensor:
        """The smallest free buffer that holds `size` elements: on a CPU, fresh pages cost as much as the reduction."""
        fitting = [b for b in self._free if b.numel() >= size and b.dtype == bucket.dtype]
        if not fitting:
            return torch.empty(size, dtype=bucket.dtype, device=bucket.params[0].device)
        best = min(fitting, key=Tensor.numel)
        self._free = [buffer for buffer in self._free if buffer is not best]
        return best

    def _give_back(self, buffer: Tensor | None) -> None:
        if buffer is not None:
            self._free.append(buffer)

    def _reduced(self, bucket: Bucket) -> Tensor:
        """Where the bucket's reduced gradients are, from the first micro-batch of a step to the step's end: with their
        masters, which may be in host memory.
        """
        if bucket.reduced is None:
            whole = self._settings.stage == 0
            own = bucket.params[0].master.dtype if bucket.params[0].master is not None else torch.float32
            dtype = own if self._settings.accumulate_dtype is None or whole else self._settings.accumulate_dtype
            param, master = bucket.params[0].param, bucket.params[0].master
            device = param.device if master is None else master.device
            pin = param.is_cuda and device.type == "cpu"
            bucket.reduce_into(torch.empty(bucket.columns, dtype=dtype, device=device, pin_memory=pin))
        assert bucket.reduced is not None
        return bucket.reduced

    def _arrived(self, bucket: Bucket) -> Tensor:
        """What this rank got, on the device; earlier micro-batches included if it is where these are."""
        assert bucket.rows is not None
        if self._scatters:
            return self._reduced(bucket) if bucket.landing is None else bucket.landing
        return bucket.rows[0 if self._settings.stage == 0 else self._comm.rank]

    def _add(self, bucket: Bucket, arrived: Tensor) -> None:
        """Write what arrived to where the reduced gradients are, or add it. The device does the adding."""
        reduced = self._reduced(bucket)
        if bucket.apart:
            if bucket.holds:
                arrived = reduced.to(arrived.device, non_blocking=True) + arrived
            reduced.copy_(arrived.to(reduced.dtype), non_blocking=True)
        elif bucket.holds:
            reduced.add_(arrived)
        else:
            reduced.copy_(arrived)

    def _shares(self, bucket: Bucket) -> bool:
        master = bucket.params[0].master
        return master is not None and master.dtype == bucket.dtype
