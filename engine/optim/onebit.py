"""1-bit Adam: after a warm-up the variance is frozen, and ranks exchange the signs of their momenta.

The exchange has two legs. Each rank divides its momenta into one chunk a rank and sends rank r the signs of chunk r and
their scales; rank r, their server, averages what it gets and sends signs and scales of that to all. Both keep what the
signs lost, the error, and add it the next time, so that over the steps nothing is lost. A value costs one bit each way.

Source: Tang et al. 2021, arXiv 2102.02888.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..comm.comm import Comm
from .tiled import Tile, TiledOptimizer

_BITS = 8
_SCALE_BYTES = 4


class OneBitAdam(TiledOptimizer):
    """AdamW for `freeze_step` training steps; then with the variance of that moment, and momenta of one bit a value.

    In the warm-up it steps gradients that were reduced over `comm`, afterwards those of this rank alone
    (`wants_local_gradients`): then every rank must give the same parameters a gradient, of zeros where its batch used
    none. The weights stay the same bit for bit on all ranks. Masters must be whole parameters. Of one rank
    nothing is compressed. Without `bias_correction`, moments are used as they are; DeepSpeed takes the option, and
    never corrects.

    An element that had no gradient in the whole warm-up has no variance to be scaled by, and is not stepped afterwards.
    """

    def __init__(self, params: ParamsT, options: dict[str, Any], comm: Comm | None = None) -> None:
        super().__init__(params, {**options, "training_steps": 0}, comm)

    @property
    def wants_local_gradients(self) -> bool:
        """Whether the next training step's gradients are not to be reduced: the warm-up is over."""
        group = self.param_groups[0]
        return bool(group["training_steps"] >= group["freeze_step"])

    def step(self, closure: Callable[[], float] | None = None, *, last_tile: bool = True) -> Any:
        """Step every parameter that has a gradient. All calls but the last of a training step are not `last_tile`."""
        loss = super().step(closure)
        if last_tile:
            for group in self.param_groups:
                group["training_steps"] += 1
        return loss

    def _step(self, tiles: list[Tile]) -> None:
        warming_up = not self.wants_local_gradients
        if not warming_up:
            self._exchange_momenta(tiles)
        for tile in tiles:
            group, params, _ = tile
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            if warming_up:
                first, second = self._adam_moments(tile)
            else:
                first, second = self._moments(params, "exp_avg"), self._moments(params, "exp_avg_sq")
            steps = self._count(params)
            lengths = torch._foreach_sqrt(second)
            if warming_up and group["bias_correction"]:
                torch._foreach_div_(lengths, [math.sqrt(1 - beta2**step) for step in steps])
            torch._foreach_add_(lengths, group["eps"])
            rates = [-lr / (1 - beta1**step) if group["bias_correction"] else -lr for step in steps]
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            torch._foreach_addcdiv_(params, first, lengths, rates)

    def _exchange_momenta(self, tiles: list[Tile]) -> None:
        """Bring this rank's gradients into the momenta, and these to their mean over the ranks."""
        for group, params, grads in tiles:
            self._freeze(group, params)
            self._moments(params, "exp_avg_sq")
            torch._foreach_lerp_(self._moments(params, "exp_avg"), grads, 1 - group["betas"][0])
        states = [self.state[param] for tile in tiles for param in tile.params]
        live = [state["exp_avg_sq"] > 0 for state in states]
        if self._comm.size == 1:
            torch._foreach_mul_([state["exp_avg"] for state in states], live)
            return
        compressed_mean_(
            [state["exp_avg"] for state in states],
            [state["worker_error"] for state in states],
            [state["server_error"] for state in states],
            live,
            self._comm,
        )

    def _freeze(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Give parameters that are exchanged for the first time their errors, and their variance its final value."""
        for param in params:
            state = self.state[param]
            if "worker_error" in state:
                continue
            if not state:
                warnings.warn(
                    f"1-bit Adam: a parameter of shape {tuple(param.shape)} has its first gradient after the warm-up "
                    f"of {group['freeze_step']} steps (freeze_step), and will not be trained",
                    stacklevel=2,
                )
            elif group["bias_correction"]:
                state["exp_avg_sq"].div_(1 - group["betas"][1] ** float(state["step"]))
            state["worker_error"] = torch.zeros_like(param)
            state["server_error"] = param.new_zeros(-(-param.numel() // self._comm.size))


# --- the exchange


@torch.no_grad()
def compressed_mean_(
    values: Sequence[Tensor],
    worker_errors: Sequence[Tensor],
    server_errors: Sequence[Tensor],
    live: Sequence[Tensor],
    comm: Comm,
) -> None:
    """Replace `values` by their compressed mean over the ranks of `comm`, the same on each, and update the errors.

    For a tensor of n elements on w ranks, `worker_errors` has n elements and `server_errors` n / w, rounded
    up. `live` is boolean, like `values`, and the same on all ranks: elements where it is false become 0. Each tensor
    has a scale of its own in each chunk, the root mean square of what lives there: the message is as long a vector as
    what it stands for. (The mean magnitude has the smaller error, and learns slower.) Both messages have n / 8 bytes,
    and 4 bytes a tensor and rank.
    """
    rank = comm.rank
    widths = [-(-value.numel() // comm.size) for value in values]
    alive = _rows(live, comm.size)

    wanted = _rows(torch._foreach_add(list(values), list(worker_errors)), comm.size).mul_(alive)
    message = encode(wanted, alive, widths)
    wanted.sub_(decode(message, widths, wanted.dtype)).mul_(alive)
    _from_rows(wanted, widths, worker_errors)

    received = torch.empty_like(message)
    comm.all_to_all(message, received, "gradient").wait()

    mean = decode(received, widths, wanted.dtype).mean(0, keepdim=True)
    mean[0, : sum(widths)] += torch.cat([error.view(-1) for error in server_errors])
    mean.mul_(alive[rank])
    answer = encode(mean, alive[rank : rank + 1], widths)
    mean.sub_(decode(answer, widths, mean.dtype)).mul_(alive[rank])
    for error, lost in zip(server_errors, torch.split(mean[0, : sum(widths)], widths), strict=True):
        error.copy_(lost)

    received[rank] = answer[0]
    comm.all_gather(received, "gradient").wait()
    _from_rows(decode(received, widths, wanted.dtype).mul_(alive), widths, values)


def encode(rows: Tensor, alive: Tensor, widths: Sequence[int]) -> Tensor:
    """Messages [n, bytes] for `rows` [n, width]: each row's signs, and the scales of its parts of `widths` in fp32."""
    count = sum(widths)
    lengths = [torch.linalg.vector_norm(part, dim=1) for part in torch.split(rows[:, :count], list(widths), 1)]
    counts = [part.sum(1) for part in torch.split(alive[:, :count], list(widths), 1)]
    scales = torch.stack(lengths, 1).float() / torch.stack(counts, 1).clamp(min=1).sqrt()
    return torch.cat([pack_signs(rows), scales.view(torch.uint8)], 1)


def decode(messages: Tensor, widths: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What `encode` made messages [n, bytes] of, but for what signs and scales do not hold: [n, width]."""
    scale_bytes = _SCALE_BYTES * len(widths)
    signs, scales = torch.split(messages, [messages.shape[1] - scale_bytes, scale_bytes], 1)
    rows = unpack_signs(signs, dtype)
    factors = scales.clone(memory_format=torch.contiguous_format).view(torch.float32).to(dtype)
    for part, factor in zip(torch.split(rows[:, : sum(widths)], list(widths), 1), factors.unbind(1), strict=True):
        part.mul_(factor[:, None])
    return rows


def pack_signs(rows: Tensor) -> Tensor:
    """One bit a value of `rows` [n, 8 k], set where it is not negative: uint8 [n, k].

    Bit b of byte i is for value b * k + i, so that whole stretches are shifted at once.
    """
    bits = (rows >= 0).view(torch.uint8).view(rows.shape[0], _BITS, -1)
    packed = bits[:, 0].clone()
    for place in range(1, _BITS):
        packed |= bits[:, place] << place
    return packed


def unpack_signs(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The signs in `packed` uint8 [n, k], as -1 and 1: [n, 8 k]."""
    signs = torch.empty(packed.shape[0], _BITS, packed.shape[1], dtype=dtype, device=packed.device)
    for place in range(_BITS):
        signs[:, place] = (packed >> place) & 1
    return signs.mul_(2).sub_(1).view(packed.shape[0], -1)


def _rows(tensors: Sequence[Tensor], ranks: int) -> Tensor:
    """[ranks, width]: row r is chunk r of each tensor, one after the other. Zeros fill up chunks, and rows to bytes."""
    chunks = [F.pad(tensor.reshape(-1), (0, -tensor.numel() % ranks)).view(ranks, -1) for tensor in tensors]
    rows = torch.cat(chunks, 1)
    return F.pad(rows, (0, -rows.shape[1] % _BITS))


def _from_rows(rows: Tensor, widths: Sequence[int], tensors: Sequence[Tensor]) -> None:
    """Write what `_rows` made of `tensors` back to them."""
    for chunks, tensor in zip(torch.split(rows[:, : sum(widths)], list(widths), 1), tensors, strict=True):
        tensor.copy_(chunks.reshape(-1)[: tensor.numel()].view(tensor.shape))
