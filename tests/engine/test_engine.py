"""The engine against a single process: configurations that change how it trains do not change what it trains."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batches, build, reference
from ranks import Ranks

from dsprof import engine as ds
from dsprof.engine import Engine

STEPS, ACCUMULATE = 3, 2


def configuration(world_size: int, stage: int = 0, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, **more.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": zero,
        **more,
    }


SMALL = {
    "reduce_bucket_size": 1000, "allgather_bucket_size": 500, "stage3_prefetch_bucket_size": 2000,
    "stage3_param_persistence_threshold": 100, "stage3_max_live_parameters": 3000, "stage3_max_reuse_distance": 1500,
}  # fmt: skip


def adamw(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def run(engine: Engine, data: torch.Tensor, rank: int) -> list[float]:
    losses = []
    for step in data:
        for microbatch in step:
            loss = engine(microbatch[rank])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def whole(engine: Engine) -> dict[str, torch.Tensor]:
    engine.zero.gatherer.bring([p for p in engine.zero.params if not p.resident], 10**9)
    return {p.name: p.param.detach().float() for p in engine.zero.params}


def train(rank: int, config: dict[str, Any], dtype: torch.dtype) -> float:
    """The largest difference to the weights of the reference."""
    world_size = dist.get_world_size()
    model = build(dtype)
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    data = batches(STEPS, ACCUMULATE, world_size)
    run(engine, data, rank)
    expected = build(dtype)
    reference(expected, adamw, data, clip=0.5)
    found = whole(engine)
    return max((found[name] - value.float()).abs().max().item() for name, value in expected.named_parameters())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("zero", [{}, SMALL], ids=["default", "small"])
def test_fp32_trains_to_the_reference(ranks: Ranks, world_size: int, stage: int, zero: dict[str, Any]) -> None:
    known = {key: value for key, value in zero.items() if stage == 3 or not key.startswith("stage3")}
    config = configuration(world_size, stage, zero=known)
    for difference in ranks.run(world_size, train, config, torch.float32):
        assert difference < 2e-5
