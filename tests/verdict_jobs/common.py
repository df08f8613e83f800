"""What the jobs here share: a model whose layers sleep where others compute, and a log of what really happened.

A core is free while a layer sleeps, so two cores train four ranks as four would, and how long each rank takes for its
own work is known. With VERDICT_JOBS_HURRY=1 nothing sleeps: the same losses, sooner.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

HURRY = os.environ.get("VERDICT_JOBS_HURRY") == "1"
spent_s: Counter[str] = Counter()
"""What this process has slept for, by kind, as measured: a busy host makes a sleep longer."""


def arguments(description: str | None, steps: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="folder for the losses and for what each rank spent its time on")
    return parser


def start(seed: int) -> tuple[int, int]:
    """Join the job's group; rank and number of ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    return dist.get_rank(), dist.get_world_size()


def finish(log: Log) -> None:
    """Write the log and leave the group, if there is one.

    The pause is for torch: DDP's reducer may own the group, and when it goes right after the last collective, its
    destructor waits, with the interpreter's lock, for a thread that wants that lock.
    """
    log.close()
    if dist.is_initialized():
        time.sleep(0.1)
        dist.destroy_process_group()


def work(ms: float, kind: str = "compute") -> None:
    if HURRY or ms <= 0:
        return
    began = time.perf_counter()
    time.sleep(ms / 1e3)
    spent_s[kind] += time.perf_counter() - began


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_ms: float, backward_ms: float) -> Tensor:
        ctx.backward_ms = backward_ms
        work(forward_ms)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        work(ctx.backward_ms)
        return gradients[0], None, None


class Layer(nn.Module):
    """x [batch, width] -> the same, in `forward_ms`, and twice that for the gradients."""

    def __init__(self, width: int, forward_ms: float, batch_norm: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width) if batch_norm else nn.Identity()
        self.forward_ms = forward_ms

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Work.apply(torch.tanh(self.norm(self.linear(x))), self.forward_ms, 2 * self.forward_ms)
        return y


def mlp(width: int, layers: int, forward_ms: float, batch_norm: bool = False) -> nn.Sequential:
    """A model that takes `forward_ms` in its forward and twice that in its backward."""
    return nn.Sequential(*(Layer(width, forward_ms / layers, batch_norm) for _ in range(layers)))


class Log:
    """One line a step. `close` writes rank<N>.json into the folder, if there is one."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.folder: Path | None = args.results
        self.rank = int(os.environ.get("RANK", "0"))
        self.losses: list[float] = []
        self.wall_s: list[float] = []
        self.spent_s: list[dict[str, float]] = []
        self._last = time.perf_counter()
        self._spent: dict[str, float] = dict(spent_s)

    def step(self, loss: float) -> None:
        now = time.perf_counter()
        self.losses.append(loss)
        self.wall_s.append(now - self._last)
        self.spent_s.append({kind: value - self._spent.get(kind, 0.0) for kind, value in spent_s.items()})
        self._last, self._spent = now, dict(spent_s)
        if self.rank == 0 and len(self.losses) % 10 == 0:
            print(f"step {len(self.losses):4d}  loss {loss:.6f}", flush=True)

    def close(self) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            content = {"losses": self.losses, "wall_s": self.wall_s, "spent_s": self.spent_s}
            (self.folder / f"rank{self.rank}.json").write_text(json.dumps(content))
