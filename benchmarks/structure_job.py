"""A pipeline of layers that sleep, under torch.distributed.pipelining or dsprof's engine: what `structure.py` runs.

Each layer takes its ms for a forward, as many for the gradient of its input and as many for that of its weight. A core
is free while a layer sleeps, so that a busy machine disturbs it little.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from dsprof.engine.pipe.split_backward import later

WIDTH, SAMPLES = 16, 2


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, ms: float) -> Tensor:
        ctx.weight, ctx.ms = weight, ms
        time.sleep(ms / 1e3)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        weight, ms = ctx.weight, ctx.ms

        def weights() -> None:
            time.sleep(ms / 1e3)
            torch.autograd.backward([weight], [torch.ones_like(weight)])

        time.sleep(ms / 1e3)
        later(weights)
        return grads[0], None, None


class Layer(nn.Module):
    def __init__(self, ms: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.ms = ms

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Sleep.apply(x, self.weight, self.ms)
        return y


class Plain(Layer):
    """The same under torch, whose backward does not divide: a weight that autograd reaches by itself."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = PlainSleep.apply(x * (1.0 + self.weight), self.ms)
        return y


class PlainSleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ms: float) -> Tensor:
        ctx.ms = ms
        time.sleep(ms / 1e3)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.ms / 1e3)
        return grads[0], None


def under_engine(args: argparse.Namespace) -> None:
    from dsprof import engine as deepspeed

    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": args.micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": args.zero_stage},
        "pipeline": {"schedule": args.schedule, "virtual_stages": args.chunks},
    }
    model = deepspeed.PipelineModule(
        [Layer(ms) for ms in args.layer_ms], args.stages, loss_fn=F.mse_loss,
        partition_method=args.boundaries or "uniform", virtual_stages=args.chunks,
    )  # fmt: skip
    replicas = int(dist.get_world_size()) // args.stages
    x = torch.randn(SAMPLES * args.micro_batches * args.steps * replicas, WIDTH)
    loader = DataLoader(TensorDataset(x, x.flip(1)), batch_size=SAMPLES)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=loader, config=config
    )
    batches = iter(loader)
    for _ in range(args.steps):
        engine.train_batch(batches)


def under_torch(args: argparse.Namespace) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV

    world, ranks = dist.get_world_size(), args.stages
    mesh = init_device_mesh("cpu", (world // ranks, ranks), mesh_dim_names=("dp", "pp"))
    pp, dp = mesh.get_group("pp"), mesh.get_group("dp")
    rank, count = dist.get_rank(pp), ranks * args.chunks
    bounds = args.boundaries or [round(len(args.layer_ms) * i / count) for i in range(count + 1)]
    stages = []
    mine = [rank, count - 1 - rank] if args.schedule == "dualpipe-v" else range(rank, count, ranks)
    for index in mine:
        module: nn.Module = nn.Sequential(*(Plain(ms) for ms in args.layer_ms[bounds[index] : bounds[index + 1]]))
        if world > ranks:
            module = DistributedDataParallel(module, process_group=dp)
        stages.append(PipelineStage(module, index, count, torch.device("cpu"), group=pp))
    if args.schedule == "dualpipe-v":
        schedule: Any = ScheduleDualPipeV(stages, args.micro_batches, loss_fn=F.mse_loss)
    elif args.chunks > 1:
        schedule = ScheduleInterleaved1F1B(stages, args.micro_batches, loss_fn=F.mse_loss)
    else:
        kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[args.schedule]
        schedule = kind(stages[0], args.micro_batches, loss_fn=F.mse_loss)
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    for _ in range(args.steps):
        x = torch.randn(SAMPLES * args.micro_batches, WIDTH)
        given = {"target": x} if count - 1 in mine else {}
        schedule.step(*([x] if rank == 0 else []), **given)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=["engine", "torch"], default="engine")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--stages", type=int, default=2, help="ranks of a pipeline")
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--layer-ms", type=float, nargs="+")
    parser.add_argument("--boundaries", type=int, nargs="+")
    parser.add_argument("--zero-stage", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    under_engine(args) if args.framework == "engine" else under_torch(args)
    time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
