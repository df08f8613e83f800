"""dsprof's engine trains on two ranks: its phases are its own spans, and their devices lie behind their hosts.
Arguments: the stage; a policy of activation checkpointing."""

from __future__ import annotations

import sys

import common
import torch
from torch import nn

from dsprof.engine import initialize

common.join()
model = common.model(forward_ms=2, backward_ms=4)
if len(sys.argv) > 2:  # what is computed again ends with the last result that backward needs, so one follows the block
    model = nn.Sequential(*(nn.Sequential(block, nn.Linear(64, 64).to("cuda")) for block in model))
engine = initialize(
    model=model,
    optimizer=common.Sgd(model.parameters(), lr=0.01),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": int(sys.argv[1])},
        "zero_allow_untested_optimizer": True,
        **({"activation_checkpointing": {"policy": sys.argv[2]}} if len(sys.argv) > 2 else {}),
    },
)[0]
data = torch.ones(4, 64, device="cuda", requires_grad=True)


def step(number: int) -> torch.Tensor:
    with common.phase("forward"):
        output = engine(data)
    loss: torch.Tensor = output.square().mean()
    with common.phase("backward"):
        engine.backward(loss)
    with common.phase("optimizer"):
        engine.step()
    return loss


common.train(step, 12, head_start_ms=60)
