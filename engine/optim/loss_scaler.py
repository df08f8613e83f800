"""Half precision: what dtype a model runs in, and the scale of its loss.

fp16 gradients below 6e-8 vanish, so the loss is multiplied by a scale before backward, and the gradients are divided by
it before the step. Where it is dynamic, an overflow lowers it and a long stretch without one raises it.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from ..config.config import Fp16Config
from ..tree import each_tensor

DTYPES: Final = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""By their names in a configuration."""


def model_dtype(*, fp16: bool, bf16: bool) -> torch.dtype | None:
    """What the model's floating-point parameters are cast to; None leaves each as it is."""
    return torch.float16 if fp16 else torch.bfloat16 if bf16 else None


def overflowed(norm: float) -> bool:
    """Whether a step must be skipped, by the norm of the reduced gradients, which is the same on all ranks."""
    return not math.isfinite(norm)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with the floating-point tensors in it, at any depth of tuples, lists and dicts, cast to `dtype`."""
    return each_tensor(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def widened(loss: Tensor) -> Tensor:
    """In float32, at least, as what it is multiplied by may need."""
    return loss.float() if loss.dtype.itemsize < 4 else loss


class LossScaler:
    """A loss scale that stays as it is."""

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        """What the loss is multiplied by."""

    def update(self, overflow: bool) -> None:
        """After a step, or where one was skipped because of an `overflow`: settle the scale of the next."""

    def state_dict(self) -> dict[str, Any]:
        """What changes as training goes on."""
        return {"scale": self.scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.scale = state_dict["scale"]


class DynamicLossScaler(LossScaler):
    """Halves the scale at an overflow, and doubles it after `loss_scale_window` steps in a row without one.

    `hysteresis` is the number of overflows it takes to halve the scale. They are forgiven by each step without one if
    `consecutive_hysteresis`, else when the scale is doubled. Counted from an overflow, the first doubling comes after
    window + 1 good steps and the next ones after the window, as in DeepSpeed (`runtime/fp16/loss_scaler.py`).
    """

    dynamic = True

    def __init__(self, fp16: Fp16Config) -> None:
        super().__init__(2.0**fp16.initial_scale_power)
        self._fp16 = fp16
        self._iteration = 0
        self._last_overflow = -1
        self._overflows_left = fp16.hysteresis

    def update(self, overflow: bool) -> None:
        """After a step, or where one was skipped because of an `overflow`: settle the scale of the next.

        Raises RuntimeError if the scale would have to go below its minimum.
        """
        if overflow:
            self._lower()
            self._last_overflow = self._iteration
        else:
            if self._fp16.consecutive_hysteresis:
                self._overflows_left = self._fp16.hysteresis
            stable = self._iteration - self._last_overflow - 1
            if stable > 0 and stable % self._fp16.loss_scale_window == 0:
                self._overflows_left = self._fp16.hysteresis
                self.scale *= 2
        self._iteration += 1

    def _lower(self) -> None:
        if self._overflows_left > 1:
            self._overflows_left -= 1
            return
        least = self._fp16.min_loss_scale
        if self.scale <= least:
            raise RuntimeError(
                f"fp16: the gradients overflow although the loss scale is already at its minimum, {least:g} "
                f"(iteration {self._iteration}). The loss is likely infinite or NaN: lower the learning rate, clip "
                "gradients (gradient_clipping), train in bf16, or lower fp16.min_loss_scale"
            )
        self.scale = max(self.scale / 2, least)

    def state_dict(self) -> dict[str, Any]:
        """What changes as training goes on."""
        return {
            "scale": self.scale,
            "iteration": self._iteration,
            "last_overflow": self._last_overflow,
            "overflows_left": self._overflows_left,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.scale = state_dict["scale"]
        self._iteration = state_dict["iteration"]
        self._last_overflow = state_dict["last_overflow"]
        self._overflows_left = state_dict["overflows_left"]


def loss_scaler(fp16: Fp16Config) -> LossScaler:
    """The scaler of a config's `fp16` section: none (a scale of 1) unless enabled, dynamic for a `loss_scale` of 0."""
    if not fp16.enabled:
        return LossScaler(1.0)
    if fp16.loss_scale != 0:
        return LossScaler(fp16.loss_scale)
    return DynamicLossScaler(fp16)
