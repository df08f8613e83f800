"""DeepSpeed's engine at a stage of ZeRO: STAGE REDUCED GATHERED, the latter in elements: how many gradients it reduces,
and how many parameters it gathers ahead, at a time."""

from __future__ import annotations

import sys

import deepspeed
import torch
import torch.distributed as dist
from steps import use_gloo_only
from torch import nn

WIDTH, LAYERS, STEPS = 16, 24, 25

use_gloo_only()
torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
config = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {
        "stage": int(sys.argv[1]),
        "reduce_bucket_size": int(sys.argv[2]),
        "stage3_prefetch_bucket_size": int(sys.argv[3]),
        "stage3_param_persistence_threshold": 0,
    },
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(STEPS):
    loss = engine(torch.randn(8, WIDTH, generator=generator)).pow(2).mean()
    engine.backward(loss)
    engine.step()
dist.destroy_process_group()
