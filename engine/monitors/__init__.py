"""DeepSpeed's debugging sections, fed by what the engine reports through `hooks` and by nothing else.

breakdown      `wall_clock_breakdown`: time of forward, backward, reduction and step; `memory_breakdown`: memory at the
               ends of the phases
comms_logger   `comms_logger`: communications by kind and size, and who is late
flops          `flops_profiler`: operations, parameters and time of each module
writers        `tensorboard` and `csv_monitor`: loss, learning rate, loss scale and times
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from ..config import Config
from ..hooks import Hooks, Listener
from .breakdown import MemoryBreakdown, WallClock, meter_for, timer_for
from .comms_logger import CommsLogger, Gather
from .flops import FlopsProfiler
from .writers import CsvWriter, Curves, TensorBoardWriter, Writer

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
    hooks: Hooks,
    *,
    model: nn.Module,
    device: torch.device,
    rank: int,
    group_size: Callable[[str | None], int],
    samples: Callable[[], int],
    gather: Gather | None = None,
    show: Show = print,
) -> Monitors:
    """Listen to `hooks` for the sections that `config` enables.

    Rank 0 prints and writes; of the others only comms_logger listens.

    `group_size` gives the number of ranks of the group that a span names, `samples` how many were seen, those of the
    step under way included; `gather` is for the stragglers' table, see `CommsLogger`.
    """
    opened = ExitStack()

    def listen(listener: Listener) -> None:
        opened.callback(hooks.subscribe(listener))

    comms = None
    if (section := config.comms_logger).enabled:
        comms = CommsLogger(
            rank=rank,
            group_size=group_size,
            only=None if section.prof_all else section.prof_ops,
            lanes_alone=device.type == "cuda",
            verbose=section.verbose,
            gather=gather,
            show=show,
        )
        listen(comms)
    if rank == 0:
        every = config.steps_per_print or 1
        writers: list[Writer] = []
        if config.tensorboard.enabled:
            writers.append(TensorBoardWriter(config.tensorboard))
        if config.csv_monitor.enabled:
            writers.append(CsvWriter(config.csv_monitor))
        curves = Curves(writers, samples)
        if writers:
            opened.callback(curves.close)
            listen(curves)
        if config.wall_clock_breakdown:
            timer = timer_for(device) if device.type == "cuda" else None
            listen(WallClock(every, show, curves.write if writers else None, timer))
        if config.memory_breakdown:
            listen(MemoryBreakdown(meter_for(device), every, show))
        if config.flops_profiler.enabled:
            listen(FlopsProfiler(model, config.flops_profiler, timer_for(device), show))
    return Monitors(comms, opened.close)
