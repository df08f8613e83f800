"""Trains once for each of many cases, each in a process forked from this one, which has torch imported:
`python private_names_job.py CASES`, where CASES is a file of [[folder, job, [names that are taken away], settings]].

What a job computes is written to `out.json` of its folder, its capture below that.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.tensor.parallel
from hidden_names import hide
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from dsprof.collectors.arming.process import arm

STEPS = 2


class Block(torch.nn.Module):
    """Computes its layer again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = checkpoint(self.layer, x, use_reentrant=True)
        return made


def join() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def train(model: torch.nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x in DataLoader(torch.arange(STEPS * 8 * 4, dtype=torch.float32).reshape(-1, 4) / 64, batch_size=8):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def loop() -> list[float]:
    join()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Block(), torch.nn.BatchNorm1d(4))
    losses = train(torch.nn.parallel.DistributedDataParallel(model))
    total = torch.tensor(losses)
    work = dist.all_reduce(total, async_op=True)
    work.get_future().wait()
    work.wait()
    losses += functional.all_reduce(total, "sum", dist.group.WORLD).wait().tolist()
    with tempfile.TemporaryFile() as file:
        torch.save(model.state_dict(), file)
    return losses


def alone() -> list[float]:
    """No process group."""
    return train(torch.nn.Linear(4, 4))


def fsdp2() -> list[float]:
    join()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    fully_shard(model[0])
    return train(fully_shard(model))


def fsdp1() -> list[float]:
    join()
    return train(FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu")))


def pipeline() -> list[float]:
    join()
    stage = PipelineStage(torch.nn.Linear(4, 4), 0, 1, torch.device("cpu"))
    return step(ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss), [stage])


def pipelines() -> list[float]:
    """Two stages of one rank."""
    join()
    stages = [PipelineStage(torch.nn.Linear(4, 4), number, 2, torch.device("cpu")) for number in range(2)]
    return step(ScheduleInterleaved1F1B(stages, 2, loss_fn=torch.nn.functional.mse_loss), stages)


def step(schedule: Any, stages: list[PipelineStage]) -> list[float]:
    optimizer = torch.optim.SGD([one for stage in stages for one in stage.submod.parameters()], lr=0.1)
    losses: list[torch.Tensor] = []
    for _ in range(STEPS):
        schedule.step(torch.ones(4, 4), target=torch.zeros(4, 4), losses=losses)
        optimizer.step()
    return [loss.item() for loss in losses]


def compiled() -> list[float]:
    """What Dynamo calls back at a compilation, without the seconds that one takes."""
    from torch._dynamo.callback import callback_handler

    callback_handler.run_start_callbacks(None)
    callback_handler.run_end_callbacks(None)
    return alone()


JOBS = {job.__name__: job for job in (loop, alone, fsdp2, fsdp1, pipeline, pipelines, compiled)}


def run(folder: Path, job: str, names: list[str], settings: dict[str, str]) -> dict[str, Any]:
    for name in names:
        hide(name)
    os.environ.update(settings)
    if settings:
        arm()
    torch.manual_seed(0)
    losses = JOBS[job]()
    from dsprof.collectors.capture import session

    session.stop()
    return {"losses": [loss.hex() for loss in losses]}


def main() -> None:
    torch.set_num_threads(1)
    for folder, *case in json.loads(Path(sys.argv[1]).read_text()):
        Path(folder).mkdir(parents=True)
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            continue
        try:
            out = run(Path(folder), *case)
        except BaseException:
            out = {"raised": traceback.format_exc()}
        (Path(folder) / "out.json").write_text(json.dumps(out))
        os._exit(0)


if __name__ == "__main__":
    main()
