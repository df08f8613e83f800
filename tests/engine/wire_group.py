"""A process group that reduces as NCCL does, on CPUs: in the dtype that travels, of whatever is asked, by collectives
that have no tags. It stands in for NCCL where there is no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "wire"


class WireGroup(dist.ProcessGroup):
    """Over gloo, which brings what ranks have to the others and computes nothing."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return NAME

    @property
    def pg_name(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return NAME

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            tensor.copy_(self._sum(tensor))
        return _done(tensors)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        output.copy_(self._sum(source).view(self.size(), -1)[self.rank()].view(output.shape))
        return _done(output)

    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        output.copy_(torch.cat([each.view(-1) for each in self._all(source)]).view(output.shape))
        return _done(output)

    reduce_scatter_single = _reduce_scatter_base  # torch 2.13's names
    all_gather_single = _allgather_base

    def allgather(self, outputs: list[list[Tensor]], sources: list[Tensor], opts: Any = None) -> Any:
        sizes = {output.numel() for output in outputs[0]}
        if len(sizes) == 1:
            return self._gloo.allgather(outputs, sources)
        outputs[0][self.rank()].copy_(sources[0])  # of unequal ones, as NCCL does, a broadcast of each
        for rank, output in enumerate(outputs[0]):
            options = dist.BroadcastOptions()
            options.rootRank = rank
            self._gloo.broadcast([output], options).wait()
        return _done(outputs)

    def reduce_scatter(self, outputs: list[Tensor], sources: list[list[Tensor]], opts: Any = None) -> Any:
        for rank, source in enumerate(sources[0]):  # a reduction to each rank
            total = self._sum(source)
            if rank == self.rank():
                outputs[0].copy_(total)
        return _done(outputs)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._gloo.broadcast(tensors, opts)

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()

    def _all(self, tensor: Tensor) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.size())]
        self._gloo.allgather([found], [tensor.contiguous()]).wait()
        return found

    def _sum(self, tensor: Tensor) -> Tensor:
        first, *others = self._all(tensor)
        for other in others:
            first.add_(other)  # each sum is rounded to the dtype that travels
        return first


def _done(result: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


@contextlib.contextmanager
def reducing_as_nccl() -> Iterator[None]:
    """Engines that are made in this block have such groups. On all ranks."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, WireGroup, devices=["cpu"])
    new_group = dist.new_group
    with mock.patch.object(
        dist, "new_group", lambda ranks, timeout=None, backend=None: new_group(ranks, timeout=timeout, backend=NAME)
    ):
        yield
