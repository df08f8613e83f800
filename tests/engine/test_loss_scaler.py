"""Loss scaling, against courses worked out by hand."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch

from dsprof.engine.optim.loss_scaler import (
    DynamicLossScaler,
    LossScaler,
    cast_floating,
    loss_scaler,
    model_dtype,
    overflowed,
)


@dataclass
class Section:
    enabled: bool = True
    loss_scale: float = 0
    initial_scale_power: int = 4
    loss_scale_window: int = 2
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1


def course(scaler: LossScaler, overflows: str) -> list[float]:
    """The scale after each step; `x` marks an overflow."""
    scales = []
    for step in overflows:
        scaler.update(step == "x")
        scales.append(scaler.scale)
    return scales


def test_an_overflow_halves_and_a_window_doubles() -> None:
    scaler = DynamicLossScaler(Section())
    # The first doubling takes one step more than the window, counted from the beginning or an overflow.
    assert course(scaler, "...x.....") == [16, 16, 32, 16, 16, 16, 32, 32, 64]


def test_hysteresis_forgives_overflows_until_the_scale_is_doubled() -> None:
    scaler = DynamicLossScaler(Section(hysteresis=3))
    assert course(scaler, "x.x.x...xxx") == [16, 16, 16, 16, 8, 8, 8, 16, 16, 16, 8]


def test_consecutive_hysteresis_forgives_overflows_at_each_good_step() -> None:
    scaler = DynamicLossScaler(Section(loss_scale_window=9, hysteresis=2, consecutive_hysteresis=True))
    assert course(scaler, "x.x.xx") == [16, 16, 16, 16, 16, 8]


def test_the_minimum_is_reached_and_then_an_error() -> None:
    scaler = DynamicLossScaler(Section(initial_scale_power=2, min_loss_scale=3))
    assert course(scaler, "x") == [3]
    with pytest.raises(RuntimeError, match=r"already at its minimum, 3 \(iteration 1\).*gradient_clipping"):
        scaler.update(True)


def test_a_resumed_scaler_goes_on_as_if_never_stopped() -> None:
    steps = "x..x..x....x..x."
    section = Section(initial_scale_power=8, loss_scale_window=3, hysteresis=2)
    whole = course(DynamicLossScaler(section), steps)
    first, second = DynamicLossScaler(section), DynamicLossScaler(section)
    course(first, steps[:5])
    second.load_state_dict(first.state_dict())
    assert course(second, steps[5:]) == whole[5:]
    assert len(set(whole)) > 2


def test_scaler_of_a_section() -> None:
    dynamic = loss_scaler(Section())
    assert (dynamic.dynamic, dynamic.scale) == (True, 16)
    assert course(dynamic, "...x") == [16, 16, 32, 16]
    fixed = loss_scaler(Section(loss_scale=128))
    assert (fixed.dynamic, course(fixed, "x.x")) == (False, [128, 128, 128])
    assert loss_scaler(Section(enabled=False)).scale == 1


def test_model_dtype() -> None:
    assert model_dtype(fp16=True, bf16=False) is torch.float16
    assert model_dtype(fp16=False, bf16=True) is torch.bfloat16
    assert model_dtype(fp16=False, bf16=False) is None


def test_overflowed() -> None:
    assert [overflowed(norm) for norm in (1e30, float("inf"), float("nan"))] == [False, True, True]


def test_cast_floating_reaches_into_containers() -> None:
    pair = namedtuple("pair", "left right")
    inputs = pair([torch.ones(1), "text"], {"ids": torch.ones(1, dtype=torch.long), "x": (torch.ones(1).double(),)})
    cast = cast_floating(inputs, torch.float16)
    assert isinstance(cast, pair)
    assert cast.left[0].dtype is torch.float16
    assert cast.left[1] == "text"
    assert cast.right["ids"].dtype is torch.long
    assert cast.right["x"][0].dtype is torch.float16
