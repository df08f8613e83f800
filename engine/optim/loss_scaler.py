"""Half precision: what dtype a model runs in, and the scale of its loss.

fp16 gradients below 6e-8 vanish, so the loss is multiplied by a scale before backward, and the gradients are divided by
it before the step. Where it is dynamic, an overflow lowers it and a long stretch without one raises it.

At the end: the norm of gradients over all ranks, and clipping by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.comm import Comm
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


# --- The global L2 norm of gradients that are sharded over several ranks, and clipping by it

# DeepSpeed knows no other norm. What is passed in is counted, so of a parameter that several ranks hold (tied across
# pipeline stages, replicated over tensor-parallel ranks) exactly one of them passes the gradient.


_STRETCH: Final = 1 << 16


@torch.no_grad()
def global_norm(
    grads: Sequence[Tensor],
    comms: Sequence[Comm],
    *,
    device: torch.device | None = None,
    wait: Callable[[dist.Work, dist.ProcessGroup], None] | None = None,
) -> Tensor:
    """Norm of all gradients of all ranks: a float64 scalar, the same on every rank.

    `grads` are this rank's, to be counted once each; they may be none. Their squares are summed over each of `comms`
    in turn (data parallel, then model parallel); without any, this rank has them all. `wait` is how to wait for the
    first of these sums. The sum is made on `device`, by default the gradients', or the CPU without any. Infinite or NaN
    if and only if an element is: finite gradients of any dtype but float64 do not overflow.
    """
    if device is None:
        device = grads[0].device if grads else torch.device("cpu")
    total = _sum_of_squares(grads, device)
    for number, comm in enumerate(comms):
        comm.all_reduce(total, "norm", wait=None if number else wait).wait()
    return total.sqrt_()


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What gradients of that norm are multiplied by to have at most `max_norm`: torch.nn.utils.clip_grad_norm_'s."""
    return min(1.0, max_norm / (norm + 1e-6))


@torch.no_grad()
def unscale_and_clip_(grads: Sequence[Tensor], norm: float, *, loss_scale: float = 1.0, max_norm: float = 0.0) -> None:
    """Divide the gradients by `loss_scale` and clip them to `max_norm` (0: not at all) in one pass, in place.

    `norm` is theirs as they are, that is, of the scaled ones. Nothing is touched where there is nothing to do.
    """
    factor = 1.0 / loss_scale
    if max_norm > 0:
        factor = clip_coefficient(norm / loss_scale, max_norm) * factor
    if grads and factor != 1.0:
        torch._foreach_mul_(list(grads), factor)


@torch.no_grad()
def clip_on_device_(grads: Sequence[Tensor], norm: Tensor, *, loss_scale: float = 1.0, max_norm: float = 0.0) -> None:
    """The same where `norm` is on the gradients' device: the host does not wait for it."""
    if max_norm <= 0:
        unscale_and_clip_(grads, 0.0, loss_scale=loss_scale)
        return
    factor = (max_norm / (norm / loss_scale + 1e-6)).clamp(max=1.0).nan_to_num(nan=1.0) / loss_scale
    for same in ([g for g in grads if g.dtype == torch.float64], [g for g in grads if g.dtype != torch.float64]):
        if same:
            torch._foreach_mul_(same, factor if same[0].dtype == torch.float64 else factor.float())


def _sum_of_squares(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """In float64. On a CPU norms are taken in fp32, which is several times as fast, and again where that fails."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_kind: dict[tuple[torch.dtype, str], list[Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.dtype, grad.device.type), []).append(grad)
    for (dtype, place), same in by_kind.items():
        if place != "cpu" or dtype == torch.float64:
            total += _squares(same, torch.float64).to(device)
            continue
        squares = _squares([part for grad in same for part in _stretches(grad)], torch.float32)
        # The squares of bf16 or fp32 beyond 1.8e19 do not fit into fp32.
        total += (squares if torch.isfinite(squares) else _squares(same, torch.float64)).to(device)
    return total


def _squares(grads: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.stack(torch._foreach_norm(grads, 2.0, dtype=dtype)).double().square_().sum()


def _stretches(grad: Tensor) -> Sequence[Tensor]:
    """A long gradient in stretches: a running sum in fp32 over millions of squares loses the fourth digit."""
    return torch.split(grad.reshape(-1), _STRETCH) if grad.numel() > _STRETCH else (grad,)
