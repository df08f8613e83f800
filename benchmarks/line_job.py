"""Data-parallel training on gloo whose layers sleep, with time lost in one known line: the jobs of `lines.py`.

torchrun --nproc-per-node 2 benchmarks/line_job.py --kind branch --ms 30 --late 1

Which line that is the marks tell that stand behind it: `# lost: branch`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

WIDTH: Final = 64
FORWARD_S: Final = 0.06
OF_ONE_RANK: Final = ("branch", "lock", "print", "hook", "compiled")
OF_ALL: Final = ("transform", "ema")
"""Where the time is lost on every rank: in the loader, and outside of the phases."""
KINDS: Final = (*OF_ONE_RANK, *OF_ALL)


def lost_lines() -> dict[str, int]:
    """Kind -> the line in which its time is lost."""
    lines = Path(__file__).read_text().splitlines()
    return {match[1]: at + 1 for at, line in enumerate(lines) if (match := re.search(r"# lost: (\w+)$", line))}


# --- what one rank does more ----------------------------------------------------------------------


def branch(lost_s: float) -> Callable[[], None]:
    def validate() -> None:
        time.sleep(lost_s)  # lost: branch

    return validate


def lock(lost_s: float) -> Callable[[], None]:
    """Another thread of the process has the lock for most of the time."""
    shared, wanted, has_it = threading.Lock(), threading.Event(), threading.Event()

    def writes() -> None:
        while True:
            wanted.wait()
            wanted.clear()
            with shared:
                has_it.set()
                time.sleep(lost_s)

    threading.Thread(target=writes, daemon=True).start()

    def flush() -> None:
        has_it.clear()
        wanted.set()
        has_it.wait()
        with shared:  # lost: lock
            pass

    return flush


def print_to_pipe(lost_s: float) -> Callable[[], None]:
    """The pipe is full, and its reader takes as much as is written in a step in `lost_s` more than that takes."""
    reader, writer = os.pipe()
    text = b"x" * 4096
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, text)
    os.set_blocking(writer, True)

    def reads() -> None:
        while os.read(reader, len(text)):
            time.sleep((FORWARD_S + lost_s) / 4)

    threading.Thread(target=reads, daemon=True).start()

    def log() -> None:
        for _ in range(4):
            os.write(writer, text)  # lost: print

    return log


def compiled(lost_s: float) -> Callable[[], None]:
    """A compiled function whose graph breaks to call back into Python."""

    @torch.compiler.disable
    def lookup(x: Tensor) -> Tensor:
        time.sleep(lost_s)  # lost: compiled
        return x

    function = torch.compile(lambda x: lookup(x * 2) + 1, backend="eager")
    x = torch.ones(4)
    return lambda: (function(x), None)[1]


class Hook:
    """As a monitoring library's, which is told to look at each output."""

    def __init__(self, lost_s: float) -> None:
        self.lost_s = lost_s

    def look(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.summarize(output)

    def summarize(self, output: Tensor) -> None:
        time.sleep(self.lost_s)  # lost: hook


# --- the job -------------------------------------------------------------------------------------


class Items(Dataset[Tensor]):
    def __init__(self, count: int, lost_s: float) -> None:
        self.count, self.lost_s = count, lost_s

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> Tensor:
        return self.augment(torch.full((WIDTH,), float(place)))

    def augment(self, x: Tensor) -> Tensor:
        if self.lost_s:
            time.sleep(self.lost_s)  # lost: transform
        return x.sin()


class Sleeps(nn.Module):
    """x [rows, WIDTH] -> the same."""

    def __init__(self, extra: Callable[[], None] | None) -> None:
        super().__init__()
        self.layer, self.extra = nn.Linear(WIDTH, WIDTH), extra

    def forward(self, x: Tensor) -> Tensor:
        if self.extra is not None:
            self.extra()
        time.sleep(FORWARD_S)
        y: Tensor = self.layer(x)
        return y


class Ema:
    def __init__(self, model: nn.Module, lost_s: float) -> None:
        self.kept = [parameter.detach().clone() for parameter in model.parameters()]
        self.lost_s = lost_s

    def update(self, model: nn.Module) -> None:
        for kept, parameter in zip(self.kept, model.parameters(), strict=True):
            kept.lerp_(parameter.detach(), 0.01)
        time.sleep(self.lost_s)  # lost: ema


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--ms", type=float, required=True, help="that are lost in a step")
    parser.add_argument("--late", type=int, default=1, help="the rank that loses them, where it is one")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lost_s = args.ms / 1e3
    makes = {"branch": branch, "lock": lock, "print": print_to_pipe, "compiled": compiled}
    mine = dist.get_rank() == args.late
    module = Sleeps(makes[args.kind](lost_s) if mine and args.kind in makes else None)
    if mine and args.kind == "hook":
        module.layer.register_forward_hook(Hook(lost_s).look)
    model = nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ema = Ema(module, lost_s) if args.kind == "ema" else None
    per_item_s = lost_s / 4 if args.kind == "transform" else 0.0
    batches: Iterator[Tensor] = iter(DataLoader(Items(4 * args.steps, per_item_s), batch_size=4))
    for x in batches:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if ema is not None:
            ema.update(module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
