"""The rules, one file a family. To add one, add it to FAULTS or RULES.

A fault is a pair: what would go away if it were mended (`Study -> Change | None`), and what to say of it once its
share of the lost time is known. The other rules price their own what-ifs: `Study -> list[Finding]`.

    run/  data/  comm/  pipeline/  memory/  compute/   the families; a folder's docstring says what is where
    missing_collectors   what cannot be judged since a collector was not there
    base                 what rules share
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..finding import Finding, Gain
from ..study import Study
from ..whatif.work import Change
from .base import LEAST_SHARE, NotConcerned, NotJudged, PartlyJudged
from .comm import ddp_buckets
from .compute import device_kernels, host_sync, host_work, throttle
from .data import data_stall, unequal_input
from .memory import fragmentation, growth_and_headroom, oom_risk
from .pipeline import bubble_and_imbalance
from .run import checkpoint_stall, gc_and_stops, hang_and_desync, rank_died, slow_rank, uneven_evaluation

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

Describe = Callable[[Study, Change, Gain, Gain], Finding]
"""(study, change, the gain of mending it alone, its share of what mending all gains) -> finding."""

FAULTS: Final[dict[str, tuple[Callable[[Study], Change | None], Describe]]] = {
    "rank.straggler": (slow_rank.slow_ranks, slow_rank.straggler),
    "data.stall": (data_stall.waiting, data_stall.stall),
    "data.imbalance": (unequal_input.unequal, unequal_input.imbalance),
    "pause.gc": (gc_and_stops.collections, gc_and_stops.garbage_collection),
    "pipeline.imbalance": (bubble_and_imbalance.unbalanced, bubble_and_imbalance.imbalance),
}

RULES: Final[dict[tuple[str, ...], Callable[[Study], list[Finding]]]] = {
    ("run.hang", "run.desync"): hang_and_desync.hang_or_desync,
    ("run.rank-died",): rank_died.rank_died,
    ("data.stall",): data_stall.loaders,
    ("comm.small-messages", "comm.exposed"): ddp_buckets.bucket_size,
    ("pipeline.bubble",): bubble_and_imbalance.bubble,
    ("eval.uneven",): uneven_evaluation.uneven,
    ("checkpoint.stall",): checkpoint_stall.stall,
    ("pause.stop",): gc_and_stops.stops,
    ("memory.fragmentation",): fragmentation.fragmentation,
    ("memory.oom-risk",): oom_risk.oom_risk,
    ("memory.growth",): growth_and_headroom.growth,
    ("memory.headroom",): growth_and_headroom.headroom,
    ("compute.host-sync",): host_sync.stops,
    ("compute.throttle",): throttle.throttle,
    ("compute.launch-bound",): device_kernels.launch_bound,
    ("compute.host-work",): host_work.elsewhere,
    ("checkpoint.stall", "data.stall"): host_work.loads_or_saves,
    ("rank.straggler",): device_kernels.collectives,
}
"""A rule or a fault that cannot be told from this capture raises NotJudged; one that is about something that the job
does not have, NotConcerned; one that can tell some of its codes, PartlyJudged."""
