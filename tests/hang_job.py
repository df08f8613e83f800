"""Jobs that hang, jobs whose ranks disagree, and jobs that are only slow: `hang_job.py CASE [SECONDS]`."""

from __future__ import annotations

import ctypes
import datetime
import io
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

CASE, SECONDS = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 12.0
CULPRIT = 1
FOREVER = 100_000


def begins() -> None:
    """Say when what the case is about begins, for who looks how soon that is told."""
    print(f"begins at {time.time():.3f}", file=sys.stderr, flush=True)


class Loaded(torch.utils.data.Dataset[torch.Tensor]):
    """Whose fifth sample never comes, on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rank == CULPRIT and index == 4:
            begins()
            time.sleep(FOREVER)  # the loader stands here
        return torch.ones(8)


class SlowFile(io.RawIOBase):
    """Takes long to write, and uses nothing of the host."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if not getattr(self, "slept", False):
            self.slept = True
            time.sleep(SECONDS)
        return len(data)


def ddp() -> Any:
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(inputs: torch.Tensor | None = None) -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 8) if inputs is None else inputs).sum().backward()
        optimizer.step()

    return step


def fsdp() -> Any:
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()

    return step


def pipeline() -> Any:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, world = dist.get_rank(), dist.get_world_size()
    layer = torch.nn.Linear(8, 8)
    stage = PipelineStage(layer, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda out, target: (out - target).sum())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step() -> None:
        if rank == 0:
            schedule.step(torch.ones(4, 8))
        elif rank == world - 1:
            schedule.step(target=torch.ones(4, 8))
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    return step


def engine() -> Any:
    import dsprof.engine as deepspeed

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    config = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2},
    }  # fmt: skip
    trained, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)

    def step() -> None:
        trained.backward(trained(torch.ones(4, 8)).sum())
        trained.step()

    return step


class Branches(torch.nn.Module):
    """Of which ranks take another one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.before, self.left, self.right = (torch.nn.Linear(8, 8, bias=False) for _ in range(3))
        self.after = torch.nn.Linear(8, 1, bias=False)
        self.rank, self.steps = rank, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        other = self.steps > 2 and self.rank == CULPRIT
        return self.after((self.right if other else self.left)(self.before(x)))


def branches() -> None:
    import dsprof.engine as deepspeed

    model = Branches(dist.get_rank())
    config = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {
            "stage": 3, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
        },
    }  # fmt: skip
    trained, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    for _ in range(4):
        trained.backward(trained(torch.ones(4, 8)).sum())
        trained.step()


def hold_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def look_busy() -> None:
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        pass


def slow_compiler(graph: Any, inputs: Any) -> Any:
    time.sleep(SECONDS)
    return graph.forward


def serve(listening: socket.socket) -> None:
    """1 MB/s to whoever connects first."""
    connection, _ = listening.accept()
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        connection.sendall(bytes(250_000))
        time.sleep(0.25)
    connection.close()


def download(rank: int) -> None:
    """One rank takes what another process sends, and uses next to no CPU."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = torch.tensor([listening.getsockname()[1]])
    dist.broadcast(port, 0)
    if rank == 0:
        threading.Thread(target=serve, args=(listening,)).start()
    if rank == CULPRIT:
        with socket.create_connection(("127.0.0.1", int(port))) as connection:
            while connection.recv(1 << 20):
                pass


ASLEEP = {
    "python": lambda: time.sleep(FOREVER),
    "c": lambda: ctypes.CDLL(None).sleep(FOREVER),
    "c-with-the-lock": lambda: ctypes.PyDLL(None).sleep(FOREVER),
    "lock": hold_a_lock,
    "late": lambda: time.sleep(SECONDS),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "left": lambda: (dist.destroy_process_group(), sys.exit(0)),
    "gone": lambda: os._exit(0),
    "busy": look_busy,
}
"""What one rank does in the place of its fourth step, in the job that each name begins with, if any."""


def main() -> None:
    short = {"timeout": datetime.timedelta(seconds=SECONDS)} if CASE == "torch-timeout" else {}
    dist.init_process_group("gloo", **short)
    rank, world = dist.get_rank(), dist.get_world_size()
    if CASE == "branches":
        branches()
        return
    kind, _, asleep = CASE.rpartition("/")
    step = {"fsdp": fsdp, "pipeline": pipeline, "engine": engine}.get(kind, ddp)()
    if CASE == "loader":
        for batch in torch.utils.data.DataLoader(Loaded(rank), batch_size=1, num_workers=1):
            step(batch)
    for _ in range(3):
        step()
    begins()
    if rank == CULPRIT and asleep in ASLEEP:
        ASLEEP[asleep]()
    if asleep in ASLEEP:
        step()
    if CASE == "torch-timeout" and rank == CULPRIT:
        time.sleep(FOREVER)
    if CASE == "order":
        calls = [lambda: dist.all_reduce(torch.ones(4)), lambda: dist.broadcast(torch.ones(4), 0)]
        for call in calls[:: -1 if rank == CULPRIT else 1]:
            call()
    if CASE == "size":
        dist.all_reduce(torch.ones(1000 + (rank == CULPRIT)))
    if CASE == "dtype-again":
        dist.all_reduce(torch.ones(1000))
    if CASE in ("dtype", "dtype-again"):
        dist.all_reduce(torch.ones(1000, dtype=torch.int32 if rank == CULPRIT else torch.float32))
    if CASE == "skipped" and rank != CULPRIT:
        dist.all_reduce(torch.ones(5))
    if CASE == "groups":
        groups = [dist.new_group(range(world)) for _ in range(2)]
        for group in groups[:: -1 if rank == CULPRIT else 1]:
            dist.barrier(group=group)
    if CASE == "both-receive" and rank < 2:
        dist.recv(torch.ones(4), 1 - rank)
    if CASE == "slow":  # a step of three time-outs
        for _ in range(int(SECONDS)):
            time.sleep(1)
            dist.all_reduce(torch.ones(4))
    if CASE == "download":
        download(rank)
    if CASE == "checkpoint" and rank == CULPRIT:
        torch.save({"weights": torch.ones(8)}, SlowFile())
    if CASE == "compile" and rank == CULPRIT:
        torch.compile(lambda x: x + 1, backend=slow_compiler)(torch.ones(4))
    if CASE == "evaluation" and rank == CULPRIT:
        quiet = torch.nn.Linear(8, 8)
        for _ in range(int(SECONDS)):
            time.sleep(1)
            quiet(torch.ones(4, 8))
    dist.barrier()
    for _ in range(2):
        step()
    dist.destroy_process_group()


main()
