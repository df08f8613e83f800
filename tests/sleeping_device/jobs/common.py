"""What the jobs share: joining a group, steps, and telling what the device did."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
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


def train(step: Callable[[int], torch.Tensor], steps: int, before: Callable[[int], None] = lambda number: None) -> None:
    """Take steps, and write what happened to `told.RANK`: when each step was begun and ended on the host, the losses,
    what the device did, how often it was asked what."""
    losses, host = [], []
    for number in range(steps):
        before(number)
        begin = time.monotonic_ns()
        losses.append(step(number).detach())
        host.append((begin, time.monotonic_ns()))
    torch.cuda.synchronize()
    counts, memory = device.counts(), device.memory()
    told = {"losses": [float(loss) for loss in losses], "host": host, "counts": counts, "peak": memory[1]}
    Path(f"told.{RANK}").write_text(json.dumps({**told, "log": device.log()}))
