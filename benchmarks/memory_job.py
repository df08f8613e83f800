"""A small model trained by dsprof's engine or FSDP2, whose tensors' memory is counted: what `memory_peaks.py` runs.

`memory_counted.c`, preloaded, counts what torch's allocator of host memory holds. dsprof's sampler reads that in the
place of the resident memory, as it reads the allocator of a GPU.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsprof.collectors.memory import memory_sampler
from dsprof.collectors.memory.process_memory import HostMemory

COUNTED = ctypes.CDLL(None)
for _name in ("counted_now", "counted_peak"):
    getattr(COUNTED, _name).restype = ctypes.c_size_t


class CountedMemory(HostMemory):
    before = 0
    """What there was when the job began."""

    def now(self) -> tuple[int, int]:
        return max(COUNTED.counted_now() - self.before, 0), super().now()[1]

    def resident_peak(self, resident: int = 0) -> int:
        return int(COUNTED.counted_peak()) - self.before


class Block(nn.Module):
    def __init__(self, width: int, recompute: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and self.training:
            y: Tensor = checkpoint(self.inside, x, use_reentrant=False)
            return y
        return self.inside(x)

    def inside(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


class Model(nn.Module):
    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(job["width"], job["recompute"]) for _ in range(job["layers"]))
        self.head = nn.Linear(job["width"], 8)
        for block in self.blocks[: job.get("frozen", 0)]:
            block.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y.float().square().mean()


def under_engine(job: dict[str, Any], steps: int) -> None:
    from dsprof import engine as deepspeed

    model = Model(job)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=job["config"])
    of_the_step = engine.config.gradient_accumulation_steps
    for _ in range(steps * of_the_step):
        batch = torch.ones(job["config"]["train_micro_batch_size_per_gpu"], job["tokens"], job["width"])
        engine.backward(engine(batch.to(next(iter(model.parameters())).dtype)))
        engine.step()


def under_fsdp2(job: dict[str, Any], steps: int) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = Model(job)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if job["mixed"] else MixedPrecisionPolicy()
    each = job["blocks_a_unit"]
    for at in range(0, len(model.blocks), each):
        fully_shard(list(model.blocks[at : at + each]) if each > 1 else model.blocks[at], mp_policy=policy,
                    reshard_after_forward=job["reshard"])  # fmt: skip
    fully_shard(model, mp_policy=policy, reshard_after_forward=job["reshard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=job["foreach"])
    for _ in range(steps):
        model(torch.ones(job["batch"], job["tokens"], job["width"])).backward()
        optimizer.step()
        optimizer.zero_grad()


def train(job: dict[str, Any], rank: int, store: str, ranks: int, steps: int = 4) -> int:
    """In a process of its own. The peak of what was counted, in bytes."""
    from dsprof.collectors.arm import autoload
    from dsprof.collectors.capture import session

    COUNTED.counted_reset()
    CountedMemory.before = COUNTED.counted_now()
    memory_sampler.HostMemory = CountedMemory  # type: ignore[misc]
    autoload()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    {"engine": under_engine, "fsdp2": under_fsdp2}[job["framework"]](job, steps)
    peak = COUNTED.counted_peak() - CountedMemory.before
    session.stop()
    return int(peak)
