"""What the jobs have in common: a small model, generated data, and losses written for whoever compares them."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

WIDTH, BATCH, STEPS = 64, 4, 10


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def make_model(blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks)))


def make_batches(count: int, rank: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(BATCH, WIDTH, generator=generator) for _ in range(count)]


def use_gloo_only() -> None:
    """Of DeepSpeed: its own collectives in shared memory, which it would compile for a minute or two, are left out, as
    where they cannot be had."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def write_losses(losses: list[float], rank: int | None = None) -> None:
    """To losses.<rank>, every bit of them; by default under the rank that the launcher gave."""
    rank = int(os.environ["RANK"]) if rank is None else rank
    Path(f"losses.{rank}").write_text("\n".join(loss.hex() for loss in losses) + "\n")
