"""torch's tensor parallelism: columns and rows of each block, over all ranks."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from steps import STEPS, make_batches, make_model, write_losses
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
model = make_model()
for block in model:
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
optimizer = torch.optim.Adam(model.parameters())
losses = []
for batch in make_batches(STEPS):
    loss = model(batch).pow(2).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
write_losses(losses)
dist.destroy_process_group()
