"""FSDP2, a unit a block."""

from __future__ import annotations

import common
import sleeping_device as device
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

common.join()
device.set_link(2000, 1000)
mesh = init_device_mesh("cuda", (common.WORLD,))
model = common.model(4, 64, 3, 6)
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = common.Sgd(model.parameters(), 0.01)
data = torch.ones(4, 64, device="cuda")


common.train(lambda _: common.plain_step(model, optimizer, data), 12, head_start_ms=20)
torch.distributed.destroy_process_group()
