"""The pairs of `fix_pairs.py`: jobs with one fault each, and the change that mends it.

Layers sleep, and links are slow because the kernel paces them, the engine models them or the device does: two cores
that others want, too, hold none of them up by much. FRESH were chosen, and committed, before any of them ran: nothing
may be tuned to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

STEPS: Final = "--steps 28"


@dataclass(frozen=True)
class Case:
    """A job with a fault.

    family: of the framework, or of what the job runs on
    code:   of the finding that is to offer the change
    script, args: of `prediction_jobs`; config: a JSON configuration that the job is given
    change: what is set where the finding offers nothing, or another knob is asked for; what that saves says `whatif`
    asked:  the change is this one, whatever the finding offers
    device: the job runs on a device that sleeps
    """

    name: str
    family: str
    code: str
    script: str
    args: str
    change: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 2
    config: Mapping[str, Any] | None = None
    asked: bool = False
    device: bool = False


def zero(stage: int = 2, *, accumulation: int = 1, **settings: Any) -> dict[str, Any]:
    """A configuration for both engines."""
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage, **settings},
    }


ZERO: Final = "zero_optimization."
GATHERS: Final = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
"""Parameters are gathered at each use."""
DEVELOPED: Final = (
    Case("d1 DDP, one bucket over a slow link", "ddp", "comm.large-bucket", "ddp.py",
         "--forward-ms 30 --layers 8 --width 256 --bucket-mb 1000 --link-mb 40", {"ddp.bucket_cap_mb": 0.5}),
    Case("d2 DDP, gradients fill a slow link", "ddp", "comm.volume", "ddp.py",
         "--forward-ms 12 --layers 4 --width 448 --link-mb 30", {"ddp.comm_hook": "bf16"}),
    Case("d3 DDP, four micro-batches that all reduce", "ddp", "comm.redundant-reduce", "ddp.py",
         "--forward-ms 8 --layers 4 --width 256 --link-mb 40 --accumulate 4", {"ddp.accumulate": 4}),
    Case("d4 DDP, buffers sent before each forward", "ddp", "comm.buffers", "ddp.py",
         "--forward-ms 24 --layers 4 --width 64 --link-mb 40 --buffer-mb 1.6", {"ddp.broadcast_buffers": False}),
    Case("d5 DDP, a bucket a layer", "ddp", "comm.small-messages", "ddp.py",
         "--forward-ms 15 --layers 48 --width 32 --bucket-mb 0.0001", {"ddp.bucket_cap_mb": 25}),
    Case("l1 DDP, samples that take 5 ms to read", "loader", "data.stall", "ddp.py",
         "--forward-ms 20 --layers 4 --batch-size 6 --read-ms 5", {"loader.num_workers": 1}),
    Case("l2 samples that take 6 ms to read, one rank", "loader", "data.stall", "ddp.py",
         "--forward-ms 26 --layers 4 --batch-size 10 --read-ms 6", {"loader.num_workers": 1}, ranks=1),
    Case("l3 the engine, samples that take 7 ms to read", "loader", "data.stall", "zero.py",
         "--zero-stage 2 --forward-ms 24 --layers 4 --batch-size 8 --read-ms 7", {"loader.num_workers": 1}),
    Case("g1 DDP, 150,000 objects walked every 2nd step", "ddp", "pause.gc", "ddp.py",
         "--forward-ms 22 --layers 3 --heap 150000 --collect-every 2", {"gc.freeze": True}),
    Case("f1 FSDP2, parameters gathered twice over a slow link", "fsdp2", "comm.redundant-gather", "fsdp.py",
         "--forward-ms 15 --layers 4 --width 256 --link-mb 30", {"fsdp2.reshard_after_forward": False}),
    Case("f2 FSDP2, 28 layers, each its own unit", "fsdp2", "comm.small-messages", "fsdp.py",
         "--forward-ms 14 --layers 28 --width 56", {"fsdp2.modules_per_unit": 8}),
    Case("p1 1F1B of two stages, two micro-batches", "pipeline", "pipeline.bubble", "pipeline.py",
         "--schedule 1F1B --micro-batches 2 --batch 16 --stage-ms 5 5", {"pipelining.microbatches": 8}, asked=True),
    Case("p2 GPipe of three stages, three micro-batches", "pipeline", "pipeline.bubble", "pipeline.py",
         "--schedule GPipe --micro-batches 3 --batch 24 --stage-ms 4 4 4", {"pipelining.microbatches": 12}, ranks=3,
         asked=True),
    Case("s1 DeepSpeed, reduce_bucket_size of 20,000", "deepspeed", "comm.small-messages", "zero_json.py",
         "--forward-ms 12 --layers 40 --width 128", {f"{ZERO}reduce_bucket_size": 5_000_000},
         config=zero(reduce_bucket_size=20_000)),
    Case("s2 DeepSpeed, stage 3 over a slow link where stage 2 fits", "deepspeed", "comm.redundant-gather",
         "zero_json.py", "--forward-ms 15 --layers 5 --width 256 --link-mb 40", {f"{ZERO}stage": 2},
         config=zero(3, stage3_prefetch_bucket_size=1, **GATHERS), asked=True),
    Case("s3 DeepSpeed, nothing gathered ahead", "deepspeed", "comm.exposed", "zero_json.py",
         "--forward-ms 30 --layers 6 --width 256 --link-mb 60", {f"{ZERO}stage3_prefetch_bucket_size": 200_000},
         config=zero(3, stage3_prefetch_bucket_size=1, **GATHERS), asked=True),
    Case("e1 the engine, reduce_bucket_size of 20,000", "engine", "comm.small-messages", "zero_json.py",
         "--own --forward-ms 12 --layers 40 --width 128", {f"{ZERO}reduce_bucket_size": 5_000_000},
         config=zero(reduce_bucket_size=20_000)),
    Case("e2 the engine, every reduction waited for", "engine", "comm.exposed", "zero_json.py",
         "--own --forward-ms 30 --layers 8 --width 256 --link 4e7", {f"{ZERO}overlap_comm": True},
         config=zero(reduce_bucket_size=70_000, overlap_comm=False)),
    Case("e3 the engine, four micro-batches that all reduce", "engine", "comm.redundant-reduce", "zero_json.py",
         "--own --forward-ms 9 --layers 4 --width 256 --link 6e7 --accumulate 4", {f"{ZERO}stage": 1},
         config=zero(2, accumulation=4, reduce_bucket_size=70_000, overlap_comm=False), asked=True),
    Case("e4 a stage of the engine that takes 2.6 times as long", "engine", "pipeline.imbalance", "pipeline.py",
         "--schedule engine --micro-batches 6 --layers 4 --stage-ms 3 7.8", {"pipeline.partition_method": [0, 5, 8]}),
)  # fmt: skip
FRESH: Final = (
    Case("d6 DDP, one bucket of 16 layers over another link", "ddp", "comm.large-bucket", "ddp.py",
         "--forward-ms 24 --layers 16 --width 192 --bucket-mb 1000 --link-mb 60", {"ddp.bucket_cap_mb": 0.4}),
    Case("d7 DDP, gradients fill a slower link", "ddp", "comm.volume", "ddp.py",
         "--forward-ms 18 --layers 9 --width 256 --link-mb 24", {"ddp.comm_hook": "fp16"}, asked=True),
    Case("d8 DDP, three micro-batches that all reduce", "ddp", "comm.redundant-reduce", "ddp.py",
         "--forward-ms 12 --layers 6 --width 192 --link-mb 24 --accumulate 3", {"ddp.accumulate": 3}),
    Case("d9 DDP, larger buffers sent before each forward", "ddp", "comm.buffers", "ddp.py",
         "--forward-ms 30 --layers 3 --width 48 --link-mb 60 --buffer-mb 4", {"ddp.broadcast_buffers": False}),
    Case("l4 DDP of three ranks, samples that take 4 ms to read", "loader", "data.stall", "ddp.py",
         "--forward-ms 30 --layers 5 --batch-size 9 --read-ms 4", {"loader.num_workers": 1}, ranks=3),
    Case("l5 workers started anew every eighth step", "loader", "data.stall", "workers.py",
         "--epoch 7 --open-ms 450 --workers 1 --forward-ms 20", {"loader.persistent_workers": True}),
    Case("g2 DDP, 240,000 objects walked every 3rd step", "ddp", "pause.gc", "ddp.py",
         "--forward-ms 16 --layers 4 --heap 240000 --collect-every 3", {"gc.freeze": True}),
    Case("f3 FSDP2, larger parameters gathered twice", "fsdp2", "comm.redundant-gather", "fsdp.py",
         "--forward-ms 24 --layers 3 --width 384 --link-mb 48", {"fsdp2.reshard_after_forward": False}),
    Case("p3 1F1B of three stages, three micro-batches", "pipeline", "pipeline.bubble", "pipeline.py",
         "--schedule 1F1B --micro-batches 3 --batch 36 --stage-ms 3 3 3", {"pipelining.microbatches": 9}, ranks=3,
         asked=True),
    Case("s4 DeepSpeed, more elements whole at once", "deepspeed", "comm.exposed", "zero_json.py",
         "--forward-ms 24 --layers 6 --width 224 --link-mb 40", {f"{ZERO}stage3_max_live_parameters": 1_000_000},
         config=zero(3, stage3_prefetch_bucket_size=120_000, stage3_max_live_parameters=60_000, **GATHERS),
         asked=True),
    Case("s5 DeepSpeed, stage 3 over another link", "deepspeed", "comm.redundant-gather", "zero_json.py",
         "--forward-ms 24 --layers 8 --width 192 --link-mb 60", {f"{ZERO}stage": 2},
         config=zero(3, stage3_prefetch_bucket_size=1, **GATHERS), asked=True),
    Case("e5 the engine, nothing gathered ahead", "engine", "comm.exposed", "zero_json.py",
         "--own --forward-ms 30 --layers 6 --width 256 --link 6e7", {f"{ZERO}stage3_prefetch_bucket_size": 200_000},
         config=zero(3, stage3_prefetch_bucket_size=0, **GATHERS), asked=True),
    Case("e6 the engine, stage 3 where stage 2 fits", "engine", "comm.redundant-gather", "zero_json.py",
         "--own --forward-ms 18 --layers 5 --width 256 --link 4e7", {f"{ZERO}stage": 2},
         config=zero(3, stage3_prefetch_bucket_size=0, **GATHERS), asked=True),
    Case("e7 a stage of three that takes 2.4 times as long", "engine", "pipeline.imbalance", "pipeline.py",
         "--schedule engine --micro-batches 7 --layers 3 --stage-ms 2.5 6 2.5",
         {"pipeline.partition_method": [0, 3, 5, 9]}, ranks=3),
    Case("t1 Trainer, samples that take 4 ms to read", "trainer", "data.stall", "trainer.py",
         "--forward-ms 20 --batch-size 8 --read-ms 4", {"loader.num_workers": 1}, ranks=1),
    Case("t2 Lightning, samples that take 6 ms to read", "trainer", "data.stall", "lightning_fit.py",
         "--forward-ms 25 --batch-size 7 --read-ms 6", {"loader.num_workers": 1}, ranks=1),
    Case("v1 a device, data loaded in the loop", "device", "data.stall", "on_sleeping_device.py",
         "faults.py --load-ms=120 --forward-ms=10 --backward-ms=20", {"loader.num_workers": 1}, device=True),
    Case("v2 a device, one bucket over a slow link", "device", "comm.large-bucket", "on_sleeping_device.py",
         "faults.py --width=512 --bandwidth=0.1 --latency-ms=0.4 --forward-ms=12 --backward-ms=24 --bucket-mb=100",
         {"ddp.bucket_cap_mb": 0.9}, device=True),
    Case("v3 a device, small buckets", "device", "comm.small-messages", "on_sleeping_device.py",
         "faults.py --blocks=16 --width=192 --forward-ms=2 --backward-ms=4 --latency-ms=7 --bucket-mb=0.1",
         {"ddp.bucket_cap_mb": 1}, device=True),
    Case("v4 a device, shards gathered when they are needed", "device", "comm.exposed", "on_sleeping_device.py",
         "faults.py --shard --blocks=8 --large-every=3 --large-mb=2 --bandwidth=0.1 --forward-ms=12 --backward-ms=24",
         {"fsdp2.forward_prefetch": 2}, device=True),
)  # fmt: skip
CASES: Final = (*DEVELOPED, *FRESH)
RATE: Final = "320mbit"
"""Of the loopback of a network namespace, in which all that LINKED run talks: 40 MB/s."""
LINKED: Final = (
    Case("n1 DDP, one bucket", "link", "comm.large-bucket", "ddp.py",
         "--forward-ms 30 --layers 8 --width 192 --bucket-mb 1000", {"ddp.bucket_cap_mb": 0.4}),
    Case("n2 DDP, gradients fill the link", "link", "comm.volume", "ddp.py",
         "--forward-ms 12 --layers 4 --width 320", {"ddp.comm_hook": "fp16"}, asked=True),
    Case("n3 DDP, four micro-batches that all reduce", "link", "comm.redundant-reduce", "ddp.py",
         "--forward-ms 8 --layers 4 --width 192 --accumulate 4", {"ddp.accumulate": 4}),
    Case("n4 the engine, every reduction waited for", "link", "comm.exposed", "zero_json.py",
         "--own --forward-ms 30 --layers 8 --width 192", {f"{ZERO}overlap_comm": True},
         config=zero(reduce_bucket_size=40_000, overlap_comm=False)),
    Case("n5 FSDP2, parameters gathered twice", "link", "comm.redundant-gather", "fsdp.py",
         "--forward-ms 15 --layers 4 --width 192", {"fsdp2.reshard_after_forward": False}),
    Case("n6 the engine, momenta travel as signs", "link", "comm.volume", "zero_json.py",
         "--own --forward-ms 12 --layers 4 --width 320",
         {"optimizer.type": "OneBitAdam", "optimizer.params.freeze_step": 3}, asked=True,
         config=zero(0)),
)  # fmt: skip
