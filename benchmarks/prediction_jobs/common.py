"""What the jobs here share: layers that take so many ms, asleep or computing, and a log of when each step ended.

A core is free while a layer sleeps. With PREDICTION_JOBS_PER_MS=N a layer computes instead, N products of matrices for
each of its ms: the same amount in every run, so that a planted run and a mended one differ by what was planted alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

PER_MS: Final = float(os.environ.get("PREDICTION_JOBS_PER_MS") or 0)
FACTOR: Final = torch.randn(96, 96, generator=torch.Generator().manual_seed(0))
PRODUCT: Final = torch.empty(96, 96)


def multiply(times: int) -> None:
    for _ in range(times):
        torch.mm(FACTOR, FACTOR, out=PRODUCT)


def sleep(ms: float) -> None:
    if ms > 0:
        time.sleep(ms / 1e3)


def work(ms: float) -> None:
    """Take so many ms."""
    if PER_MS:
        multiply(round(ms * PER_MS))
    else:
        sleep(ms)


def arguments(description: str | None, steps: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--log", type=Path, help="rank 0 writes here when each of its steps ended, s")
    return parser


def start() -> tuple[int, int]:
    """Join the job's group; rank and number of ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return dist.get_rank(), dist.get_world_size()


class Log:
    """When each step ended."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.ended_s: list[float] = []

    def step(self) -> None:
        self.ended_s.append(time.perf_counter())

    def finish(self) -> None:
        """Write the log and leave the group.

        The pause is for torch: DDP's reducer may own the group, and when it goes right after the last collective, its
        destructor waits, with the interpreter's lock, for a thread that wants that lock.
        """
        if self.path is not None and dist.get_rank() == 0:
            self.path.write_text(json.dumps(self.ended_s))
        time.sleep(0.1)
        dist.destroy_process_group()


class Work(torch.autograd.Function):
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
    """x [..., width] -> the same, in `forward_ms`, and twice that for the gradients. `times` is for what varies from
    step to step."""

    def __init__(self, width: int, forward_ms: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.forward_ms = forward_ms
        self.times = 1.0

    def forward(self, x: Tensor) -> Tensor:
        ms = self.forward_ms * self.times
        y: Tensor = Work.apply(torch.tanh(self.linear(x)), ms, 2 * ms)
        return y


def add_link(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--link-mb", type=float, help="what moves between two ranks, MB/s, as over a slow network")


def slow_link(args: argparse.Namespace) -> None:
    """From here on what each rank sends to another one takes as long as `--link-mb` says: the kernel paces it. Called
    on all ranks when each has sent to each."""
    if args.link_mb is None:
        return
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "verdict_jobs"))
    from paced_link import pace

    ranks = range(dist.get_world_size())
    for sender, receiver in ((one, other) for one in ranks for other in ranks if one != other):
        pace(sender, receiver, int(args.link_mb * 1e6))


def layers(width: int, count: int, forward_ms: float) -> list[Layer]:
    """`count` layers that take `forward_ms` in all, and twice that in the backward."""
    return [Layer(width, forward_ms / count) for _ in range(count)]


class Slowed:
    """Makes one rank's layers take `by` times as long in every `every`th step."""

    def __init__(self, model: nn.Module, args: argparse.Namespace, rank: int) -> None:
        self.layers = [layer for layer in model.modules() if isinstance(layer, Layer)]
        self.by = args.slow_by if rank == args.slow_rank else 1.0
        self.every = args.slow_every

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--slow-rank", type=int)
        parser.add_argument("--slow-by", type=float, default=1.0)
        parser.add_argument("--slow-every", type=int, default=1, metavar="STEPS")

    def step(self, number: int) -> None:
        for layer in self.layers:
            layer.times = self.by if number % self.every == 0 else 1.0


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Reading one takes `read_ms` on a slow disk, and computing it `decode_ms` (of a core, if layers compute)."""

    def __init__(self, count: int, width: int, read_ms: float = 0.0, decode_ms: float = 0.0) -> None:
        self.x = torch.randn(count, width)
        self.read_ms, self.decode_ms = read_ms, decode_ms

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--read-ms", type=float, default=0.0, help="asleep, of one sample")
        parser.add_argument("--decode-ms", type=float, default=0.0, help="the same, computing")
        parser.add_argument("--workers", type=int, default=0)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sleep(self.read_ms)
        work(self.decode_ms)
        return self.x[index], self.x[index].flip(0)
