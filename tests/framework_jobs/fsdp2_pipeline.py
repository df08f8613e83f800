"""FSDP2 over both ranks inside a pipeline, of which each rank has a whole one: its schedule reduces when all backwards
are done."""

from __future__ import annotations

import torch
import torch.distributed as dist
from steps import BATCH, STEPS, WIDTH, Block, write_losses
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

MICROBATCHES, STAGES = 4, 2

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "pipeline"))
torch.manual_seed(0)
stages = [
    PipelineStage(
        fully_shard(Block(), mesh=mesh["data"]), i, STAGES, torch.device("cpu"), group=mesh.get_group("pipeline")
    )
    for i in range(STAGES)
]
schedule = ScheduleInterleavedZeroBubble(stages, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)
optimizer = torch.optim.Adam([p for stage in stages for p in stage.submod.parameters()])
x, y = torch.randn(2, MICROBATCHES * BATCH, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
losses = []
for _ in range(STEPS):
    micro_batches: list[torch.Tensor] = []
    schedule.step(x, target=y, losses=micro_batches)
    optimizer.step()
    optimizer.zero_grad()
    losses += [loss.item() for loss in micro_batches]
write_losses(losses)
dist.destroy_process_group()
