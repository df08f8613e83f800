"""Steps of the engine on several ranks, stage by stage, while their devices are busy. Tells of each stage when its last
step began and was over for the host, and its weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import common
import sleeping_device as device
import torch
from torch import nn

from dsprof import engine as ds
from dsprof.engine.deepspeed import start
from dsprof.engine.deepspeed.fragments import safe_set_full_fp32_param

WIDTH = 8


def steps(stage: int, more: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.5,
        "zero_optimization": {
            "stage": stage, "reduce_bucket_size": WIDTH * WIDTH, "stage3_param_persistence_threshold": 0,
        } if stage else {},
        **more,
    }  # fmt: skip
    for layer in model:
        layer.register_forward_hook(lambda *_: device.kernel("layer", 50))
    engine = ds.initialize(model=model, config=config)[0]
    inputs = torch.full((2, WIDTH), 1.0 + common.RANK, device="cuda", dtype=next(model.parameters()).dtype)
    begin = went_on = 0
    for _ in range(3):
        device.kernel("head start", 100)
        begin = device.now_ns()
        engine.backward(engine(inputs).float().square().mean())  # type: ignore[operator]
        engine.step()
        went_on = device.now_ns()
    torch.cuda.synchronize()
    engine.destroy()
    weights = [param.detach().float().cpu().view(-1).tolist() for param in model.parameters()]
    return {"begin": begin, "went_on": went_on, "weights": weights}


def written() -> dict[str, Any]:
    """What becomes of a weight that is set, and then trained with a learning rate of 0: through `.data` after a step;
    between forward and step in a way that torch counts, by the engine, and through `.data`."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "bf16": {"enabled": True, "check_grad_overflow": False},
    }
    engine: Any = start.initialize(model=model, config=config)[0]
    inputs = torch.ones(2, WIDTH, device="cuda", dtype=torch.bfloat16)
    told: dict[str, Any] = {}
    for number in range(5):
        if number == 0:
            model.weight.data.fill_(5.0)
        engine.backward(engine(inputs).float().mean())
        if number == 1:
            with torch.no_grad():
                model.weight.fill_(6.0)
        if number == 2:
            safe_set_full_fp32_param(model.weight, torch.full_like(model.weight, 7.0, dtype=torch.float32))
        if number == 3:
            model.weight.data.fill_(8.0)
        try:
            engine.step()
        except RuntimeError as error:
            told["after a forward"] = str(error)
        told[str(number)] = model.weight.detach().float().mean().item()
    engine.destroy()
    return told


common.join()
told = {name: steps(stage, more) for name, stage, more in json.loads(sys.argv[1])}
told["written"] = written()
Path(f"told.{common.RANK}").write_text(json.dumps({**told, "log": device.log()}))
torch.distributed.destroy_process_group()
