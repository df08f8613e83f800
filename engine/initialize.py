"""`initialize`: from a model and a configuration to an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import lr, optim
from .comm import open_comm
from .config import Config, load
from .dataloader import make_dataloader
from .engine import Engine
from .hooks import Hooks
from .lane import Lane, open_lane
from .precision import loss_scaler, model_dtype
from .zero import Comms, Zero, ZeroSettings
from .zero.fetch import FetchSettings

ClientOptimizer = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None


def init_distributed(dist_backend: str | None = None, *, timeout: Any = None, init_method: str | None = None,
                     rank: int = -1, world_size: int = -1, **_: Any) -> None:  # fmt: skip
    """Join the job's process group, if that has not been done: NCCL with GPUs, else gloo. Alone without a launcher."""
    if dist.is_initialized():
        return
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if "RANK" not in os.environ and init_method is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=world_size, **({"timeout": timeout} if timeout else {})
    )
