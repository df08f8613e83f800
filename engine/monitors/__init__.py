"""DeepSpeed's debugging sections, fed by what the engine tells through `hooks` and by nothing else.

wall_clock.py     `wall_clock_breakdown`: time of forward, backward, reduction and step
comms_logger.py   `comms_logger`: communications by kind and size, and who is late
memory.py         `memory_breakdown`: memory at the ends of the phases
flops.py          `flops_profiler`: operations, parameters and time of each module
writers.py        `tensorboard` and `csv_monitor`: loss, learning rate and loss scale
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..hooks import Listener, subscribe
from .comms_logger import CommsLogger, Gather
from .flops import FlopsProfiler, timer_for
from .memory import MemoryBreakdown, meter_for
from .wall_clock import WallClock
from .writers import CsvWriter, TensorBoardWriter, Writer

if TYPE_CHECKING:
    from ..config import Config

Show = Callable[[str], None]


@dataclass(frozen=True)
class Monitors:
    """The sections that are switched on."""

    comms: CommsLogger | None
    """For `log_summary`."""

    stop: Callable[[], None]
    """Stop listening, and close what was written."""


def start(
    config: Config,
    *,
    model: nn.Module,
    device: torch.device,
    rank: int,
    group_size: Callable[[str | None], int],
    gather: Gather | None = None,
    show: Show = print,
) -> Monitors:
    """Listen for the sections that `config` enables. Rank 0 prints and writes; of the others only comms_logger listens.

    `group_size` tells the number of ranks of the group that a span names; `gather` is for the stragglers' table, see
    `CommsLogger`.
    """
    listeners: list[Listener] = []
    writers: list[Writer] = []
    comms = None
    if (section := config.comms_logger).enabled:
        comms = CommsLogger(
            rank=rank,
            group_size=group_size,
            only=None if section.prof_all else section.prof_ops,
            verbose=section.verbose,
            gather=gather,
            show=show,
        )
        listeners.append(comms)
    if rank == 0:
        every = config.steps_per_print or 1
        if config.wall_clock_breakdown:
            listeners.append(WallClock(every, show))
        if config.memory_breakdown:
            listeners.append(MemoryBreakdown(meter_for(device), every, show))
        if config.flops_profiler.enabled:
            listeners.append(FlopsProfiler(model, config.flops_profiler, timer_for(device), show))
        if config.tensorboard.enabled:
            writers.append(TensorBoardWriter(config.tensorboard, config.train_batch_size))
        if config.csv_monitor.enabled:
            writers.append(CsvWriter(config.csv_monitor, config.train_batch_size))
    unsubscribe = [subscribe(listener) for listener in (*listeners, *writers)]

    def stop() -> None:
        for end in unsubscribe:
            end()
        for writer in writers:
            writer.close()

    return Monitors(comms, stop)
