"""A pipeline of the engine: a stage a rank, of blocks that take milliseconds. Arguments: the schedule; steps; how long
the host of the last stage takes for a block (ms)."""

from __future__ import annotations

import sys
import time
from typing import Any

import common
import sleeping_device as device
import torch
from torch import nn

from dsprof import engine as ds
from dsprof.engine.pipe import PipelineModule

SCHEDULE, STEPS, HOST_MS = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
MICROBATCHES, WIDTH = 4, 16


def mean(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (output - labels).square().mean()


common.join()
device.set_link(1000, 1000)
torch.manual_seed(0)
layers: list[nn.Module] = [common.Block(f"block{number}", WIDTH, 5, 10) for number in range(2 * common.WORLD)]
for layer in layers[-2:]:
    layer.register_forward_hook(lambda *_: time.sleep(HOST_MS / 1000))
module = PipelineModule(layers, common.WORLD, loss_fn=mean, partition_method="uniform")
config: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": MICROBATCHES,
    "gradient_clipping": 0.0,
    "steps_per_print": 10**6,
    "pipeline": {"schedule": SCHEDULE},
}
optimizer = torch.optim.SGD(module.parameters(), 0.01, foreach=False)
engine, *_ = ds.initialize(model=module, optimizer=optimizer, config=config)
data = [(torch.ones(2, WIDTH), torch.zeros(2, WIDTH))] * MICROBATCHES


def step(number: int) -> torch.Tensor:
    loss: torch.Tensor = engine.train_batch(iter(data))  # type: ignore[union-attr]
    return loss


common.train(step, STEPS)
engine.destroy()
torch.distributed.destroy_process_group()
