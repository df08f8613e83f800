"""Learning-rate schedules with the parameters, defaults and values of DeepSpeed 0.19 (`runtime/lr_schedules.py`).

A schedule is stepped after every optimizer step. It counts in `last_batch_iteration`, here i, which is -1 until its
first step: step k of the training (from 0) runs at the rate of i = k - 1, so a warm-up from zero has two steps at zero.
"""

from __future__ import annotations

import abc
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer, lr_scheduler

PerGroup = float | Sequence[float]
"""One value for all parameter groups, or one for each."""


class Schedule(abc.ABC):
    """Sets the rates of an optimizer's parameter groups from the number of steps taken."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._apply()

    @abc.abstractmethod
    def get_lr(self) -> list[float]:
        """The rates at `last_batch_iteration`, one a parameter group."""

    def get_last_lr(self) -> list[Any]:
        """The rates that are set, one a parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on to the next iteration, or to the one given, and set its rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """How far the schedule is; its shape is the configuration's."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken, with the rates set to those of that moment."""
        self.last_batch_iteration = state_dict["last_batch_iteration"]
        self._apply()

    def _apply(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _per_group(self, optimizer: Optimizer, value: PerGroup, name: str) -> list[float]:
        groups = len(optimizer.param_groups)
        if not isinstance(value, Sequence):
            return [value] * groups
        if len(value) != groups:
            raise ValueError(
                f"scheduler.params.{name} has {len(value)} values for {groups} parameter groups; "
                f"write one number, or {groups}"
            )
        return list(value)


class LRRangeTest(Schedule):
    """Raises the rate until training diverges, to find the highest one that does not.

    lr = min_lr * (1 + step_rate * (i + 1) / step_size), the quotient rounded down if `lr_range_test_staircase`.
    Source: Smith 2018, arXiv 1803.09820.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lr = self._per_group(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = _positive(lr_range_test_step_size, "lr_range_test_step_size")
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        interval = (self.last_batch_iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [lr * increase for lr in self.min_lr]


class OneCycle(Schedule):
    """One cycle of the rate up and down, with the momentum (Adam's beta1) the other way round, then a decay.

    With n = i + 1, position x in the cycle from 0 to 1, and r the share of its first half: s = x / r while x <= r, then
    (1 - x) / (1 - r); with a stair count, s is rounded down to a multiple of 1 / count. In the cycle
    lr = min_lr + (max_lr - min_lr) * s and momentum = max_mom - (max_mom - min_mom) * s. After it, with d steps of it
    over decay_step_size, lr = min_lr / (1 + decay_lr_rate * d) and momentum = max_mom * (1 + decay_mom_rate * d).

    As in DeepSpeed, cycling the momentum sets beta2 to 0.99, and the very first step runs at `cycle_min_mom`. An
    optimizer without betas keeps its momentum, with a warning. Source: Smith 2018, arXiv 1803.09820.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        if cycle_first_step_size <= 0:
            raise ValueError(f"scheduler.params.cycle_first_step_size is {cycle_first_step_size}; it must be above 0")
        if cycle_second_step_size is not None and cycle_second_step_size < 0:
            raise ValueError(
                f"scheduler.params.cycle_second_step_size is {cycle_second_step_size}; it must not be negative"
            )
        self.first_size = float(cycle_first_step_size)
        self.second_size = self.first_size if cycle_second_step_size is None else float(cycle_second_step_size)
        self.total_size = self.first_size + self.second_size
        self.first_stairs = cycle_first_stair_count
        self.second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.min_lrs = self._per_group(optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._per_group(optimizer, cycle_max_lr, "cycle_max_lr")
        self.min_moms = self._per_group(optimizer, cycle_min_mom, "cycle_min_mom")
        self.max_moms = self._per_group(optimizer, cycle_max_mom, "cycle_max_mom")
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.decay_step_size = decay_step_size
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            warnings.warn(
                f"scheduler OneCycle: cycle_momentum has no effect, {type(optimizer).__name__} has no betas",
                stacklevel=2,
            )
        super().__init__(optimizer, last_batch_iteration)
        if self.cycle_momentum and last_batch_iteration == -1:
            self._set_momentum(self.min_moms)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            return [low + (high - low) * scale for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        decay = self._decay(self.decay_lr_rate)
        return [low / decay for low in self.min_lrs]

    def get_mom(self) -> list[float] | None:
        """The momenta at `last_batch_iteration`, one a parameter group; None if they are not cycled."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            return [high - (high - low) * scale for low, high in zip(self.min_moms, self.max_moms, strict=True)]
        decay = self._decay(self.decay_mom_rate)
        return [high * decay for high in self.max_moms]

    def _apply(self) -> None:
        super()._apply()
        momenta = self.get_mom()
        if momenta is not None:
            self._set_momentum(momenta)

    def _set_momentum(self, momenta: list[float]) -> None:
        for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
            group["betas"] = (momentum, 0.99)

    def _scale(self) -> float:
        iteration = self.last_batch_iteration + 1
        share = self.first_size / self.total_size
        position = 1.0 + iteration / self.total_size - math.floor(1 + iteration / self.total_size)
        rising = position <= share
        stairs = self.first_stairs if rising else self.second_stairs
        if stairs <= 0:
            return position / share if rising else (position - 1) / (share - 1)
        # From the whole number of steps: the quotient above can lie a rounding error below a stair.
        within = iteration % self.total_size
        if within <= self.first_size:
            return math.floor(within * stairs / self.first_size) / stairs
        return math.floor((self.total_size - within) * stairs / self.second_size) / stairs

    def _decay(self, rate: float) -> float:
        if self.decay_step_size == 0 or rate == 0:
            return 1.0
        return 1 + rate * (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size


class WarmupLR(Schedule):
    """Raises the rate from min to max over `warmup_num_steps` n (at least 2), then keeps it.

    lr = min + (max - min) * g, with g = log(i + 1) / log(n) for `log` and i / n for `linear` while i < n, then 1.
    `warmup_max_lr` is the optimizer's own rate by default.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = self._per_group(optimizer, warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._per_group(optimizer, warmup_max_lr, "warmup_max_lr")
        self.warmup_num_steps = max(2, _positive(warmup_num_steps, "warmup_num_steps"))
        self.warmup = _warmup(warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return self.min_lrs
        gamma = self._gamma()
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _gamma(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return self.warmup(self.last_batch_iteration, self.warmup_num_steps)
        return 1.0


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then linearly back to the minimum at `total_num_steps` T: g = (T - i) / (T - n), not below 0."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration
        )  # fmt: skip
        _warn_if_never_warm(total_num_steps, self.warmup_num_steps)

    def _gamma(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return super()._gamma()
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(Schedule):
    """Raises the rate to the optimizer's own over `warmup_num_steps` n (at least 2), then lowers it along a cosine.

    lr = own rate * q. While i < n, q = a + (1 - a) * g with a = `warmup_min_ratio` and g as in WarmupLR; then
    q = c + (1 - c) * (1 + cos(pi * min(1, (i - n + 1) / (T - n)))) / 2 with c = `cos_min_ratio` and
    T = `total_num_steps`.
    As in DeepSpeed, the very first step runs at a rate of 0 whatever `warmup_min_ratio` is.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.warmup_num_steps = max(2, _positive(warmup_num_steps, "warmup_num_steps"))
        self.cos_min_ratio = cos_min_ratio
        self.warmup = _warmup(warmup_type)
        self.own_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        _warn_if_never_warm(total_num_steps, self.warmup_num_steps)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.own_lrs]

    def get_lr_ratio(self) -> float:
        """The share of the optimizer's own rate at `last_batch_iteration`."""
        i, warm = self.last_batch_iteration, self.warmup_num_steps
        if i < 0:
            return 0.0
        if i < warm:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * self.warmup(i, warm)
        progress = min(1.0, (i - warm + 1) / max(1, self.total_num_steps - warm))
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)


SCHEDULES: Final[Mapping[str, type[Schedule]]] = {
    schedule.__name__: schedule for schedule in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def build(type: str, params: Mapping[str, Any], optimizer: Optimizer) -> Schedule | lr_scheduler.LRScheduler:
    """The schedule of a config's `scheduler` section, which has checked the type: one of the above, or of torch's.

    Raises ValueError for parameters it does not take or lacks.
    """
    make: Callable[..., Schedule | lr_scheduler.LRScheduler] = SCHEDULES.get(type) or getattr(lr_scheduler, type)
    try:
        inspect.signature(make).bind(optimizer, **params)
    except TypeError as error:
        raise ValueError(f"scheduler.params for {type}: {error}") from None
    return make(optimizer, **params)


def _positive(value: int, name: str) -> int:
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"scheduler.params.{name} is {value!r}; it must be a whole number above 0")
    return value


def _warmup(type: str) -> Callable[[int, int], float]:
    """How far the warm-up is, from 0 to 1, at one iteration of so many."""
    if type == "log":
        return lambda iteration, steps: 1.0 / math.log(steps) * math.log(iteration + 1)
    if type == "linear":
        return lambda iteration, steps: iteration / steps
    raise ValueError(f"scheduler.params.warmup_type is {type!r}; write 'log' or 'linear'")


def _warn_if_never_warm(total: int, warm: int) -> None:
    if total < warm:
        warnings.warn(
            f"scheduler.params: total_num_steps ({total}) is less than warmup_num_steps ({warm})", stacklevel=3
        )
