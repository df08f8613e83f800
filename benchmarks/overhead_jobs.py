"""What `overhead.py` trains: the example's model, cut and kept in step in four ways.

Each takes about 150 ms a step on a core. DistributedDataParallel runs in one process, its group is of one; the others
in two, each with one thread.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], None]
CONTEXT: Final = 256
MICROBATCHES: Final = 4


def _load_example() -> Any:
    path = Path(__file__).parent.parent / "examples" / "train_gpt.py"
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = _load_example()


def make_model() -> Any:
    torch.manual_seed(0)
    return example.GPT(256, CONTEXT, 48, 4, 16)


def batches(size: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Without end, each rank its own."""
    from torch.utils.data import DataLoader

    order = torch.Generator().manual_seed(rank)
    loader = DataLoader(example.StandardLibrary(CONTEXT), size, shuffle=True, drop_last=True, generator=order)
    while True:
        yield from loader


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def make_small() -> Any:
    """The same model with a quarter of the context and of the blocks."""
    torch.manual_seed(0)
    return example.GPT(256, CONTEXT // 4, 48, 4, 4)


def random_batches(size: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For it, without end: under callgrind, to read the example's data takes minutes."""
    order = torch.Generator().manual_seed(rank)
    while True:
        tokens = torch.randint(256, (size, CONTEXT // 4 + 1), generator=order)
        yield tokens[:, :-1], tokens[:, 1:]


@dataclass(frozen=True)
class Workload:
    """model: makes what is trained; data: of a batch size and a rank, its batches."""

    model: Callable[[], Any]
    data: Callable[[int, int], Iterator[tuple[Tensor, Tensor]]]


EXAMPLE: Final = Workload(make_model, batches)
SMALL: Final = Workload(make_small, random_batches)


def ddp(rank: int, size: int, work: Workload = EXAMPLE) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    return ordinary(DistributedDataParallel(work.model()), work.data(size, rank))


def fsdp2(rank: int, size: int, work: Workload = EXAMPLE) -> Step:
    """A unit a block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = work.model(), init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return ordinary(model, work.data(size, rank))


def ordinary(model: nn.Module, data: Iterator[tuple[Tensor, Tensor]]) -> Step:
    """Forward, backward and AdamW, and a look at the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        inputs, targets = next(data)
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


class Half(nn.Module):
    """The first blocks of the model, with what comes before them, or the others, with what comes after."""

    def __init__(self, model: Any, first: bool) -> None:
        super().__init__()
        middle = len(model.blocks) // 2
        self.blocks = model.blocks[:middle] if first else model.blocks[middle:]
        self.token, self.position = (model.token, model.position) if first else (None, None)
        self.norm, self.head = (None, None) if first else (model.norm, model.head)

    def forward(self, x: Tensor) -> Tensor:
        if self.token is not None and self.position is not None:
            x = self.token(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def pipeline(rank: int, size: int, work: Workload = EXAMPLE) -> Step:
    """Two stages under 1F1B; `size` sequences a micro-batch."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    half = Half(work.model(), first=rank == 0)
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(half.parameters(), lr=1e-3)
    data = work.data(size * MICROBATCHES, 0)

    def step() -> None:
        inputs, targets = next(data)
        if rank == 0:
            schedule.step(inputs)
        else:
            losses: list[Tensor] = []
            schedule.step(target=targets, losses=losses)
            sum(loss.item() for loss in losses)
        optimizer.step()
        optimizer.zero_grad()

    return step


def engine(rank: int, size: int) -> Step:
    """dsprof's own, ZeRO stage 2."""
    import dsprof.engine

    config = {
        "train_micro_batch_size_per_gpu": size,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    model = make_model()
    trainer, *_ = dsprof.engine.initialize(model=model, model_parameters=model.parameters(), config=config)
    data = batches(size, rank)

    def step() -> None:
        inputs, targets = next(data)
        loss = cross_entropy(trainer(inputs), targets)
        trainer.backward(loss)
        trainer.step()
        loss.item()

    return step


def launch_bound(rank: int, size: int) -> Step:
    """Many small operators, and a step of about 2 ms: a plain loop without a process group."""
    torch.manual_seed(rank)
    layers = [layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs = torch.randn(size, 16)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


@dataclass(frozen=True)
class Job:
    """make: of a rank and a batch size, a function that takes one step; batch_size: for about 150 ms a step."""

    make: Callable[[int, int], Step]
    ranks: int
    batch_size: int


JOBS: Final = {
    "ddp": Job(ddp, ranks=1, batch_size=5),
    "fsdp2": Job(fsdp2, ranks=2, batch_size=2),
    "pipeline": Job(pipeline, ranks=2, batch_size=2),
    "engine": Job(engine, ranks=2, batch_size=4),
}

COUNTED: Final = {
    "launch-bound": Job(launch_bound, ranks=1, batch_size=8),
    "ddp": Job(partial(ddp, work=SMALL), ranks=1, batch_size=4),
    "fsdp2": Job(partial(fsdp2, work=SMALL), ranks=2, batch_size=4),
    "pipeline": Job(partial(pipeline, work=SMALL), ranks=2, batch_size=2),
}
"""What `instructions.py` counts: shorter steps than JOBS have, in which the collectors weigh more."""
