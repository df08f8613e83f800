"""Learning-rate schedules with the parameters, defaults and values of DeepSpeed 0.19 (`runtime/lr_schedules.py`).

A schedule is stepped after every optimizer step. It counts in `last_batch_iteration`, here i, which is -1 until its
first step: step k of the training (from 0) runs at the rate of i = k - 1, so a warm-up from zero has two steps at zero.
"""

from __future__ import annotations

import abc
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import Any, ClassVar, Final

import torch
from torch.optim import Optimizer, lr_scheduler

from ..config import scheduler
from ..config.keys import checked
from ..config.model import Params


class Schedule(abc.ABC):
    """Sets the rates of an optimizer's parameter groups from the number of steps taken.

    It takes the optimizer, what its `section` of the configuration has, with those defaults, and
    `last_batch_iteration`; by name, or in DeepSpeed's order. Raises ValueError for values that the section cannot have.
    """

    section: ClassVar[type[Params]]
    __signature__: ClassVar[Signature]

    def __init_subclass__(cls) -> None:
        fields = [
            Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=Parameter.empty if f.is_required() else f.default)
            for name, f in cls.section.model_fields.items()
        ]
        fields.sort(key=lambda field: field.default is not Parameter.empty)  # those that are needed come first
        first = Parameter("optimizer", Parameter.POSITIONAL_OR_KEYWORD)
        last = Parameter("last_batch_iteration", Parameter.POSITIONAL_OR_KEYWORD, default=-1)
        cls.__signature__ = Signature([first, *fields, last])

    def __init__(self, *values: Any, **named: Any) -> None:
        given = self.__signature__.bind(*values, **named).arguments
        self.optimizer: Optimizer = given.pop("optimizer")
        self.last_batch_iteration: int = given.pop("last_batch_iteration", -1)
        self.params: Any = checked(self.section, given, "scheduler.params")
        groups = self.optimizer.param_groups
        self._own = [float(group["lr"]) for group in groups]
        """The optimizer's rates, one a parameter group."""
        self._each: dict[str, list[Any]] = {}
        """Parameters, one a parameter group; a rate that there is none of is the optimizer's own."""
        for name, value in self.params:
            self._each[name] = list(value) if isinstance(value, tuple) else [value] * len(groups)
            if value is None:
                self._each[name] = self._own
            if len(self._each[name]) != len(groups):
                raise ValueError(
                    f"scheduler.params.{name} has {len(value)} values for {len(groups)} parameter groups; "
                    f"write one number, or {len(groups)}"
                )
        if self.last_batch_iteration == -1:
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
        self.step(state_dict["last_batch_iteration"])

    def _apply(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _between(self, low: str, high: str, share: float) -> list[float]:
        """For each parameter group what is that share of the way from one parameter to another."""
        return [least + (most - least) * share for least, most in zip(self._each[low], self._each[high], strict=True)]


class LRRangeTest(Schedule):
    """Raises the rate until training diverges, to find the highest one that does not.

    lr = min_lr * (1 + step_rate * (i + 1) / step_size), the quotient rounded down if `lr_range_test_staircase`.
    Source: Smith 2018, arXiv 1803.09820.
    """

    section = scheduler.LRRangeTestParams

    def get_lr(self) -> list[float]:
        interval = (self.last_batch_iteration + 1) / self.params.lr_range_test_step_size
        if self.params.lr_range_test_staircase:
            interval = math.floor(interval)
        increase = 1 + self.params.lr_range_test_step_rate * interval
        return [lr * increase for lr in self._each["lr_range_test_min_lr"]]


class OneCycle(Schedule):
    """One cycle of the rate up and down, with the momentum (Adam's beta1) the other way round, then a decay.

    With n = i + 1, position x in the cycle from 0 to 1, and r the share of its first half: s = x / r while x <= r, then
    (1 - x) / (1 - r); with a stair count, s is rounded down to a multiple of 1 / count. In the cycle
    lr = min_lr + (max_lr - min_lr) * s and momentum = max_mom - (max_mom - min_mom) * s. After it, with d steps of it
    over decay_step_size, lr = min_lr / (1 + decay_lr_rate * d) and momentum = max_mom * (1 + decay_mom_rate * d).

    As in DeepSpeed, cycling the momentum sets beta2 to 0.99, and the very first step runs at `cycle_min_mom`. An
    optimizer without betas keeps its momentum, with a warning. Source: Smith 2018, arXiv 1803.09820.
    """

    section = scheduler.OneCycleParams

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        if self.params.cycle_momentum and not self.cycle_momentum:
            warnings.warn(
                f"scheduler OneCycle: cycle_momentum has no effect, {type(self.optimizer).__name__} has no betas",
                stacklevel=2,
            )
        if self.cycle_momentum and self.last_batch_iteration == -1:
            self._set_momentum(self._each["cycle_min_mom"])

    @property
    def cycle_momentum(self) -> bool:
        """Whether momenta are cycled."""
        return bool(self.params.cycle_momentum) and "betas" in self.optimizer.defaults

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < sum(self._sizes):
            return self._between("cycle_min_lr", "cycle_max_lr", self._scale())
        decay = self._decay(self.params.decay_lr_rate)
        return [low / decay for low in self._each["cycle_min_lr"]]

    def get_mom(self) -> list[float] | None:
        """The momenta at `last_batch_iteration`, one a parameter group; None if they are not cycled."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < sum(self._sizes):
            return self._between("cycle_max_mom", "cycle_min_mom", self._scale())
        decay = self._decay(self.params.decay_mom_rate)
        return [high * decay for high in self._each["cycle_max_mom"]]

    def _apply(self) -> None:
        super()._apply()
        momenta = self.get_mom()
        if momenta is not None:
            self._set_momentum(momenta)

    def _set_momentum(self, momenta: list[float]) -> None:
        for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
            group["betas"] = (momentum, 0.99)

    @property
    def _sizes(self) -> tuple[int, int]:
        """Steps up, and steps down."""
        up, down = self.params.cycle_first_step_size, self.params.cycle_second_step_size
        return up, up if down is None else down

    def _scale(self) -> float:
        iteration, (up, down) = self.last_batch_iteration + 1, self._sizes
        total = up + down
        share = up / total
        position = 1.0 + iteration / total - math.floor(1 + iteration / total)
        rising = position <= share
        stairs: int = self.params.cycle_first_stair_count
        if not rising and self.params.cycle_second_stair_count is not None:
            stairs = self.params.cycle_second_stair_count
        if stairs <= 0:
            return position / share if rising else (position - 1) / (share - 1)
        # From the whole number of steps: the quotient above can lie a rounding error below a stair.
        within = iteration % total
        if within <= up:
            return math.floor(within * stairs / up) / stairs
        return math.floor((total - within) * stairs / down) / stairs

    def _decay(self, rate: float) -> float:
        each: int = self.params.decay_step_size
        if each == 0 or rate == 0:
            return 1.0
        return 1 + rate * (self.last_batch_iteration - sum(self._sizes) + 1) / each


class WarmupLR(Schedule):
    """Raises the rate from min to max over `warmup_num_steps` n (at least 2), then keeps it.

    lr = min + (max - min) * g, with g = log(i + 1) / log(n) for `log` and i / n for `linear` while i < n, then 1.
    `warmup_max_lr` is the optimizer's own rate by default.
    """

    section: ClassVar[type[Params]] = scheduler.WarmupLRParams

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return self._each["warmup_min_lr"]
        return self._between("warmup_min_lr", "warmup_max_lr", self._gamma())

    def _gamma(self) -> float:
        return _warmth(self)


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then linearly back to the minimum at `total_num_steps` T: g = (T - i) / (T - n), not below 0."""

    section = scheduler.WarmupDecayLRParams

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        _warn_if_never_warm(self)

    def _gamma(self) -> float:
        warm, total = _warm_after(self), int(self.params.total_num_steps)
        if self.last_batch_iteration < warm:
            return super()._gamma()
        return max(0.0, (total - self.last_batch_iteration) / max(1.0, total - warm))


class WarmupCosineLR(Schedule):
    """Raises the rate to the optimizer's own over `warmup_num_steps` n (at least 2), then lowers it along a cosine.

    lr = own rate * q. While i < n, q = a + (1 - a) * g with a = `warmup_min_ratio` and g as in WarmupLR; then
    q = c + (1 - c) * (1 + cos(pi * min(1, (i - n + 1) / (T - n)))) / 2 with c = `cos_min_ratio` and
    T = `total_num_steps`.
    As in DeepSpeed, the very first step runs at a rate of 0 whatever `warmup_min_ratio` is.
    """

    section = scheduler.WarmupCosineLRParams

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        _warn_if_never_warm(self)

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self._own]

    def get_lr_ratio(self) -> float:
        """The share of the optimizer's own rate at `last_batch_iteration`."""
        i, warm = self.last_batch_iteration, _warm_after(self)
        params: scheduler.WarmupCosineLRParams = self.params
        if i < 0:
            return 0.0
        if i < warm:
            return params.warmup_min_ratio + (1 - params.warmup_min_ratio) * _warmth(self)
        progress = min(1.0, (i - warm + 1) / max(1, params.total_num_steps - warm))
        return max(0.0, params.cos_min_ratio + (1 - params.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)


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


def _warm_after(schedule: Schedule) -> int:
    """Steps of its warm-up."""
    return max(2, int(schedule.params.warmup_num_steps))


def _warmth(schedule: Schedule) -> float:
    """How far the warm-up is, from 0 to 1, where it remains."""
    i, warm = schedule.last_batch_iteration, _warm_after(schedule)
    if i >= warm:
        return 1.0
    return i / warm if schedule.params.warmup_type == "linear" else 1.0 / math.log(warm) * math.log(i + 1)


def _warn_if_never_warm(schedule: Schedule) -> None:
    total, warm = schedule.params.total_num_steps, _warm_after(schedule)
    if total < warm:
        warnings.warn(
            f"scheduler.params: total_num_steps ({total}) is less than warmup_num_steps ({warm})", stacklevel=3
        )
