"""Learning-rate schedules against values worked out by hand from DeepSpeed 0.19's formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from dsprof.engine.optim import lr


def optimizer(*rates: float, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (0.1,)]
    return kind(groups, lr=0.1)  # type: ignore[call-arg]


def course(schedule: lr.Scheduler, steps: int, group: int = 0) -> list[float]:
    """The rate each of the first steps runs at."""
    rates = []
    for _ in range(steps):
        rates.append(schedule.get_last_lr()[group])
        schedule.step()
    return rates


def test_warmup_lr_logarithmic() -> None:
    # log(i + 1) / log(4) for i = 0..3, and i = -1 and 0 both at the minimum; then the maximum.
    schedule = lr.WarmupLR(optimizer(), 0.0, 1.0, warmup_num_steps=4)
    assert course(schedule, 6) == pytest.approx([0, 0, 0.5, 0.7924812503605781, 1, 1], abs=1e-15)


def test_warmup_lr_linear_from_a_minimum() -> None:
    schedule = lr.WarmupLR(optimizer(), 0.2, 1.0, warmup_num_steps=4, warmup_type="linear")
    assert course(schedule, 7) == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_warmup_lr_goes_up_to_the_optimizers_own_rates_and_takes_two_steps_at_least() -> None:
    own = optimizer(0.5, 0.25)
    schedule = lr.WarmupLR(own, warmup_num_steps=1, warmup_type="linear")
    assert course(schedule, 4) == [0, 0, 0.25, 0.5]
    assert [group["lr"] for group in own.param_groups] == [0.5, 0.25]


def test_warmup_decay_lr() -> None:
    # After 2 of warm-up, (6 - i) / (6 - 2) for i = 2..6, and 0 beyond.
    schedule = lr.WarmupDecayLR(optimizer(), 6, 0.0, 1.0, warmup_num_steps=2, warmup_type="linear")
    assert course(schedule, 9) == [0, 0, 0.5, 1.0, 0.75, 0.5, 0.25, 0, 0]


def test_warmup_cosine_lr() -> None:
    # Own rate 2. Zero before the first step; 0.1 + 0.9 * i / 2; then 0.2 + 0.8 * (1 + cos(pi * (i - 1) / 4)) / 2.
    schedule = lr.WarmupCosineLR(optimizer(2.0), 6, 0.1, 2, cos_min_ratio=0.2, warmup_type="linear")
    q = math.sqrt(0.5)
    expected = [0, 0.2, 1.1, 0.4 + 0.8 * (1 + q), 1.2, 0.4 + 0.8 * (1 - q), 0.4, 0.4, 0.4]
    assert course(schedule, 9) == pytest.approx(expected)


def test_lr_range_test() -> None:
    steady = lr.LRRangeTest(optimizer(), 0.01, lr_range_test_step_size=2, lr_range_test_step_rate=3.0)
    assert course(steady, 4) == pytest.approx([0.01, 0.025, 0.04, 0.055])
    stairs = lr.LRRangeTest(optimizer(), 0.01, 2, 3.0, lr_range_test_staircase=True)
    assert course(stairs, 5) == pytest.approx([0.01, 0.01, 0.04, 0.04, 0.07])


def test_one_cycle_rates_momenta_and_decay() -> None:
    own = optimizer()
    schedule = lr.OneCycle(
        own, 0.1, 0.5, decay_lr_rate=1.0, cycle_first_step_size=2, cycle_second_step_size=4, decay_step_size=2,
        cycle_min_mom=0.8, cycle_max_mom=0.9, decay_mom_rate=0.1,
    )  # fmt: skip
    rates, betas = [], []
    for _ in range(9):
        rates.append(own.param_groups[0]["lr"])
        betas.append(own.param_groups[0]["betas"])
        schedule.step()
    # i = -1..7: position (i + 1) / 6 up to i = 5, where the next cycle would begin; decays by d / 2, d = 1, 2.
    assert rates == pytest.approx([0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1 / 1.5, 0.05])
    assert [first for first, _ in betas] == pytest.approx([0.8, 0.85, 0.8, 0.825, 0.85, 0.875, 0.9, 0.945, 0.99])
    assert {second for _, second in betas} == {0.99}


def test_one_cycle_in_stairs() -> None:
    schedule = lr.OneCycle(
        optimizer(), 0.0, 1.0, cycle_first_step_size=4, cycle_first_stair_count=2, cycle_momentum=False
    )
    assert course(schedule, 9) == [0, 0, 0.5, 0.5, 1.0, 0.5, 0.5, 0, 0]


def test_one_cycle_leaves_the_momentum_of_an_optimizer_without_betas() -> None:
    own = optimizer(kind=torch.optim.SGD)
    with pytest.warns(UserWarning, match="cycle_momentum has no effect, SGD has no betas"):
        schedule = lr.OneCycle(own, 0.1, 0.5)
    schedule.step()
    assert "betas" not in own.param_groups[0]


def test_each_group_has_a_rate_of_its_own() -> None:
    own = optimizer(1.0, 1.0)
    schedule = lr.LRRangeTest(own, [0.01, 0.1], lr_range_test_step_size=1)
    schedule.step()
    assert schedule.get_last_lr() == [0.02, 0.2]
    with pytest.raises(ValueError, match=r"warmup_max_lr has 3 values for 2 parameter groups; write one number, or 2"):
        lr.WarmupLR(own, warmup_max_lr=[1, 2, 3])


def test_a_rate_that_is_a_tensor_is_written_in_place() -> None:
    own = optimizer()
    rate = own.param_groups[0]["lr"] = torch.tensor(0.1)
    schedule = lr.WarmupLR(own, 0.0, 1.0, 2, "linear")
    schedule.step()
    schedule.step()
    assert own.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


@pytest.mark.parametrize(
    ("type", "params"),
    [
        ("WarmupLR", {"warmup_num_steps": 5}),
        ("WarmupDecayLR", {"warmup_num_steps": 5, "total_num_steps": 9}),
        ("WarmupCosineLR", {"warmup_num_steps": 3, "total_num_steps": 9}),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 4, "decay_step_size": 1,
                      "decay_lr_rate": 0.5}),
        ("LRRangeTest", {"lr_range_test_step_size": 2}),
    ],
)  # fmt: skip
def test_resumed_schedules_go_on_as_if_never_stopped(type: str, params: dict[str, Any]) -> None:
    whole = course(lr.build(type, params, optimizer()), 14)
    first = lr.build(type, params, optimizer())
    course(first, 6)
    second = lr.build(type, params, optimizer())
    second.load_state_dict(first.state_dict())
    assert course(second, 8) == whole[6:]
    assert first.state_dict() == {"last_batch_iteration": 5}


def test_build_takes_torchs_own_schedules() -> None:
    own = optimizer(1.0)
    schedule = lr.build("StepLR", {"step_size": 1, "gamma": 0.5}, own)
    own.step()  # torch warns otherwise
    assert course(schedule, 3) == [1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    ("type", "params", "message"),
    [
        ("WarmupLR", {"warmup_steps": 3}, "scheduler.params for WarmupLR: got an unexpected keyword argument"),
        ("WarmupDecayLR", {}, "scheduler.params for WarmupDecayLR: missing a required argument: 'total_num_steps'"),
        ("WarmupLR", {"warmup_num_steps": 0}, "scheduler.params.warmup_num_steps: 0 is not a whole number at least 1"),
        ("WarmupLR", {"warmup_type": "exp"}, 'warmup_type: "exp" is not "log" or "linear"; the default is "log"'),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0},
         "cycle_first_step_size: 0 is not a whole number at least 1; the default is 2000"),
    ],
)  # fmt: skip
def test_build_says_what_is_wrong(type: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lr.build(type, params, optimizer())


def test_a_training_that_ends_before_it_is_warm_is_told() -> None:
    with pytest.warns(UserWarning, match=r"total_num_steps \(5\) is less than warmup_num_steps \(9\)"):
        lr.WarmupDecayLR(optimizer(), 5, warmup_num_steps=9)
