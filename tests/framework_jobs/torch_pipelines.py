"""torch.distributed.pipelining: every schedule that this torch has, one after the other, each with its own stages.

Writes order.<rank>.json: schedule -> what it says this rank is to do in a step, as torch writes actions: "1F0".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from steps import BATCH, WIDTH, Block, write_losses
from torch.distributed.pipelining import PipelineStage, schedules

MICROBATCHES, STEPS_EACH = 8, 2


def compute_actions(table: list[Any]) -> list[str]:
    """Those of a rank that compute, in their order; of two that may overlap, one after the other."""
    flat = [each for action in table if action is not None for each in (action.sub_actions or (action,))]
    return [str(action) for action in flat if action.is_compute_op]


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
found = {
    name: cls
    for name, cls in vars(schedules).items()
    if isinstance(cls, type) and issubclass(cls, schedules._PipelineSchedule) and name.startswith("Schedule")
}
losses, orders = [], {}
x, y = torch.randn(2, MICROBATCHES * BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
for name, cls in sorted(found.items()):
    torch.manual_seed(rank)
    single = issubclass(cls, schedules.PipelineScheduleSingle)
    numbers = [rank] if single else [rank, 2 * world - 1 - rank] if "V" in name else [rank, world + rank]
    stages = [PipelineStage(Block(), number, world if single else 2 * world, torch.device("cpu")) for number in numbers]
    optimizer = torch.optim.Adam([p for stage in stages for p in stage.submod.parameters()])
    schedule = cls(stages[0] if single else stages, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)
    table = getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order
    orders[name] = compute_actions(table[rank])
    for _ in range(STEPS_EACH):
        micro_batches: list[torch.Tensor] = []
        last = any(stage.is_last for stage in stages)
        inputs = (x,) if any(stage.is_first for stage in stages) else ()
        schedule.step(*inputs, **({"target": y, "losses": micro_batches} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item() for loss in micro_batches]
Path(f"order.{rank}.json").write_text(json.dumps(orders))
write_losses(losses)
dist.destroy_process_group()
