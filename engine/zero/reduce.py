"""Gradients on their way from backward to the optimizer: batched into buckets, reduced on a lane.

The buckets' composition and order are fixed before a backward begins and the same on all ranks, so ranks whose graphs
differ (a branch not taken, an unused parameter) still run the same collectives. They follow the order in which
gradients became ready in the first step, as rank 0 saw it (Li et al. 2020, arXiv 2006.15704, section 3.2.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..comm.comm import Comm
from .bucket import Bucket
from .placeholder import plainly
from .settings import ZeroSettings
from .shard import ShardedParam


class Reducer:
    """Takes gradients as backward makes them; `collect` puts the reduced ones on the masters."""

    def __init__(self, params: Sequence[ShardedParam], comm: Comm, settings: ZeroSettings) -> None:
        self._params = list(params)
        self._comm = comm
        self._settings = settings
        self._free: list[Tensor] = []
        self._inflight: list[Bucket] = []
        self._used: set[ShardedParam] = set()
        self._late: list[ShardedParam] = []
        self.local = comm.size == 1
        """Leave gradients as this rank has them: it is alone, or the optimizer communicates (stage 0 only)."""
        self._ever_used: set[ShardedParam] = set()
        self._next = 0
        self._order: list[ShardedParam] | None = []
        """In which gradients become ready, until it is settled."""
        self.before, self._after = self._scales()
        self._plan(list(reversed(self._params)))

    @property
    def after(self) -> float:
        """What the collected gradients remain to be multiplied by, for the mean over the ranks."""
        return 1.0 if self.local else self._after

    # --- during backward

    def ready(self, param: ShardedParam, last: bool) -> None:
        """`param.param.grad` is complete for this backward. `last` says that it is of the step's last micro-batch."""
        if self.local:
            self._keep(param)
            return
        whole = self._settings.stage <= 1
        if whole and not last:
            self._keep(param)
            return
        bucket, slot = self._slots[param]
        if param not in bucket.waiting:
            # A second backward within the first (reentrant checkpointing) has brought another part of it.
            self._late.append(param)
            return
        if self._order is not None:
            self._order.append(param)
        bucket.waiting.discard(param)
        self._used.add(param)
        if self._settings.contiguous_gradients:
            self._copy_in(bucket, slot, param)
        self._launch_complete()

    def finish(self, last: bool) -> None:
        """Backward is over: reduce what has not been yet, and wait for all of it.

        Raises RuntimeError if parameters got no gradient and the configuration says that this is an error.
        """
        if self.local and last:
            self._refuse(p for p in self._params if p.param.grad is None and p not in self._kept)
        if self.local or (self._settings.stage <= 1 and not last):
            return
        for bucket in self._buckets[self._next :]:
            for param in [p for p in bucket.params if p in bucket.waiting]:
                if param.param.grad is not None or param in self._kept:
                    self.ready(param, last)  # it has one from an earlier micro-batch
                else:
                    bucket.waiting.discard(param)
                    bucket.absent.append(param)
        self._refuse(param for bucket in self._buckets for param in bucket.absent)
        self._launch_complete()
        self._drain(0)
        if self._late:
            late, self._late = self._late, []
            self._reduce_again(late)
        self._next = 0
        for bucket in self._buckets:
            bucket.waiting = set(bucket.params)

    def _refuse(self, absent: Iterable[ShardedParam]) -> None:
        if not self._settings.ignore_unused_parameters and (found := list(absent)):
            raise RuntimeError(
                f"{len(found)} parameters got no gradient in this backward, the first: {found[0].name}. Every "
                "parameter must contribute to the loss, or be frozen; or set "
                "zero_optimization.ignore_unused_parameters to true"
            )

    def peek(self, param: ShardedParam) -> Tensor | None:
        """This rank's piece [n] of a gradient that has been reduced, in its own memory, and before `after`; None where
        there is none. With one rank, or where the optimizer communicates, it is what this rank has [numel]."""
        if self.local:
            grad = self._kept.get(param, param.param.grad)
            return None if grad is None else grad.view(-1)
        if param not in self._slots or param not in self._used:
            return None
        bucket, slot = self._slots[param]
        if not bucket.holds or bucket.reduced is None:
            return None
        offset = bucket.offsets[slot]
        return bucket.reduced[offset : offset + param.stop - param.start]

    # --- at the step

    def collect(self) -> None:
        """Put what has been reduced on the masters' `grad`: None for a parameter that no rank used."""
        if self.local:
            for param in self._params:
                self._collect_local(param)
            return
        if any(bucket.apart and bucket.params[0].device.type == "cuda" for bucket in self._buckets):
            torch.cuda.current_stream().synchronize()  # copies to host memory are over
        for bucket in self._buckets:
            if not bucket.holds or bucket.reduced is None:
                continue
            for param, offset in zip(bucket.params, bucket.offsets, strict=True):
                master = param.master
                if master is None or param not in self._used:
                    continue
                grad = bucket.reduced[offset : offset + param.stop - param.start]
                master.grad = grad.view(master.shape).to(master.dtype)

    def clear(self) -> None:
        """Forget the gradients there are."""
        with plainly():
            for param in self._params:
                param.param.grad = None
                if param.master is not None:
                    param.master.grad = None
        self._kept.clear()
        self._ever_used |= self._used
        self._used.clear()
        for bucket in self._buckets:
            bucket.holds = False
            if bucket.lent is not None:
                self._give_back(bucket.lent)
                bucket.reduced = bucket.lent = None
        if self._order is not None:
            self._order = []

    def settle(self) -> None:
        """A step's gradients have all come: the order in which they did is that of all later buckets, as rank 0 saw it.

        Once; what was not used comes last. On all ranks, before `clear`.
        """
        if self._order is None or self.local or not self._params:
            return
        seen = dict.fromkeys(self._order)
        order = [*seen, *(p for bucket in self._buckets for p in bucket.params if p not in seen)]
        places = {param: place for place, param in enumerate(self._params)}
        agreed = torch.tensor([places[p] for p in order], dtype=torch.int64, device=self._params[0].device)
        self._comm.broadcast(agreed, 0, "other").wait()
        self._order = None
        self._plan(self._params[place] for place in agreed.tolist())

    @property
    def order(self) -> list[str] | None:
        """Names of the parameters as their gradients are bucketed; None while that is not settled.

        From three ranks on, the rounding of a sum may depend on where in a bucket an element lies.
        """
        if self._order is not None:
            return None
        return [param.name for bucket in self._buckets for param in bucket.params]

    def restart(self, order: Sequence[str]) -> None:
        """Go on with buckets in this `order`, if it is one of the same parameters. Between steps; every rank alike."""
        params = {param.name: param for param in self._params}
        if set(order) == set(params):
            self._order = None
            self._plan(params[name] for name in order)

    def keep_local(self, local: bool) -> None:
        """From now on leave gradients as this rank has them, for an optimizer that communicates (stage 0)."""
        self.local = local or self._comm.size == 1

    # --- inside

    def _scales(self) -> tuple[float, float]:
        """What gradients are multiplied by before the sum over ranks, and what remains after it for the mean.

        The first costs nothing, while copying into the bucket; the second is left to the step, with the other scaling.
        Dividing by a power of two commutes with a sum in fp32, so it is done before.
        """
        size, factor = self._comm.size, self._settings.gradient_predivide_factor
        wide = all((self._settings.communication_dtype or p.dtype).itemsize >= 4 for p in self._params)
        exact = size & (size - 1) == 0 and wide and factor == 1.0
        return (1.0 / size, 1.0) if self._settings.prescale_gradients or exact else (1.0 / factor, factor / size)

    def _plan(self, order: Iterable[ShardedParam]) -> None:
        open_buckets: dict[tuple[torch.dtype, torch.device, torch.device | None], Bucket] = {}
        self._buckets: list[Bucket] = []
        for param in order:
            owner = None if param.master is None else param.master.device
            key = (self._settings.communication_dtype or param.dtype, param.device, owner)
            bucket = open_buckets.setdefault(key, Bucket([], key[0]))
            bucket.params.append(param)
            bucket.numel += param.numel
            if bucket.numel >= self._settings.reduce_bucket_size:
                self._buckets.append(open_buckets.pop(key))
        self._buckets += open_buckets.values()
        for bucket in self._buckets:
            bucket.seal()
        self._slots = {p: (bucket, slot) for bucket in self._buckets for slot, p in enumerate(bucket.params)}
        self._next = 0
        """The first bucket that has not been sent in this backward."""
        self._kept: dict[ShardedParam, Tensor] = {}
        self._free.clear()

    def _keep(self, param: ShardedParam) -> None:
        """Sum micro-batches in another precision than the gradients', where that is asked for."""
        dtype, grad = self._settings.accumulate_dtype, param.param.grad
        if dtype is None or grad is None or dtype == grad.dtype:
            return
        if param in self._kept:
            self._kept[param].add_(grad)
        else:
            self._kept[param] = grad.to(dtype)
        param.param.grad = None

    def _take(self, param: ShardedParam) -> Tensor:
        """The gradient [numel], the sum of all micro-batches where they are summed here; the parameter's is freed."""
        self._keep(param)
        grad = self._kept.pop(param, None)
        if grad is None:
            grad = param.param.grad
        param.param.grad = None
        assert grad is not None
        return grad.reshape(-1)

    def _copy_in(self, bucket: Bucket, slot: int, param: ShardedParam) -> None:
        rows = self._rows(bucket)
        offset = bucket.offsets[slot]
        param.cut.into_rows(self._take(param), rows[:, offset : offset + param.cut.chunk], self.before)
        rows[:, bucket.width + slot] = 1

    def _rows(self, bucket: Bucket) -> Tensor:
        if bucket.rows is None:
            pieces, columns = bucket.params[0].cut.pieces, bucket.width + len(bucket.params)
            bucket.buffer = self._buffer(pieces * columns, bucket)
            bucket.rows = bucket.buffer[: pieces * columns].view(pieces, columns)
        return bucket.rows

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

    def _launch_complete(self) -> None:
        """Start every bucket that is complete, in order: a complete one waits for those before it."""
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._launch(self._buckets[self._next])
            self._next += 1

    def _launch(self, bucket: Bucket) -> None:
        if not self._settings.contiguous_gradients:
            for slot, param in enumerate(bucket.params):
                if param not in bucket.absent:
                    self._copy_in(bucket, slot, param)
        rows = self._rows(bucket)
        for param in bucket.absent:
            slot = bucket.params.index(param)
            rows[:, bucket.offsets[slot] : bucket.offsets[slot] + param.cut.chunk] = 0
            rows[:, bucket.width + slot] = 0
        if self._scatters and bucket.apart:
            bucket.landing = torch.empty_like(self._reduced(bucket), device=rows.device)
            bucket.ticket = self._comm.reduce_scatter(rows, bucket.landing, "gradient", False)
        elif self._scatters:
            bucket.ticket = self._comm.reduce_scatter(rows, self._reduced(bucket), "gradient", bucket.holds)
        else:
            bucket.ticket = self._comm.all_reduce(rows, "gradient")
        self._inflight.append(bucket)
        self._drain(2 if self._settings.overlap_comm else 0)

    @property
    def _scatters(self) -> bool:
        return self._settings.stage >= 1 and self._settings.reduce_scatter

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
            size = bucket.width + len(bucket.params)
            pin = param.is_cuda and device.type == "cpu"
            bucket.reduced = torch.empty(size, dtype=dtype, device=device, pin_memory=pin)
        return bucket.reduced

    def _drain(self, leave: int) -> None:
        """Wait for the oldest buckets until `leave` are under way: each holds a buffer."""
        while len(self._inflight) > leave:
            bucket = self._inflight.pop(0)
            assert bucket.ticket is not None
            assert bucket.rows is not None
            bucket.ticket.wait()
            arrived = self._arrived(bucket)
            for param in bucket.absent:
                if arrived[bucket.width + bucket.params.index(param)] != 0:
                    self._used.add(param)
            if self._settings.stage == 0 and self._shares(bucket) and not bucket.holds:
                bucket.reduced, bucket.lent = arrived, bucket.buffer
            else:
                if arrived is not bucket.reduced:
                    self._add(bucket, arrived)
                self._give_back(bucket.buffer)
            bucket.rows = bucket.buffer = None
            bucket.landing = None
            bucket.holds = True
            bucket.absent.clear()
            bucket.ticket = None

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

    def _reduce_again(self, late: list[ShardedParam]) -> None:
        """Add the parts that came after their bucket had been sent."""
        for param in dict.fromkeys(late):
            part = self._take(param)
            bucket, slot = self._slots[param]
            again = Bucket([param], bucket.dtype)
            again.seal()
            again.waiting.clear()
            rows = self._rows(again)
            param.cut.into_rows(part, rows[:, : param.cut.chunk], self.before)
            rows[:, param.cut.chunk] = 1
            start = bucket.offsets[slot]
            assert bucket.reduced is not None
            mine = bucket.reduced[start : start + param.cut.chunk]
            if self._scatters:
                into = torch.empty_like(bucket.reduced[: param.cut.chunk + 1], device=rows.device)
                self._comm.reduce_scatter(rows, into, "gradient", False).wait()
                mine.add_(into[:-1].to(mine.device))
            else:
                self._comm.all_reduce(rows, "gradient").wait()
                mine.add_(rows[0 if self._settings.stage == 0 else self._comm.rank, :-1].to(mine.device))

    def _collect_local(self, param: ShardedParam) -> None:
        master, grad = param.master, param.param.grad
        kept = self._kept.pop(param, None)
        if kept is not None:
            grad = kept if grad is None else kept.add_(grad)
        if master is None:
            return
        if grad is None:
            # Ranks that compress momenta together must all bring one, if any has ever had a gradient.
            if self._comm.size > 1 and param in self._ever_used:
                master.grad = torch.zeros_like(master)
            return
        param.param.grad = None
        master.grad = grad.to(master.device).to(master.dtype).view(master.shape)
