"""DDP in buckets of one block each. Arguments: steps; milliseconds of a block in forward and backward; of a transfer;
the rank whose device is `slower` times as slow, and the rank whose host is `late` ms late in each step; how often the
host waits for the device, and how far it is ahead then."""

from __future__ import annotations

import argparse
import time

import common
import sleeping_device as device
import torch
from torch.nn.parallel import DistributedDataParallel

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=12)
arguments.add_argument("--forward-ms", type=float, default=2)
arguments.add_argument("--backward-ms", type=float, default=4)
arguments.add_argument("--transfer-ms", type=float, default=3)
arguments.add_argument("--slow-rank", type=int, default=-1)
arguments.add_argument("--slower", type=float, default=1.5)
arguments.add_argument("--late-rank", type=int, default=-1)
arguments.add_argument("--late-ms", type=float, default=10)
arguments.add_argument("--sync-every", type=int, default=4)
arguments.add_argument("--head-start-ms", type=float, default=20)
options = arguments.parse_args()

common.join()
device.set_link(options.transfer_ms * 1000, 1000)
if options.slow_rank == common.RANK:
    device.slow_down(options.slower)
model = DistributedDataParallel(
    common.model(4, 64, options.forward_ms, options.backward_ms), bucket_cap_mb=64 * 65 * 4 / (1 << 20)
)
optimizer = common.Sgd(model.parameters(), 0.01)
data = torch.ones(4, 64, device="cuda")


def step(number: int) -> torch.Tensor:
    if options.late_rank == common.RANK:
        time.sleep(options.late_ms / 1000)
    return common.plain_step(model, optimizer, data)


common.train(step, options.steps, sync_every=options.sync_every, head_start_ms=options.head_start_ms)
torch.distributed.destroy_process_group()
