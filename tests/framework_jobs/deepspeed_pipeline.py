"""DeepSpeed's pipelines of two stages, 1F1B or DualPipeV, with four micro-batches a step."""

from __future__ import annotations

import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from steps import BATCH, STEPS, WIDTH, Block, use_gloo_only, write_losses

use_gloo_only()
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
layers = [Block() for _ in range(4)]
if sys.argv[1] == "DualPipeV":
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule as PipelineModule
model = PipelineModule(layers=layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
config = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
}
data = [(torch.randn(WIDTH), torch.randn(WIDTH)) for _ in range(4 * BATCH * STEPS)]
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), training_data=data, config=config
)  # fmt: skip
if sys.argv[1] == "1F1B":  # an evaluation comes first, with a schedule of its own
    engine.eval_batch(iter([(torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)) for _ in range(4)]))
losses = [float(engine.train_batch()) for _ in range(STEPS)]
write_losses(losses)
dist.destroy_process_group()
