"""Jobs with nothing wrong: nothing may be said against any of them."""

from __future__ import annotations

import importlib.util
from typing import Final

from verdict_truth import Job


def _job(script: str, ranks: int | None, steps: int, *args: object, explained: bool = True) -> Job:
    return Job(script, tuple(map(str, args)), ranks, steps, None, explained=explained)


def _ddp(ranks: int, *args: object, steps: int = 60, explained: bool = True) -> Job:
    return _job("ddp.py", ranks, steps, "--forward-ms", 20, *args, explained=explained)


def _engine(ranks: int, stage: int, *args: object) -> Job:
    return _job("engine.py", ranks, 60, "--forward-ms", 20, "--zero-stage", stage, *args)


def _fsdp(ranks: int, units: int, width: int, forward_ms: int) -> Job:
    """A unit has 4 * width^2 bytes of parameters: large enough that their transfer takes longer than its latency."""
    return _job("fsdp.py", ranks, 40, "--layers", units, "--width", width, "--forward-ms", forward_ms)


def _spawned(ranks: int) -> Job:
    args = ("--forward-ms", "20", "--ranks", str(ranks))
    return Job("spawn.py", args, None, 60, None, own_ranks=ranks)


def _pipeline(stages: int, micro_batches: int, *args: object, forward_ms: int = 6) -> Job:
    return _job(
        "pipeline.py", stages, 36, "--micro-batches", micro_batches, "--forward-ms", forward_ms, *args
    )  # fmt: skip


PLAIN_DDP: Final = {
    "DDP, 2 ranks": _ddp(2),
    "DDP, 2 ranks, other seed": _ddp(2, "--seed", 7),
    "DDP, 3 ranks": _ddp(3),
    "DDP, 4 ranks": _ddp(4),
    "DDP, 1 rank": _ddp(1),
    "DDP, wide": _ddp(2, "--width", 256),
    "DDP, wide, 4 ranks": _ddp(4, "--width", 256, "--forward-ms", 30),
    "DDP, deep": _ddp(2, "--layers", 16),
    "DDP, short steps": _ddp(2, "--forward-ms", 12, steps=120),
    "DDP, long steps": _ddp(2, "--forward-ms", 60),
    "DDP, large batches": _ddp(2, "--batch-size", 64),
}
"""All of these have to be `healthy`, and not merely without a finding."""

HEALTHY: Final = {
    **PLAIN_DDP,
    "buffers, 2 ranks": _ddp(2, "--batch-norm"),
    "buffers, 3 ranks": _ddp(3, "--batch-norm"),
    "buffers, deep": _ddp(2, "--batch-norm", "--layers", 12),
    "FSDP2, 4 units": _fsdp(2, 4, 1024, 40),
    "FSDP2, 2 units": _fsdp(2, 2, 1024, 60),
    "FSDP2, 3 ranks": _fsdp(3, 2, 1024, 80),
    "FSDP2, 1 rank": _fsdp(1, 4, 256, 10),
    "pipeline 1F1B, 2 stages, 24 micro-batches": _pipeline(2, 24),
    "pipeline 1F1B, 2 stages, 32 micro-batches": _pipeline(2, 32),
    "pipeline GPipe, 2 stages, 24 micro-batches": _pipeline(2, 24, "--schedule", "GPipe"),
    "pipeline 1F1B, 3 stages, 40 micro-batches": _pipeline(3, 40, forward_ms=5),
    "engine, stage 0": _engine(2, 0),
    "engine, stage 1": _engine(2, 1),
    "engine, stage 2": _engine(2, 2),
    "engine, stage 3": _engine(2, 3),
    "engine, stage 2, 3 ranks": _engine(3, 2),
    "engine, stage 3, 3 ranks": _engine(3, 3),
    "engine, stage 1, accumulation": _engine(2, 1, "--accumulate", 3, "--forward-ms", 8),
    "engine, pipeline": _engine(2, 0, "--pipeline", 2, "--accumulate", 24, "--forward-ms", 6),
    "two optimizers": _ddp(2, "--two-optimizers"),
    "two optimizers, 3 ranks": _ddp(3, "--two-optimizers"),
    "accumulation of 2": _ddp(2, "--accumulate", 2),
    "accumulation of 4, 3 ranks": _ddp(3, "--accumulate", 4, "--forward-ms", 10),
    "evaluation every 10 steps": _job("evaluation.py", 2, 60, "--validates", "all ranks", "--every", 10),
    "evaluation every 5 steps, 3 ranks": _job("evaluation.py", 3, 60, "--validates", "all ranks", "--every", 5),
    "evaluation every 20 steps, long": _job(
        "evaluation.py", 2, 80, "--validates", "all ranks", "--every", 20, "--batches", 20
    ),
    "10 slow warm-up steps": _ddp(2, "--warm-up", 10),
    "10 slow warm-up steps, 3 ranks": _ddp(3, "--warm-up", 10),
    "torch.compile, aot_eager": _ddp(2, "--compile", "aot_eager"),
    "torch.compile, 1 rank": _ddp(1, "--compile", "aot_eager"),
    "torch.compile, inductor": _ddp(2, "--compile", "inductor"),
    "lengths vary by 20 %": _ddp(2, "--lengths", 0.2),
    "lengths vary by 50 %": _ddp(2, "--lengths", 0.5, steps=80),
    "lengths vary, 3 ranks": _ddp(3, "--lengths", 0.3),
    "GAN under DDP": _job("gan.py", 2, 50, "--forward-ms", 8, "--ddp"),
    "Lightning": _job("lightning_fit.py", None, 60, "--forward-ms", 20),
    "Lightning, 2 ranks": _job("lightning_fit.py", 2, 60, "--forward-ms", 20, "--ranks", 2),
    "spawned, 2 ranks": _spawned(2),
    "spawned, 3 ranks": _spawned(3),
    "a closure amid callbacks": _job("closure_loop.py", 2, 60, "--forward-ms", 20),
    "a closure amid callbacks, 3 ranks": _job("closure_loop.py", 3, 60, "--forward-ms", 20, "--log-every", 5),
    "GAN, the generator through the critic's DDP": _job("gan.py", 2, 50, "--forward-ms", 8, "--ddp", "--through-ddp"),
    "GAN, 5 steps of the critic": _job("gan.py", 2, 45, "--forward-ms", 5, "--ddp", "--critic-steps", 5),
    "Trainer": _job("trainer.py", None, 60, "--forward-ms", 20),
    "Trainer, 2 ranks": _job("trainer.py", 2, 60, "--forward-ms", 20),
}
NEEDS: Final = {"lightning_fit.py": "lightning", "trainer.py": "accelerate"}
"""Script -> the package that it cannot do without."""

LEAST_HEALTHY: Final = 50


def missing(job: Job) -> str | None:
    """The package that `job` needs and that is not installed."""
    needed = NEEDS.get(job.script)
    return needed if needed and importlib.util.find_spec(needed) is None else None
