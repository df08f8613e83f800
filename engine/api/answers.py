"""What a script asks of an engine: names and meanings are DeepSpeed's."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import monitors
from ..optim.loss_scaler import LossScaler
from ..zero import Zero
from .libraries import Surface


class Answers(Surface):
    """The part of an Engine that changes nothing."""

    module: nn.Module
    zero: Zero
    scaler: LossScaler
    optimizer: torch.optim.Optimizer | None
    _monitors: monitors.Monitors
    _norm: float | None
    _stepped: bool

    def train_batch_size(self) -> int:
        """Samples of a step over all ranks."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch on one rank."""
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches a step."""
        return self.config.gradient_accumulation_steps

    def zero_optimization(self) -> bool:
        """Whether any state is cut over the ranks."""
        return self.zero.settings.stage > 0

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return self.zero.settings.stage

    def fp16_enabled(self) -> bool:
        """Whether the model runs in fp16."""
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether the model runs in bf16."""
        return self.config.bf16.enabled

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward."""
        return self.scaler.scale

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients before clipping; None before the first."""
        return self._norm

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """The momentum (SGD) or betas (Adam) of each parameter group."""
        return [group.get("betas", group.get("momentum")) for group in self._groups()]

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed the weights: not at every micro-batch, and not after an overflow."""
        return self._stepped

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    @property
    def global_rank(self) -> int:
        """This process among all."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def local_rank(self) -> int:
        """This process among those of its host."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def world_size(self) -> int:
        """Processes of the job."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def dp_world_size(self) -> int:
        """Ranks that train on different data."""
        return self.zero.size

    def log_summary(self, show_straggler: bool = False) -> None:
        """Print the table of communications so far (`comms_logger`); with `show_straggler` on all ranks at once."""
        if self._monitors.comms is None:
            raise RuntimeError('engine.log_summary: write "comms_logger": {"enabled": true} in the configuration')
        self._monitors.comms.log_summary(show_straggler)

    def _groups(self) -> Iterable[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer is not None else ()
