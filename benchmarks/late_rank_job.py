"""Data-parallel training on gloo in which rank 1 is late for one known reason: the jobs of `late_ranks.py`.

torchrun --nproc-per-node 2 benchmarks/late_rank_job.py --cause gil
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import mmap
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, LATE = 384, 1
CGROUPS = Path("/sys/fs/cgroup")
QUOTA, LIMIT = "cpu", "memory"
"""Controllers of cgroups (v1)."""
CORES = 0.3
MEMORY, MAPPED, TOUCHED = 224 << 20, 320 << 20, 1500
"""Bytes that a rank may have, bytes of a file that it maps, and how many of its pages it looks at in a step."""
WINDOW = range(24, 34)
BUSY = "while True: pass"

Extra = Callable[[int], None]
"""What rank 1 does beside its work, in a step."""


def own_cgroup(controller: str) -> Path:
    """The folder of the cgroup (v1) that this process is in."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return CGROUPS / controller / path.lstrip("/")
    return CGROUPS / controller


@contextlib.contextmanager
def cgroup(controller: str, **settings: int) -> Iterator[None]:
    """This process in a cgroup of its own, below the one that it is in."""
    home = own_cgroup(controller)
    folder = home / f"dsprof-late-{os.getpid()}"
    folder.mkdir()
    try:
        for name, value in settings.items():
            (folder / f"{controller}.{name}").write_text(str(value))
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (home / "cgroup.procs").write_text(str(os.getpid()))
        folder.rmdir()


@contextlib.contextmanager
def quota() -> Iterator[Extra]:
    """A part of a core, in each tenth of a second."""
    with cgroup(QUOTA, cfs_period_us=100_000, cfs_quota_us=int(100_000 * CORES)):
        yield lambda step: None


@contextlib.contextmanager
def paging() -> Iterator[Extra]:
    """It looks at pages of a mapped file that does not fit into the memory that it may have."""
    with tempfile.NamedTemporaryFile(dir=os.environ.get("LATE_RANKS_DISK")) as file:
        for _ in range(MAPPED >> 20):
            file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        draw = random.Random(0)
        with mmap.mmap(file.fileno(), MAPPED, prot=mmap.PROT_READ) as mapped:
            mapped.madvise(mmap.MADV_RANDOM)

            def touch(step: int) -> None:
                for _ in range(TOUCHED):
                    mapped[draw.randrange(MAPPED)]

            with cgroup(LIMIT, limit_in_bytes=MEMORY):
                yield touch


@contextlib.contextmanager
def competitor() -> Iterator[Extra]:
    """Two other processes compute on its core."""
    os.sched_setaffinity(0, {1})
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    try:
        yield lambda step: None
    finally:
        for other in others:
            other.kill()
            other.wait()


@contextlib.contextmanager
def affinity() -> Iterator[Extra]:
    """Four threads of its own on one core."""
    os.sched_setaffinity(0, {1})
    stop, matrix = threading.Event(), torch.randn(256, 256)

    def multiply() -> None:
        while not stop.is_set():
            matrix @ matrix  # without the interpreter's lock, for the most part

    threads = [threading.Thread(target=multiply, name=f"helper-{number}") for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield lambda step: None
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def gil() -> Iterator[Extra]:
    """A Python thread that never rests."""
    stop = threading.Event()

    def count() -> None:
        number = 0
        while not stop.is_set():
            number += 1

    thread = threading.Thread(target=count, name="prefetcher")
    thread.start()
    try:
        yield lambda step: None
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def disk() -> Iterator[Extra]:
    """It reads a file that is in no cache."""
    with tempfile.NamedTemporaryFile(dir=os.environ.get("LATE_RANKS_DISK")) as file:
        file.write(os.urandom(1 << 20) * 48)
        file.flush()
        os.fsync(file.fileno())

        def read(step: int) -> None:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            while file.read(1 << 22):
                pass

        yield read


@contextlib.contextmanager
def collections() -> Iterator[Extra]:
    """The collector walks over many objects."""
    kept = [{"number": number, "more": [number]} for number in range(400_000)]
    yield lambda step: (gc.collect(), len(kept))[1] and None


@contextlib.contextmanager
def compilation() -> Iterator[Extra]:
    """A function is compiled anew for every shape."""
    torch._dynamo.config.cache_size_limit = 1000
    compiled = torch.compile(lambda x: torch.sin(x).sum(), backend="eager", dynamic=False)
    yield lambda step: compiled(torch.ones(step + 2)) and None


def write_log() -> None:
    time.sleep(0.06)


@contextlib.contextmanager
def branch() -> Iterator[Extra]:
    yield lambda step: write_log()


@contextlib.contextmanager
def window() -> Iterator[Extra]:
    """Late in some steps only."""
    yield lambda step: time.sleep(0.08 if step in WINDOW else 0.0)


@contextlib.contextmanager
def nothing() -> Iterator[Extra]:
    yield lambda step: None


CAUSES = {
    "quota": quota, "competitor": competitor, "affinity": affinity, "gil": gil, "disk": disk, "paging": paging,
    "gc": collections,
    "compilation": compilation, "branch": branch, "window": window, "work": nothing, "none": nothing,
}  # fmt: skip


class Model(nn.Module):
    """x [rows, WIDTH] -> the same, through a few products."""

    def __init__(self, extra: Extra) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)))
        self.extra, self.steps = extra, 0

    def forward(self, x: Tensor) -> Tensor:
        self.extra(self.steps)
        self.steps += 1
        y: Tensor = self.layers(x)
        return y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cause", choices=CAUSES, required=True)
    parser.add_argument("--steps", type=int, default=48)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if args.cause in ("competitor", "quota") and rank != LATE:
        os.sched_setaffinity(0, {0})
    rows = 384 * (3 if args.cause == "work" and rank == LATE else 1)
    with (CAUSES[args.cause] if rank == LATE else nothing)() as extra:
        model = nn.parallel.DistributedDataParallel(Model(extra))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(args.steps):
            loss = model(torch.randn(rows, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
