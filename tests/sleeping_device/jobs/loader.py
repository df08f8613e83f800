"""One rank whose device takes 20 ms a step and whose data take `load_ms` of the host: behind the device's back, or not.
The device breaks in step `fail_at`, and the host waits for it every `sync_every` steps."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import common
import sleeping_device as device
import torch
from torch.utils.data import DataLoader, IterableDataset

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=16)
arguments.add_argument("--load-ms", type=float, default=0)
arguments.add_argument("--sync-every", type=int, default=8)
arguments.add_argument("--fail-at", type=int, default=-1)
options = arguments.parse_args()


class Slow(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            time.sleep(options.load_ms / 1000)
            yield torch.ones(64)


model = common.model(2, 64, 3, 6)
optimizer = common.Sgd(model.parameters(), 0.01)
batches = iter(DataLoader(Slow(), batch_size=1))


def step(number: int) -> torch.Tensor:
    if number == options.fail_at:
        device.fail()
    data = next(batches).pin_memory().to("cuda", non_blocking=True)
    return common.plain_step(model, optimizer, data)


common.train(step, options.steps, sync_every=options.sync_every)
