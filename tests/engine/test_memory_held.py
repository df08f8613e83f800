"""What the engine says that its memory is for, as the collectors count it."""

from __future__ import annotations

import gc
from typing import Any

import torch
from ranks import Ranks
from torch import nn

from dsprof import engine as ds
from dsprof.collectors.memory.live_tensors import LiveTensors

ROWS, COLUMNS = 400, 100
WHOLE, PIECE = 4 * ROWS * COLUMNS, 2 * ROWS * COLUMNS
"""Bytes of the layer in fp32, and of what each of two ranks has of it."""
FLAGS = 2
"""Of a row of a bucket: of its one parameter, and of the bucket."""
STEP = 4
"""Adam's count of steps."""


def trained(rank: int, config: dict[str, Any]) -> dict[str, int]:
    """What the memory of a rank is for when its only layer has been trained for three steps by Adam."""
    gc.collect()
    before = LiveTensors().measure()  # engines of earlier jobs that somebody keeps
    model = nn.Linear(COLUMNS, ROWS, bias=False)
    live = LiveTensors()
    live.modules.add(model)
    adam = {"type": "Adam", "params": {"lr": 0.1}}
    whole = {"train_micro_batch_size_per_gpu": 2, "optimizer": adam, **config}
    engine = ds.initialize(model=model, model_parameters=model.parameters(), config=whole)[0]
    live.optimizers.add(engine.optimizer)
    dtype = next(model.parameters()).dtype
    for step in range(3):
        engine.backward(engine(torch.full((2, COLUMNS), 0.1 * step, dtype=dtype)).float().square().mean())
        engine.step()
    found = live.measure()
    assert live.gradients() == {where: size for where, size in found.items() if where[1] == "gradients"}
    engine.destroy()
    return {where[1]: size - before.get(where, 0) for where, size in found.items()}


def test_without_sharding_nothing_is_counted_twice(ranks: Ranks) -> None:
    config = {"zero_optimization": {"stage": 0}}
    expected = {"parameters": WHOLE, "gradients": WHOLE + 4 * FLAGS, "optimizer_states": 2 * WHOLE + STEP}
    assert ranks.run(2, trained, config) == [expected, expected]


def test_of_stage_3_the_pieces_and_the_buffers_count_as_what_they_hold(ranks: Ranks) -> None:
    """Beside its pieces a rank keeps a buffer to gather into, and one to reduce from. The parameter is one number."""
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    expected = {
        "parameters": PIECE + WHOLE + 4,
        "gradients": PIECE + 4 * FLAGS + WHOLE + 2 * 4 * FLAGS,
        "optimizer_states": 2 * PIECE + STEP,
    }
    assert ranks.run(2, trained, config) == [expected, expected]


def test_masters_of_a_wider_format_are_the_optimizers(ranks: Ranks) -> None:
    """Half as wide are the pieces of the parameters, what is gathered, and what is reduced from."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    expected = {
        "parameters": PIECE // 2 + WHOLE // 2 + 2,
        "gradients": PIECE + 4 * FLAGS + WHOLE // 2 + 2 * 2 * FLAGS,
        "optimizer_states": 3 * PIECE + STEP,
    }
    assert ranks.run(2, trained, {"zero_optimization": zero, "bf16": {"enabled": True}}) == [expected, expected]
