"""The global L2 norm of gradients that are sharded over several ranks, and clipping by it.

DeepSpeed knows no other norm. What is passed in is counted, so of a parameter that several ranks hold (tied across
pipeline stages, replicated over tensor-parallel ranks) exactly one of them passes the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.comm import Comm

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
