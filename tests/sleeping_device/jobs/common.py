"""What the jobs share: joining a group, steps, and telling what the device did."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sleeping_device as device
import torch
from torch import nn

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])


def join() -> None:
    """The default group, on the device."""
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{Path('store').absolute()}", rank=RANK, world_size=WORLD
    )


class Slept(torch.autograd.Function):
    """A layer that takes as long as it is told, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, forward_ms: float, backward_ms: float) -> torch.Tensor:
        ctx.name, ctx.ms = name, backward_ms
        device.kernel(f"{name}.forward", forward_ms)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        device.kernel(f"{ctx.name}.backward", ctx.ms)
        return gradient, None, None, None


class Block(nn.Module):
    """A linear layer that takes `forward_ms` and `backward_ms` on the device."""

    def __init__(self, name: str, width: int, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.label, self.forward_ms, self.backward_ms = name, forward_ms, backward_ms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Slept.apply(self.linear(x), self.label, self.forward_ms, self.backward_ms)  # type: ignore[no-any-return]


def model(blocks: int = 4, width: int = 64, forward_ms: float = 2, backward_ms: float = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(f"block{i}", width, forward_ms, backward_ms) for i in range(blocks))).to("cuda")


class Sgd(torch.optim.SGD):
    """Takes 2 ms on the device."""

    def step(self, closure: Any = None) -> Any:
        device.kernel("update", 2)
        return super().step(closure)


phases: list[tuple[str, int, int]] = []
"""Name, begin and end on the host."""


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """What the host has the device do meanwhile is this phase."""
    begin = time.monotonic_ns()
    yield
    phases.append((name, begin, time.monotonic_ns()))


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> torch.Tensor:
    """Forward, backward, update. Returns the loss."""
    with phase("forward"):
        output = model(data)
    loss: torch.Tensor = output.square().mean()
    with phase("backward"):
        loss.backward()
    with phase("optimizer"):
        optimizer.step()
    optimizer.zero_grad()
    return loss


def train(step: Callable[[int], torch.Tensor], steps: int, *, sync_every: int = 4, head_start_ms: float = 0) -> None:
    """Take steps, and write what happened to `told.RANK`: when each step was begun and ended on the host, its phases,
    the losses, what the device did, how often it was asked what. Every `sync_every` steps the host waits for the
    device; it is ahead of it again by `head_start_ms` of a kernel that begins the next step."""
    losses, host = [], []
    for number in range(steps):
        begin = time.monotonic_ns()
        if number % sync_every == 0 and head_start_ms:
            device.kernel("head start", head_start_ms)
        losses.append(step(number).detach())
        if number % sync_every == sync_every - 1:
            losses[-1].item()
        host.append((begin, time.monotonic_ns()))
    torch.cuda.synchronize()
    counts, memory = device.counts(), device.memory()
    told = {"losses": [float(loss) for loss in losses], "host": host, "phases": phases}
    told |= {"counts": counts, "peak": memory[1], "log": device.log()}
    Path(f"told.{RANK}").write_text(json.dumps(told))
