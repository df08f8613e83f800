"""FSDP, the first: each block a unit."""

from __future__ import annotations

import torch
import torch.distributed as dist
from steps import STEPS, Block, make_batches, make_model, write_losses
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

dist.init_process_group("gloo")
model = FullyShardedDataParallel(
    make_model(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters())
losses = []
for batch in make_batches(STEPS, dist.get_rank()):
    loss = model(batch).pow(2).mean()
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
write_losses(losses)
dist.destroy_process_group()
