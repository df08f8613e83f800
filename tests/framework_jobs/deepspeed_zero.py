"""DeepSpeed's engine at a stage of ZeRO, with two micro-batches a step."""

from __future__ import annotations

import sys

import deepspeed
import torch.distributed as dist
from steps import BATCH, STEPS, make_batches, make_model, use_gloo_only, write_losses

use_gloo_only()
model = make_model()
config = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": int(sys.argv[1]), "stage3_param_persistence_threshold": 0},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
losses = []
for batch in make_batches(2 * STEPS, dist.get_rank()):
    loss = engine(batch).pow(2).mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
write_losses(losses)
dist.destroy_process_group()
