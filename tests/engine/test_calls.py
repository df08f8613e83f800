"""Python calls a parameter, which is what small parameters cost: counted, so that a busy machine does not matter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from engines import configuration, engine_for
from ranks import Ranks
from torch import Tensor, nn

PARAMETERS = 2
"""Of a layer."""


def layers(depth: int) -> nn.Sequential:
    """Small ones, and two that are sharded in stage 3."""
    torch.manual_seed(0)
    large = nn.Linear(8, 256), nn.Linear(256, 8)
    return nn.Sequential(*large, *(nn.Linear(8, 8) for _ in range(depth)))


def calls_of(step: Callable[[], None]) -> int:
    """Calls of Python functions on this thread, where backward on a CPU runs too."""
    count = 0

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    for _ in range(3):  # orders are settled, and what is found out once is
        step()
    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def plain(depth: int, x: Tensor) -> int:
    model = layers(depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return calls_of(step)


def with_engine(depth: int, stage: int, x: Tensor) -> int:
    model = layers(depth)
    zero = {"stage3_param_persistence_threshold": 1000} if stage == 3 else {}
    with engine_for(model, configuration(stage, zero=zero)) as engine:

        def step() -> None:
            engine.backward(engine(x).square().mean())
            engine.step()

        return calls_of(step)


def calls_a_parameter(rank: int, stage: int) -> float:
    """What the engine calls more than a training without it, for each parameter more."""
    x = torch.ones(2, 8)
    few, many = 32, 64
    more = with_engine(many, stage, x) - with_engine(few, stage, x) - (plain(many, x) - plain(few, x))
    return more / ((many - few) * PARAMETERS)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_takes_no_more_calls_than_without_the_engine(ranks: Ranks, stage: int) -> None:
    """torch's own clipping and step call several functions for each."""
    for calls in ranks.run(2, calls_a_parameter, stage):
        assert calls <= 0
