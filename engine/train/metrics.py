"""What is reported of a training: its monitors, curves, and a line every `steps_per_print` steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .. import monitors
from ..comm.consensus import gather_objects
from ..training_state import Training


class Metrics:
    """Reports one training. `progress` makes the line that is printed, of samples a second, in the place of this
    class's own."""

    def __init__(self, training: Training, progress: Callable[[float], str] | None = None) -> None:
        self._training = training
        self._rank = training.parallel.mesh.rank
        self._progress = progress or self._line
        self._losses: list[Tensor] = []
        self._paced: tuple[int, float] | None = None
        """Samples seen at the last line, and when that was."""
        config = training.config
        self._curves = self._rank == 0 and (config.tensorboard.enabled or config.csv_monitor.enabled)
        """Whether anybody reads the losses: on a GPU that is a synchronization."""
        sizes = {str(comm.group.group_name): comm.size for comm in training.comms() if comm.group is not None}
        everyone = training.parallel.everyone
        self.monitors = monitors.start(
            training.config, training.hooks, model=training.module, device=training.device, rank=self._rank,
            group_size=lambda name: sizes.get(name or "", everyone.size), samples=lambda: training.global_samples,
            gather=partial(gather_objects, comm=everyone),
        )  # fmt: skip

    def start_clock(self) -> None:
        """A first micro-batch begins: samples a second count from here."""
        if self._paced is None:
            self._paced = self._training.global_samples, time.perf_counter()

    def note_loss(self, loss: Tensor, factor: float = 1) -> None:
        """A micro-batch's loss, for the curve of the step's mean."""
        if self._curves:
            self._losses.append(loss.detach().float() * factor)

    def forget_losses(self) -> None:
        """The step that they are of is not taken."""
        self._losses.clear()

    def report(self) -> None:
        """At the end of a step, before it is counted: gauges for curves, and a line every `steps_per_print` steps."""
        training = self._training
        for comm in training.zero.comms:
            comm.poll()
        rates = training.learning_rates()
        if self._losses:
            training.hooks.mark("train_loss", kind="gauge", value=torch.stack(self._losses).mean().item())
            self._losses.clear()
        if rates:
            training.hooks.mark("lr", kind="gauge", value=rates[0])
        if training.config.fp16.enabled:
            training.hooks.mark("loss_scale", kind="gauge", value=training.scaler.scale)
        every = training.config.steps_per_print
        if every and self._rank == 0 and (training.global_steps + 1) % every == 0:
            print(self._progress(self._samples_per_second()))

    def _samples_per_second(self) -> float:
        """Since the last line."""
        samples, now = self._training.global_samples, time.perf_counter()
        before, then = self._paced or (samples, now)
        self._paced = samples, now
        return (samples - before) / (now - then) if now > then else 0.0

    def _line(self, speed: float) -> str:
        """Of the step that ends."""
        training = self._training
        return (
            f"step={training.global_steps + 1}, skipped={training.skipped_steps}, lr={training.learning_rates()}, "
            f"mom={training.momenta()}, samples/sec: {speed:0.3f}"
        )
