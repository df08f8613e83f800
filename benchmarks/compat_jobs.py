"""The jobs of `compat.py`, each of a second or two: `python compat_jobs.py JOB`, a process a rank.

Each prints its losses bit for bit. Everything is seeded, and two ranks add the same two numbers whoever comes first, so
a job that is captured must print what one that is not prints.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

STEPS = 6
WIDTH = 16


def batches() -> DataLoader[tuple[torch.Tensor, ...]]:
    """STEPS of them, of this rank's own."""
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    made = torch.randn(STEPS * 8, WIDTH, generator=generator)
    return DataLoader(TensorDataset(made, made.roll(1, 0)), batch_size=8)


def layers(count: int) -> torch.nn.Sequential:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(count)]
    )


def train(model: torch.nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def arming() -> list[float]:
    """One process, no process group: the capture opens with the first backward."""
    model = layers(2)
    losses = train(model)
    with tempfile.TemporaryFile() as file:
        torch.save(model.state_dict(), file)
    return losses


def ddp() -> list[float]:
    """Two ranks of DDP with buffers, and collectives of the script's own."""
    model = torch.nn.Sequential(layers(2), torch.nn.BatchNorm1d(WIDTH))
    losses = train(DistributedDataParallel(model))
    total = torch.tensor(losses)
    work = dist.all_reduce(total, async_op=True)
    assert work is not None
    work.wait()
    gathered = [torch.empty_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, total)
    dist.barrier()
    return [*losses, *total.tolist()]


def fsdp2() -> list[float]:
    """Two ranks of FSDP2, a unit a block and one around them."""
    from torch.distributed.fsdp import fully_shard

    model = layers(3)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return train(model)


def pipeline() -> list[float]:
    """Two stages, each on a rank of its own, four micro-batches, 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    stage = PipelineStage(layers(2)[rank], rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            made: list[torch.Tensor] = []
            schedule.step(target=y, losses=made)
            losses += [loss.item() for loss in made]
        optimizer.step()
    return losses


JOBS: dict[str, tuple[int, Callable[[], list[float]]]] = {
    "arming": (1, arming),
    "ddp": (2, ddp),
    "fsdp2": (2, fsdp2),
    "pipeline": (2, pipeline),
}
"""Name -> ranks and function."""


def main() -> None:
    ranks, job = JOBS[sys.argv[1]]
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{sys.argv[2]}", rank=int(os.environ["RANK"]), world_size=ranks
        )
    losses = job()
    if ranks > 1:
        dist.destroy_process_group()
    print(" ".join(loss.hex() for loss in losses))


if __name__ == "__main__":
    main()
