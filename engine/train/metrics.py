"""What an engine says while it trains: its monitors, curves, and a line every `steps_per_print` steps."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import monitors
from ..api.answers import Answers
from ..comm.comm import Comm
from ..comm.groups import Parallel
from ..hooks import Hooks


class Telling(Answers):
    """The part of an Engine that tells."""

    hooks: Hooks
    parallel: Parallel
    global_steps: int
    global_samples: int
    skipped_steps: int
    _losses: list[Tensor]
    _paced: tuple[int, float] | None

    def _start_monitors(self) -> monitors.Monitors:
        sizes: dict[str, int] = {comm.group.group_name: comm.size for comm in self._comms() if comm.group is not None}
        everyone = self.parallel.everyone

        def gather(samples: list[Any]) -> list[list[Any]] | None:
            if everyone.group is None:
                return [samples]
            everybody: list[Any] = [None] * everyone.size
            dist.all_gather_object(everybody, samples, group=everyone.group)
            return everybody if self.global_rank == 0 else None

        return monitors.start(
            self.config, self.hooks, model=self.module, device=self.device, rank=self.global_rank,
            group_size=lambda name: sizes.get(name or "", self.world_size), samples=lambda: self.global_samples,
            gather=gather,
        )  # fmt: skip

    def _comms(self) -> list[Comm]:
        parallel = self.parallel
        return [parallel.data, parallel.model, parallel.tensor, parallel.everyone, *self.zero.comms]

    @property
    def _tells_losses(self) -> bool:
        """Whether anybody reads the losses: on a GPU that is a synchronization."""
        return self.global_rank == 0 and (self.config.tensorboard.enabled or self.config.csv_monitor.enabled)

    def _tell(self) -> None:
        """At the end of a step: gauges for those who write curves, and a line every `steps_per_print` steps."""
        for comm in self.zero.comms:
            comm.poll()
        rates = self.get_lr()
        if self._losses:
            self.hooks.mark("train_loss", kind="gauge", value=torch.stack(self._losses).mean().item())
            self._losses.clear()
        if rates:
            self.hooks.mark("lr", kind="gauge", value=rates[0])
        if self.config.fp16.enabled:
            self.hooks.mark("loss_scale", kind="gauge", value=self.scaler.scale)
        every = self.config.steps_per_print
        if every and self.global_rank == 0 and (self.global_steps + 1) % every == 0:
            print(self._progress())

    def _progress(self) -> str:
        """What is printed every `steps_per_print` steps, of the one that ends; the speed is since the last line."""
        now = time.perf_counter()
        before, then = self._paced or (self.global_samples, now)
        self._paced = self.global_samples, now
        speed = (self.global_samples - before) / (now - then) if now > then else 0.0
        return (
            f"step={self.global_steps + 1}, skipped={self.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}, "
            f"samples/sec: {speed:0.3f}"
        )
