"""Accelerate's own loop, with two micro-batches a step."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from steps import BATCH, STEPS, make_batches, make_model, write_losses
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = make_model()
optimizer = torch.optim.Adam(model.parameters())
data = TensorDataset(torch.cat(make_batches(2 * STEPS * accelerator.num_processes)))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=BATCH))
losses = []
for (batch,) in loader:
    with accelerator.accumulate(model):
        loss = model(batch).pow(2).mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
write_losses(losses)
accelerator.end_training()
