"""What `gpu.py` trains, and on what: a GPT, torch's step by hand and the engine's, and the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from block import Block
from torch import Tensor, nn

CLIP, LR = 1.0, 1e-4
Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Size:
    vocabulary: int
    width: int
    layers: int
    heads: int
    length: int
    batch: int


LARGE = Size(50304, 2048, 18, 16, 2048, 4)
TINY = Size(128, 64, 2, 2, 32, 2)


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Parameter(torch.zeros(1, size.length, size.width))
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions[:, : ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def model(size: Size, device: torch.device, dtype: torch.dtype) -> GPT:
    """The same weights each time, made where they are used: on the host a billion of them would take long."""
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with device:
            return GPT(size)
    finally:
        torch.set_default_dtype(torch.float32)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, fused=True)


def plain(module: nn.Module) -> Step:
    """Torch's own training in mixed precision: masters in fp32, of whatever the model is in."""
    params = list(module.parameters())
    masters = [p.detach().float().clone() for p in params]
    optimizer = adamw(masters)

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = module(ids)
        loss.backward()
        for param, master in zip(params, masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
            param.grad = None
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)
        return loss

    return step


def configuration(stage: int, batch: int, dtype: torch.dtype, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": stage, **zero},
    }


def start_engine(module: nn.Module, config: dict[str, Any]) -> Any:
    import dsprof.engine

    engine, *_ = dsprof.engine.initialize(model=module, optimizer=adamw(module.parameters()), config=config)
    return engine


def step_of(engine: Any) -> Step:
    def step(ids: Tensor) -> Tensor:
        loss: Tensor = engine(ids)
        engine.backward(loss)
        engine.step()
        return loss

    return step


# --- the device


class Device:
    """What is asked of the device; of a CPU, what there is to say."""

    def __init__(self, kind: str) -> None:
        self.torch = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
        self.is_cuda = kind == "cuda"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch) if self.is_cuda else "cpu"

    @property
    def total(self) -> int | None:
        """Bytes of memory; None for a CPU."""
        return torch.cuda.get_device_properties(self.torch).total_memory if self.is_cuda else None

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)

    def used(self) -> int:
        return torch.cuda.memory_allocated(self.torch) if self.is_cuda else 0

    def peak(self) -> int:
        """Since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self.torch) if self.is_cuda else 0

    def reset_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.torch)


def tokens(size: Size, device: Device, seed: int, steps: int) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    shape = (size.batch, size.length)
    return [torch.randint(0, size.vocabulary, shape, generator=numbers).to(device.torch) for _ in range(steps)]
