"""The rules, one file a family. To add one, add it to FAULTS or RULES.

A fault is a pair: what would go away if it were mended (`Context -> Change | None`), and what to say of it once its
share of the lost time is known. The other rules price their own what-ifs: `Context -> list[Finding]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..context import Context
from ..finding import Finding, Gain
from ..whatif.work import Change
from . import (
    checkpoint,
    comm,
    data,
    device,
    evaluation,
    hang,
    host_sync,
    host_work,
    memory,
    memory_use,
    out_of_memory,
    pause,
    pipeline,
    rank,
    run,
    stall,
    throttle,
)
from .base import LEAST_SHARE, NotConcerned, NotJudged, PartlyJudged

__all__ = [
    "ABOUT_GPUS", "FAULTS", "LEAST_SHARE", "ON_DEVICES", "PRICED_BY_REPLAY", "RULES", "NotConcerned", "NotJudged",
    "PartlyJudged",
]  # fmt: skip

PRICED_BY_REPLAY: Final = frozenset({"comm.small-messages", "comm.exposed", "pipeline.bubble"})
"""Of RULES: they say nothing where the replay does not give the measured steps."""

ABOUT_GPUS: Final = frozenset({"compute.throttle", "compute.host-sync"})
"""Of a job that uses none they say nothing."""
ON_DEVICES: Final = frozenset({"rank.straggler", "data.stall"})
"""Of RULES: they judge by themselves, where kernels were traced, what the faults of that code cannot."""

Describe = Callable[[Context, Change, Gain, Gain], Finding]
"""(context, change, its share of the lost time, the gain of mending it alone) -> finding."""

FAULTS: Final[dict[str, tuple[Callable[[Context], Change | None], Describe]]] = {
    "rank.straggler": (rank.slow_ranks, rank.straggler),
    "data.stall": (stall.waiting, stall.stall),
    "data.imbalance": (data.unequal, data.imbalance),
    "pause.gc": (pause.collections, pause.garbage_collection),
    "pipeline.imbalance": (pipeline.unbalanced, pipeline.imbalance),
}

RULES: Final[dict[tuple[str, ...], Callable[[Context], list[Finding]]]] = {
    ("run.hang", "run.desync"): hang.hang_or_desync,
    ("run.rank-died",): run.rank_died,
    ("data.stall",): stall.loaders,
    ("comm.small-messages", "comm.exposed"): comm.bucket_size,
    ("pipeline.bubble",): pipeline.bubble,
    ("eval.uneven",): evaluation.uneven,
    ("checkpoint.stall",): checkpoint.stall,
    ("pause.stop",): pause.stops,
    ("memory.fragmentation",): memory.fragmentation,
    ("memory.oom-risk",): out_of_memory.oom_risk,
    ("memory.growth",): memory_use.growth,
    ("memory.headroom",): memory_use.headroom,
    ("compute.host-sync",): host_sync.stops,
    ("compute.throttle",): throttle.throttle,
    ("compute.launch-bound",): device.launch_bound,
    ("compute.host-work",): host_work.elsewhere,
    ("checkpoint.stall", "data.stall"): host_work.loads_or_saves,
    ("rank.straggler",): device.collectives,
}
"""A rule or a fault that cannot be told from this capture raises NotJudged; one that is about something that the job
does not have, NotConcerned; one that can tell some of its codes, PartlyJudged."""
