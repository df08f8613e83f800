"""`scheduler`: how the learning rate changes, and its parameters, a model for each type."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from pydantic import Field, SerializeAsAny

from .model import Number, Params, ParamsTypes, Rates, TypedSection, Whole, torch_params

WarmupType = Literal["log", "linear"]


class WarmupLRParams(Params):
    """From `warmup_min_lr` to `warmup_max_lr`, then constant."""

    warmup_min_lr: Rates = 0.0
    """Learning rate at the beginning."""

    warmup_max_lr: Rates | None = None
    """Learning rate after the warm-up. Default: the optimizer's own."""

    warmup_num_steps: Whole = Field(default=1000, ge=1)
    """Optimizer steps of warm-up; 1 counts as 2."""

    warmup_type: WarmupType = "log"
    """Shape of the warm-up."""


class WarmupDecayLRParams(WarmupLRParams):
    """A warm-up, then linear decay to 0 at `total_num_steps`."""

    warmup_max_lr: Rates = 0.001
    """Learning rate after the warm-up."""

    total_num_steps: Whole = Field(ge=1)
    """Optimizer steps of the whole training."""


class WarmupCosineLRParams(Params):
    """A warm-up, then half a cosine down; both are ratios of the optimizer's learning rate."""

    total_num_steps: Whole = Field(ge=1)
    """Optimizer steps of the whole training."""

    warmup_min_ratio: Number = Field(default=0.0, ge=0)
    """Where the warm-up begins."""

    warmup_num_steps: Whole = Field(default=1000, ge=1)
    """Optimizer steps of warm-up; 1 counts as 2."""

    cos_min_ratio: Number = Field(default=0.0001, ge=0)
    """Where the cosine ends."""

    warmup_type: WarmupType = "log"
    """Shape of the warm-up."""


class OneCycleParams(Params):
    """Up and down once, momentum the other way round, then decay (Smith 2018)."""

    cycle_min_lr: Rates
    """Learning rate at the beginning and at the end of the cycle."""

    cycle_max_lr: Rates
    """Learning rate in the middle of the cycle."""

    decay_lr_rate: Number = Field(default=0.0, ge=0)
    """After the cycle, the rate is divided by 1 plus this for each `decay_step_size`."""

    cycle_first_step_size: Whole = Field(default=2000, ge=1)
    """Optimizer steps up."""

    cycle_second_step_size: Whole | None = Field(default=None, ge=0)
    """Optimizer steps down. Default: as many as up."""

    cycle_first_stair_count: Whole = Field(default=0, ge=0)
    """Stairs on the way up; 0 is a straight line."""

    cycle_second_stair_count: Whole | None = Field(default=None, ge=0)
    """Stairs on the way down. Default: as many as up."""

    decay_step_size: Whole = Field(default=0, ge=0)
    """Optimizer steps between decays after the cycle; 0 means no decay."""

    cycle_momentum: bool = True
    """Move the momentum too, with optimizers that have betas."""

    cycle_min_mom: Rates = 0.8
    """Momentum in the middle of the cycle."""

    cycle_max_mom: Rates = 0.9
    """Momentum at the beginning and at the end of the cycle."""

    decay_mom_rate: Number = Field(default=0.0, ge=0)
    """After the cycle, the momentum is multiplied by 1 plus this for each `decay_step_size`."""


class LRRangeTestParams(Params):
    """Ever larger learning rates, to find the largest that still trains."""

    lr_range_test_min_lr: Rates = 0.001
    """Learning rate at the beginning."""

    lr_range_test_step_size: Whole = Field(default=2000, ge=1)
    """Optimizer steps between increases."""

    lr_range_test_step_rate: Number = 1.0
    """What is added in each such interval, as a share of the first rate."""

    lr_range_test_staircase: bool = False
    """Increase at the end of each interval; false: in every step."""


SCHEDULERS: Final[ParamsTypes] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
    **torch_params(
        ConstantLR="factor total_iters",
        CosineAnnealingLR="T_max eta_min",
        CosineAnnealingWarmRestarts="T_0 T_mult eta_min",
        CyclicLR="base_lr max_lr step_size_up step_size_down mode gamma cycle_momentum base_momentum max_momentum",
        ExponentialLR="gamma",
        LinearLR="start_factor end_factor total_iters",
        MultiStepLR="milestones gamma",
        OneCycleLR="max_lr total_steps epochs steps_per_epoch pct_start anneal_strategy cycle_momentum"
        " base_momentum max_momentum div_factor final_div_factor three_phase",
        PolynomialLR="total_iters power",
        StepLR="step_size gamma",
    ),
}
"""Type, as `SchedulerConfig.type` spells it -> its parameters: DeepSpeed's, then those of torch that JSON can write."""


class SchedulerConfig(TypedSection):
    """How the learning rate changes, where the script passes no schedule of its own to `initialize`."""

    types: ClassVar[ParamsTypes] = SCHEDULERS
    unknown: ClassVar[str] = (
        "is not a schedule that a configuration can describe: they are {types}; write one of them, or pass "
        "the schedule itself to `initialize(lr_scheduler=...)`"
    )

    type: str = Field(examples=["WarmupLR"])
    """Which schedule, in upper or lower case: DeepSpeed's below, or `ConstantLR`, `CosineAnnealingLR`,
    `CosineAnnealingWarmRestarts`, `CyclicLR`, `ExponentialLR`, `LinearLR`, `MultiStepLR`, `OneCycleLR`, `PolynomialLR`,
    `StepLR` of torch."""

    params: SerializeAsAny[Params] = Field(default={}, validate_default=True)
    """Its parameters: the tables below; those of torch's schedules are torch's."""
