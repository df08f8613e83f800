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
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = torch.ones(4, 64, device="cuda")


def step(number: int) -> torch.Tensor:
    loss = model(data).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if number % 4 == 3:
        loss.item()
    return loss


common.train(step, 12)
torch.distributed.destroy_process_group()
