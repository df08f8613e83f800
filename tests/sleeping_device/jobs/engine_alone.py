"""A backward of the engine fails on one rank when some of its gradients have been sent, and the script of that rank
takes the next batch. Tells what each step says on each rank. Argument: the stage."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import common
import torch
from torch import nn

from dsprof import engine as ds

WIDTH = 8
FAILING = 1


def fail(*_: Any) -> None:
    raise ArithmeticError("this rank cannot go on")


def train() -> str:
    """What the step raises."""
    try:
        engine.backward(engine(torch.ones(2, WIDTH, device="cuda")).square().mean())
        engine.step()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


common.join()
model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": int(sys.argv[1]), "reduce_bucket_size": WIDTH * WIDTH},
}
engine: Any = ds.initialize(model=model, config=config)[0]
said = [train()]
if common.RANK == FAILING:
    handle = model[1].register_full_backward_pre_hook(fail)
    try:
        train()
    except ArithmeticError:
        engine.zero_grad()
    handle.remove()
said += [train(), train()]
Path(f"told.{common.RANK}").write_text(json.dumps({"said": said, "log": []}))
os._exit(0)  # the device waits for what the other rank never sends
