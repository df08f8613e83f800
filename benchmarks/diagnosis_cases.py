"""The cases of `diagnosis.py`: 120 jobs with a fault, of which some have two, and 100 without, all drawn from one seed.

Most faults are the families of `tests/verdict_cases.py`; what is here beside them is drawn in the same way, over the
same scripts: late ranks and unequal stages in more frameworks, two faults at once, and jobs without any.
"""

from __future__ import annotations

import json
import os
import platform
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from verdict_cases import FAMILIES, Draw, words
from verdict_truth import Job

from dsprof.atomic import write_atomically

FAULTY: Final = 120
HEALTHY: Final = 100


@dataclass(frozen=True)
class Case:
    """framework: what the job is written in; second: code of its second fault; fixes: words of which one has to be in
    one of the first two fixes of the first finding, whatever their case"""

    job: Job
    framework: str
    second: str | None = None

    @property
    def fixes(self) -> tuple[str, ...]:
        return RIGHT_FIX[self.job.first] if self.job.first else ()

    @property
    def place(self) -> list[int] | None:
        """The ranks that the fault is on; a stage of these jobs is one rank."""
        ranks: list[int] | None = self.job.where.get("ranks")
        return ranks or ([self.job.where["stage"]] if "stage" in self.job.where else None)


RIGHT_FIX: Final = {
    "pipeline.imbalance": ("stages that begin at", "to other stages"),
    "pipeline.bubble": ("micro_batches", "n_microbatches", "gradient_accumulation_steps", "microbatches", "schedule"),
    "pipeline.stall": ("the link of rank", "the network from"),
    "comm.small-messages": ("fully_shard",),
    "checkpoint.stall": ("async_save",),
    "eval.uneven": ("evaluat",),
    "data.stall": ("dataloader(", "num_workers", "persistent_workers", "training_data="),
    "rank.straggler": ("look at", "look for what only rank"),
    "moe.imbalance": ("balancing loss",),
}
"""Of each code: a fix for another cause than the code's, as a bucket size for a late rank, has none of these."""
FRAMEWORK: Final = {
    "pipeline.py": "torch pipelining", "fsdp.py": "FSDP2", "engine.py": "engine", "ddp.py": "DDP",
    "closure.py": "torch.optim", "mnist.py": "torch.optim", "workers.py": "DDP", "checkpoint.py": "DDP",
    "evaluation.py": "DDP", "nanogpt.py": "DDP", "ring.py": "DDP and p2p", "experts.py": "DDP and all-to-all",
    "gan.py": "DDP",
}  # fmt: skip


# --- faults -----------------------------------------------------------------------------------------


def slow_rank(draw: Draw, script: str, *more: str, steps: int = 50) -> Job:
    """A rank whose layers take longer."""
    ranks = draw.one(2, 3, 4)
    slow = draw.place(1, ranks)
    args = (*words(draw, slow_rank=slow, slow_by=draw.between(1.3, 1.15, 1.8)), *more)
    return Job(script, args, ranks, steps, "rank.straggler", {"ranks": [slow]})


def slow_rank_of_ddp(draw: Draw) -> Job:
    return slow_rank(draw, "ddp.py", "--forward-ms", str(draw.between(16, 12, 30)))


def slow_rank_of_fsdp(draw: Draw) -> Job:
    """Units so large that they are gathered beside what the layers take."""
    return slow_rank(draw, "fsdp.py", "--layers", "3", "--width", "512", "--forward-ms", str(draw.between(20, 16, 30)))


def slow_rank_of_engine(draw: Draw) -> Job:
    forward_ms = draw.between(20, 16, 30)
    return slow_rank(draw, "engine.py", "--zero-stage", str(draw.one(1, 0, 2, 3)), "--forward-ms", str(forward_ms))


def uneven_pipeline_of_engine(draw: Draw) -> Job:
    stages = draw.one(2, 3)
    slow = draw.place(1, stages)
    args = words(
        draw, pipeline=stages, accumulate=draw.one(16, 12, 20), slow_stage=slow, slow_by=draw.between(2.2, 1.7, 3.0),
        zero_stage=0, forward_ms=4,
    )  # fmt: skip
    return Job("engine.py", args, stages, 30, "pipeline.imbalance", {"stage": slow}, ("pipeline.bubble",))


# --- two faults -------------------------------------------------------------------------------------


def slow_disk_and_slow_rank(draw: Draw) -> tuple[Job, str]:
    """One rank loads slowly, and another one computes slowly, but not as much."""
    ranks = draw.one(3, 4)
    late = draw.place(0, ranks)
    slow = (late + 1 + draw.place(0, ranks - 1)) % ranks
    args = words(
        draw, late_rank=late, late_ms=draw.between(50, 40, 70), slow_rank=slow, slow_by=draw.between(1.5, 1.4, 1.6),
        forward_ms=24,
    )  # fmt: skip
    return Job("ddp.py", args, ranks, 50, "data.stall", {"ranks": [late]}, ("rank.straggler",)), "rank.straggler"


def slow_rank_and_a_stop(draw: Draw) -> tuple[Job, str]:
    return FAMILIES["straggler and a stop"](draw), "pause.stop"


def uneven_stages_of_a_short_pipeline(draw: Draw) -> tuple[Job, str]:
    stages = draw.one(3, 4)
    slow = draw.place(1, stages)
    args = words(
        draw, schedule=draw.one("1F1B", "GPipe"), micro_batches=2 * stages, slow_stage=slow,
        slow_by=draw.between(2.2, 1.9, 3.0), forward_ms=4,
    )  # fmt: skip
    job = Job("pipeline.py", args, stages, 36, "pipeline.imbalance", {"stage": slow}, ("pipeline.bubble",))
    return job, "pipeline.bubble"


# --- healthy ----------------------------------------------------------------------------------------


def plain_ddp(draw: Draw) -> Job:
    args = words(
        draw, forward_ms=draw.between(20, 12, 50), layers=draw.one(4, 8, 12), width=draw.one(32, 128),
        batch_norm=draw.one(False, True), accumulate=draw.one(1, 2), two_optimizers=draw.one(False, True),
        lengths=draw.one(0.0, 0.2, 0.4), warm_up=draw.one(0, 8),
    )  # fmt: skip
    return Job("ddp.py", args, draw.one(2, 1, 3, 4), 60, None)


def plain_fsdp(draw: Draw) -> Job:
    args = words(draw, layers=draw.one(2, 3, 4), width=1024, forward_ms=draw.between(60, 40, 80))
    return Job("fsdp.py", args, 2, 30, None)


def plain_engine(draw: Draw) -> Job:
    args = words(draw, zero_stage=draw.one(0, 1, 2, 3), forward_ms=draw.between(20, 16, 40))
    return Job("engine.py", args, draw.one(2, 3), 60, None)


def long_pipeline(draw: Draw) -> Job:
    args = words(
        draw, schedule=draw.one("1F1B", "GPipe"), micro_batches=draw.one(24, 32), forward_ms=draw.between(6, 5, 8)
    )
    return Job("pipeline.py", args, 2, 30, None)


def shared_evaluation(draw: Draw) -> Job:
    args = words(draw, validates="all ranks", every=draw.one(10, 15, 20), batches=draw.one(6, 10))
    return Job("evaluation.py", args, draw.one(2, 3), 60, None)


def several_backwards(draw: Draw) -> Job:
    args = words(draw, forward_ms=draw.between(8, 6, 10), ddp=True, critic_steps=draw.one(1, 3, 5))
    return Job("gan.py", args, 2, 45, None)


ONE_FAULT: Final[tuple[Callable[[Draw], Job], ...]] = (
    *(FAMILIES[name] for name in (
        "uneven pipeline", "pipeline with few micro-batches", "slow link between stages", "FSDP2 with many units",
        "checkpoints", "evaluation on rank 0", "nanoGPT", "late loader and BatchNorm", "workers started anew", "ring",
        "experts", "two loaders",
    )),
    slow_rank_of_ddp, slow_rank_of_fsdp, slow_rank_of_engine, uneven_pipeline_of_engine,
)  # fmt: skip
TWO_FAULTS: Final = (slow_disk_and_slow_rank, slow_rank_and_a_stop, uneven_stages_of_a_short_pipeline)
NO_FAULT: Final = (plain_ddp, plain_fsdp, plain_engine, long_pipeline, shared_evaluation, several_backwards)
EVERY_FIFTH: Final = 5
"""Of the jobs with a fault one in so many has two."""


def cases(seed: int) -> dict[str, Case]:
    """All of them by name, healthy ones among the others, so that the first ones are of every kind."""
    found: dict[str, Case] = {}
    for number in range(max(FAULTY, HEALTHY)):
        if number < FAULTY:
            found[f"fault {number:03d}"] = faulty_case(seed, number)
        if number < HEALTHY:
            found[f"healthy {number:03d}"] = healthy_case(seed, number)
    return found


def faulty_case(seed: int, number: int) -> Case:
    """The same whenever seed and number are: each kind of fault in turn, all else drawn."""
    draw = Draw(random.Random(f"{seed} fault {number}"))
    if number % EVERY_FIFTH == EVERY_FIFTH - 1:
        job, second = TWO_FAULTS[number // EVERY_FIFTH % len(TWO_FAULTS)](draw)
        return Case(job, FRAMEWORK[job.script], second)
    job = ONE_FAULT[(number - number // EVERY_FIFTH) % len(ONE_FAULT)](draw)
    return Case(job, FRAMEWORK[job.script])


def healthy_case(seed: int, number: int) -> Case:
    draw = Draw(random.Random(f"{seed} healthy {number}"))
    job = NO_FAULT[number % len(NO_FAULT)](draw)
    return Case(job, FRAMEWORK[job.script])


# --- their results ----------------------------------------------------------------------------------


def share(told: Iterable[bool]) -> str:
    """`3 of 4`."""
    every = list(told)
    return f"{sum(every)} of {len(every)}"


def keep(
    output: Path, what: str, seed: int, summary: Mapping[str, Any], each: Mapping[str, Any], drawn: Iterable[str]
) -> None:
    """Write what was found of each case, in the order in which they were drawn."""
    result = {
        "what": what,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        "seed": seed,
        "summary": summary,
        "each": {name: each[name] for name in drawn if name in each},
    }
    write_atomically(output, json.dumps(result, indent=1) + "\n")
