"""Data-parallel training with one fault or two, or none: see the arguments. Lengths are in milliseconds, of each step
unless they say otherwise. The host is as far ahead of the device as it can be, but for what it is told to wait for."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from typing import Any

import common
import sleeping_device as device
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

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
options = arguments.parse_args()

common.join()
device.set_link(options.latency_ms * 1000, options.bandwidth)
if options.slow_rank == common.RANK:
    device.slow_down(options.slower)


class Loaded(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            time.sleep(options.load_ms / 1000)
            yield torch.ones(options.width)


class Launched(torch.nn.Module):
    """A block that its host takes its time to launch."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(options.launch_ms / 1000)
        result: torch.Tensor = self.block(x)
        return result


def collects(phase: str, _: dict[str, Any]) -> None:
    """In the collector, where a profiler that was there before measures it."""
    if phase == "start":
        time.sleep(options.gc_ms / 1000)


blocks = common.model(options.blocks, options.width, options.forward_ms, options.backward_ms)
if options.launch_ms:
    blocks = torch.nn.Sequential(*(Launched(block) for block in blocks))
model = DistributedDataParallel(blocks, bucket_cap_mb=options.bucket_mb)
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
