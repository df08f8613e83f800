"""One rank of a training on GPUs, or the one process on a CPU that it is held against. The argument is JSON:

config: the engine's; model: plain, pipeline; backend: nccl or gloo; resumed: save after the first step and go on with a
new engine; fails: the rank whose second step raises. The whole weights, and the losses, go to the current folder.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsprof import engine as ds
from dsprof.engine.pipe import LayerSpec, PipelineModule

WIDTH, STEPS, SAMPLES, MICROBATCHES = 16, 3, 8, 4
ASKED = json.loads(sys.argv[1])
RANK = int(os.environ["RANK"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        return y


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    return (output - labels).square().mean()


def start() -> Any:
    torch.manual_seed(0)
    model: nn.Module
    if ASKED["model"] == "pipeline":
        layers = [LayerSpec(Block) for _ in range(4)]
        stages = int(os.environ["WORLD_SIZE"])
        model = PipelineModule(layers, stages, loss_fn=loss_of, seed_layers=True, partition_method="uniform")
    else:
        model = nn.Sequential(*(Block() for _ in range(4)))
    return ds.initialize(model=model, config=ASKED["config"])[0]


def batch(engine: Any, step: int) -> tuple[Tensor, Tensor]:
    """This replica's samples of those that all replicas have, on the engine's device."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(SAMPLES, WIDTH, generator=generator) for _ in range(2))
    mesh = engine.parallel.mesh
    mine = slice(mesh.dp_rank * SAMPLES // mesh.dp, (mesh.dp_rank + 1) * SAMPLES // mesh.dp)
    return x[mine].to(engine.state.device), y[mine].to(engine.state.device)


def train(engine: Any, step: int) -> None:
    if step == 1 and ASKED.get("fails") == RANK:
        raise ArithmeticError("this rank fails")
    x, y = batch(engine, step)
    if ASKED["model"] == "pipeline":
        size = len(x) // MICROBATCHES
        engine.train_batch(iter(zip(x.split(size), y.split(size), strict=True)))
    else:
        engine.backward(loss_of(engine(x), y))
        engine.step()


def main() -> None:
    dist.init_process_group(
        ASKED["backend"], init_method=f"file://{os.path.abspath('store')}", rank=RANK,
        world_size=int(os.environ["WORLD_SIZE"]), timeout=timedelta(seconds=60),
    )  # fmt: skip
    engine = start()
    for step in range(STEPS):
        train(engine, step)
        if step == 0 and ASKED.get("resumed"):
            engine.save_checkpoint("checkpoints", "first")
            engine.destroy()
            engine = start()
            engine.load_checkpoint("checkpoints", "first")
    engine.save_16bit_model(".", "weights.bin")
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
