"""Training with one fault or two, or none, in data parallel, with layers that ranks share, or with sharded parameters:
see the arguments. Lengths are in milliseconds, of each step unless they say otherwise. The host is as far ahead of the
device as it can be, but for what it is told to wait for."""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import common
import sleeping_device as device
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=26)
arguments.add_argument("--blocks", type=int, default=4)
arguments.add_argument("--width", type=int, default=64, help="of a block: its gradient is 4 * width ** 2 bytes")
arguments.add_argument("--forward-ms", type=float, default=20, help="of a block")
arguments.add_argument("--backward-ms", type=float, default=40, help="of a block")
arguments.add_argument("--bucket-mb", type=float, default=1)
arguments.add_argument("--latency-ms", type=float, default=4, help="of a transfer")
arguments.add_argument("--bandwidth", type=float, default=1000, help="GB/s")
arguments.add_argument("--slow-rank", type=int, default=-1)
arguments.add_argument("--slower", type=float, default=1.5, help="its device takes so many times as long")
arguments.add_argument("--late-rank", type=int, default=-1)
arguments.add_argument("--late-ms", type=float, default=0, help="its host does nothing for so long")
arguments.add_argument("--load-ms", type=float, default=0, help="its data take the host so long")
arguments.add_argument("--gc-ms", type=float, default=0, help="a collection of garbage takes so long")
arguments.add_argument("--gc-every", type=int, default=3, help="steps")
arguments.add_argument("--launch-ms", type=float, default=0, help="the host takes so long to launch a block")
arguments.add_argument("--item-every", type=int, default=10, help="steps: the host asks for the loss")
arguments.add_argument("--share", type=int, default=1, help="so many ranks share each layer, and reduce what it makes")
arguments.add_argument("--shard", action="store_true", help="FSDP2, a unit a block")
arguments.add_argument("--together", type=int, default=1, help="blocks in a unit")
arguments.add_argument("--ahead", type=int, default=0, help="units that are gathered ahead by request")
arguments.add_argument("--large-every", type=int, default=0, help="one of so many blocks has many parameters")
arguments.add_argument("--large-mb", type=float, default=4, help="MiB of them")
options = arguments.parse_args()

common.join()
device.set_link(options.latency_ms * 1000, options.bandwidth)
if options.slow_rank == common.RANK:
    device.slow_down(options.slower)


class Loaded(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(options.load_ms / 1000)
        return torch.ones(options.width)


class Launched(nn.Module):
    """A block that its host takes its time to launch."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(options.launch_ms / 1000)
        result: torch.Tensor = self.block(x)
        return result


class Reduced(torch.autograd.Function):
    """What a layer makes, reduced over the ranks that share it, and its gradient, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        result = x.clone()
        torch.distributed.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        result = gradient.clone()
        torch.distributed.all_reduce(result, group=ctx.group)
        return result, None


class Shared(nn.Module):
    """A block that several ranks share."""

    def __init__(self, block: nn.Module, group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self.block, self.group = block, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Reduced.apply(self.block(x), self.group)
        return result


class Large(nn.Module):
    """A block with so many parameters that are gathered with it."""

    def __init__(self, block: nn.Module, mib: float) -> None:
        super().__init__()
        self.block = block
        self.table = nn.Parameter(torch.zeros(int(mib * (1 << 18)), device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.block(x) + self.table[:1]
        return result


def sharded(blocks: list[nn.Module]) -> nn.Module:
    """FSDP2 in units of neighbours, each of which asks for the units ahead of it."""
    mesh = init_device_mesh("cuda", (common.WORLD,))
    together = options.together
    units = [nn.Sequential(*blocks[begin : begin + together]) for begin in range(0, len(blocks), together)]
    for unit in units:
        fully_shard(unit, mesh=mesh)
    model = nn.Sequential(*units)
    fully_shard(model, mesh=mesh)
    if options.ahead:
        for place, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + options.ahead])  # type: ignore[operator]
            before = units[max(place - options.ahead, 0) : place]
            unit.set_modules_to_backward_prefetch(before[::-1])  # type: ignore[operator]
    return model


def collects(phase: str, _: dict[str, Any]) -> None:
    """In the collector, where a profiler that was there before measures it."""
    if phase == "start":
        time.sleep(options.gc_ms / 1000)


blocks: list[nn.Module] = list(common.model(options.blocks, options.width, options.forward_ms, options.backward_ms))
if options.launch_ms:
    blocks = [Launched(block) for block in blocks]
if options.large_every:
    large = range(options.large_every - 1, len(blocks), options.large_every)
    blocks = [Large(block, options.large_mb) if place in large else block for place, block in enumerate(blocks)]
replicas = None
if options.share > 1:
    mesh = init_device_mesh("cuda", (common.WORLD // options.share, options.share), mesh_dim_names=("dp", "tp"))
    blocks = [Shared(block, mesh["tp"].get_group()) for block in blocks]
    replicas = mesh["dp"].get_group()
if options.shard:
    model = sharded(blocks)
else:
    model = DistributedDataParallel(nn.Sequential(*blocks), bucket_cap_mb=options.bucket_mb, process_group=replicas)
optimizer = common.Sgd(model.parameters(), 0.01)
batches = iter(DataLoader(Loaded(), batch_size=1))
gc.disable()
if options.gc_ms:
    gc.callbacks.append(collects)


def step(number: int) -> torch.Tensor:
    data = next(batches).to("cuda", non_blocking=True)
    if options.late_rank == common.RANK:
        time.sleep(options.late_ms / 1000)
    if options.gc_ms and number % options.gc_every == 0:
        gc.collect()
    return common.plain_step(model, optimizer, data)


common.train(step, options.steps, sync_every=options.item_every)
torch.distributed.destroy_process_group()
