"""Parameters of optimizers and schedules, each seen to take effect: other weights, states, rates or momenta."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from config_coverage import alive
from engines import WIDTH, Layers, configuration, engine_for
from models import batches, build
from torch import Tensor

from dsprof.engine import Engine

torch.set_num_threads(1)

Cases = dict[str, tuple[dict[str, Any], dict[str, Any]]]
"""Type -> parameters to begin with; key -> another value for it, or a value and what else it takes to be seen."""


class With:
    """A value, and what else it takes to be seen: the same in both trainings."""

    def __init__(self, value: object, **others: object) -> None:
        self.value = value
        self.others = others


ADAM = {"lr": 0.1, "betas": [0.5, 0.9], "eps": 0.1, "weight_decay": 0.5}

OPTIMIZERS: Cases = {
    "Adam": ({"lr": 0.01}, {
        **ADAM, "adam_w_mode": With(False, weight_decay=0.5), "bias_correction": False,
        "amsgrad": With(True, betas=[0.9, 0.5]),
    }),
    "AdamW": ({"lr": 0.01}, {**ADAM, "bias_correction": False, "amsgrad": With(True, betas=[0.9, 0.5])}),
    "SGD": ({"lr": 0.01}, {
        "lr": 0.1, "momentum": 0.9, "dampening": With(0.5, momentum=0.9), "weight_decay": 0.5,
        "nesterov": With(True, momentum=0.9),
    }),
    "Lion": ({"lr": 0.01}, {"lr": 0.1, "betas": [0.5, 0.9], "weight_decay": 0.5}),
    "Lamb": ({"lr": 0.01}, {
        **ADAM, "bias_correction": False, "eps_inside_sqrt": With(True, eps=0.1), "max_coeff": 0.02, "min_coeff": 9.0,
    }),
    "Muon": ({"lr": 0.01}, {
        **ADAM, "momentum": 0.5, "muon_lr": 0.1, "adam_lr": 0.1, "adam_w_mode": With(False, weight_decay=0.5),
    }),
    "OneBitAdam": ({"lr": 0.01}, {**ADAM, "freeze_step": 3, "bias_correction": False}),
    "Adadelta": ({"lr": 1.0}, {"lr": 0.1, "rho": 0.5, "eps": 0.1, "weight_decay": 0.5}),
    "Adagrad": ({"lr": 0.01}, {
        "lr": 0.1, "lr_decay": 0.5, "weight_decay": 0.5, "initial_accumulator_value": 1.0, "eps": 0.1,
    }),
    "Adamax": ({"lr": 0.01}, ADAM),
    "ASGD": ({"lr": 0.1}, {
        "lr": 0.2, "lambd": 0.5, "alpha": With(0.1, lambd=0.5), "t0": 2.0, "weight_decay": 0.5,
    }),
    "NAdam": ({"lr": 0.01}, {
        **ADAM, "momentum_decay": 0.5, "decoupled_weight_decay": With(True, weight_decay=0.5),
    }),
    "RAdam": ({"lr": 0.01}, {**ADAM, "decoupled_weight_decay": With(True, weight_decay=0.5)}),
    "RMSprop": ({"lr": 0.01}, {
        "lr": 0.1, "alpha": 0.5, "eps": 0.1, "weight_decay": 0.5, "momentum": 0.9, "centered": True,
    }),
    "Rprop": ({"lr": 0.01}, {"lr": 0.1, "etas": [0.3, 1.5], "step_sizes": [1e-6, 0.02]}),
}  # fmt: skip

WARMUP = {"warmup_num_steps": 8, "warmup_type": "linear"}
CYCLE = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4}

SCHEDULES: Cases = {
    "WarmupLR": ({"warmup_num_steps": 5}, {**WARMUP, "warmup_min_lr": 0.01, "warmup_max_lr": 0.1}),
    "WarmupDecayLR": ({"warmup_num_steps": 5, "total_num_steps": 12}, {
        **WARMUP, "total_num_steps": 16, "warmup_min_lr": 0.01, "warmup_max_lr": 0.1,
    }),
    "WarmupCosineLR": ({"warmup_num_steps": 5, "total_num_steps": 12}, {
        **WARMUP, "total_num_steps": 16, "warmup_min_ratio": 0.5, "cos_min_ratio": 0.5,
    }),
    "OneCycle": (CYCLE, {
        "cycle_min_lr": 0.02, "cycle_max_lr": 0.2, "cycle_first_step_size": 6, "cycle_second_step_size": 2,
        "cycle_first_stair_count": 2, "cycle_second_stair_count": 2, "cycle_momentum": False, "cycle_min_mom": 0.5,
        "cycle_max_mom": 0.95, "decay_lr_rate": With(0.5, decay_step_size=2),
        "decay_mom_rate": With(0.5, decay_step_size=2), "decay_step_size": With(2, decay_lr_rate=0.5),
    }),
    "LRRangeTest": ({"lr_range_test_step_size": 4}, {
        "lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 3.0,
        "lr_range_test_staircase": True,
    }),
    "ConstantLR": ({}, {"factor": 0.9, "total_iters": 2}),
    "CosineAnnealingLR": ({"T_max": 10}, {"T_max": 5, "eta_min": 0.001}),
    "CosineAnnealingWarmRestarts": ({"T_0": 3}, {"T_0": 4, "T_mult": 2, "eta_min": 0.001}),
    "CyclicLR": ({"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3}, {
        "base_lr": 0.02, "max_lr": 0.2, "step_size_up": 4, "step_size_down": 5, "mode": "triangular2",
        "gamma": With(0.9, mode="exp_range"), "cycle_momentum": False, "base_momentum": 0.5, "max_momentum": 0.95,
    }),
    "ExponentialLR": ({"gamma": 0.9}, {"gamma": 0.5}),
    "LinearLR": ({}, {"start_factor": 0.5, "end_factor": 0.5, "total_iters": 3}),
    "MultiStepLR": ({"milestones": [2, 4]}, {"milestones": [3, 6], "gamma": 0.5}),
    "OneCycleLR": ({"max_lr": 0.1, "total_steps": 20}, {
        "max_lr": 0.2, "total_steps": 40, "pct_start": 0.6, "anneal_strategy": "linear", "cycle_momentum": False,
        "base_momentum": 0.5, "max_momentum": 0.99, "div_factor": 5.0, "final_div_factor": 2.0, "three_phase": True,
        "epochs": With(8, total_steps=None, epochs=4, steps_per_epoch=5),
        "steps_per_epoch": With(10, total_steps=None, epochs=4, steps_per_epoch=5),
    }),
    "PolynomialLR": ({}, {"total_iters": 9, "power": 2.0}),
    "StepLR": ({"step_size": 2}, {"step_size": 3, "gamma": 0.5}),
}  # fmt: skip


def pairs(cases: Cases) -> list[Any]:
    """Type, and two sets of parameters that differ in one key, for each key."""

    def each() -> Iterator[Any]:
        for kind, (base, others) in cases.items():
            for key, other in others.items():
                case = other if isinstance(other, With) else With(other)
                begin = {name: value for name, value in {**base, **case.others}.items() if value is not None}
                yield pytest.param(kind, begin, {**begin, key: case.value}, id=f"{kind}.{key}")

    return list(each())


def keys(section: str, cases: Cases) -> list[str]:
    return [f"{section}.params[{kind}].{key}" for kind, (_, others) in cases.items() for key in others]


def differ(one: list[Tensor], other: list[Tensor]) -> bool:
    """By more than rounding would explain, or in how many there are."""
    return len(one) != len(other) or any(
        not torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(one, other, strict=True)
    )


def states(engine: Engine) -> list[Tensor]:
    assert engine.optimizer is not None
    state = engine.optimizer.state
    return [
        torch.as_tensor(value).clone()
        for group in engine.optimizer.param_groups
        for param in group["params"]
        for value in [param.detach(), *(item for _, item in sorted(state[param].items()))]
    ]


def trained(kind: str, params: dict[str, Any]) -> list[Tensor]:
    """Weights and the optimizer's states after 8 steps of ever smaller gradients."""
    model = build(width=8, depth=1, odd=False)
    config = configuration(optimizer={"type": kind, "params": params})
    with engine_for(model, config, dist_init_required=False) as engine:
        for step, ids in enumerate(batches(8, 1, 1)[:, 0, 0]):
            engine.backward(engine(ids) / (step + 1))
            engine.step()
        return states(engine)


@alive(*keys("optimizer", OPTIMIZERS))
@pytest.mark.parametrize(("kind", "one", "other"), pairs(OPTIMIZERS))
def test_each_parameter_of_an_optimizer(kind: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    assert differ(trained(kind, one), trained(kind, other))


@alive("optimizer.type")
def test_each_optimizer_is_another() -> None:
    """But Adam is AdamW, and 1-bit Adam is too before it compresses."""
    assert not differ(trained("AdamW", {}), trained("AdamW", {}))
    weights = {kind: trained(kind, base) for kind, (base, _) in OPTIMIZERS.items()}
    del weights["Adam"], weights["OneBitAdam"]
    for one, other in itertools.combinations(weights, 2):
        assert differ(weights[one], weights[other]), (one, other)


def curve(kind: str, params: dict[str, Any]) -> list[Tensor]:
    """Rate and momentum of 19 steps."""
    with engine_for(
        Layers(1),
        configuration(optimizer={"type": "AdamW", "params": {"lr": 0.05}}, scheduler={"type": kind, "params": params}),
        dist_init_required=False,
    ) as engine:
        points = []
        for _ in range(19):
            points.append(torch.tensor([*engine.get_lr(), *engine.get_mom()[0]]))
            engine.backward(engine(torch.ones(2, WIDTH)))
            engine.step()
    return points


@alive(*keys("scheduler", SCHEDULES))
@pytest.mark.parametrize(("kind", "one", "other"), pairs(SCHEDULES))
def test_each_parameter_of_a_schedule(kind: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    assert differ(curve(kind, one), curve(kind, other))


@alive("scheduler.type")
def test_each_schedule_is_another() -> None:
    assert not differ(curve("WarmupLR", {}), curve("WarmupLR", {}))
    curves = {kind: curve(kind, base) for kind, (base, _) in SCHEDULES.items()}
    for one, other in itertools.combinations(curves, 2):
        assert differ(curves[one], curves[other]), (one, other)
