"""FSDP2: each block a unit that is computed again in backward, one of them gathered ahead. Gradients are reduced in the
second of two micro-batches."""

from __future__ import annotations

import torch
import torch.distributed as dist
from steps import STEPS, make_batches, make_model, write_losses
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = make_model()
for number, block in enumerate(model):
    model[number] = fully_shard(checkpoint_wrapper(block))
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters())
losses = []
for number, batch in enumerate(make_batches(2 * STEPS, dist.get_rank())):
    last = number % 2 == 1
    model.set_requires_gradient_sync(last)
    model[0].unshard()
    loss = model(batch).pow(2).mean()
    loss.backward()
    losses.append(loss.item())
    if last:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
write_losses(losses)
dist.destroy_process_group()
