"""The collectors of a capture, a record each, in the order in which they are installed. To add one, write its module
and add a record here: the capture, `dsprof doctor`, the verdict and docs/collectors.md read this table.

The records are plain data: the analyzer reads them where there is no torch, and the module of a collector is imported
when a capture opens, so that none that fails to import takes the others with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dsprof.words import did_you_mean

EVERYTHING: Final = "everything"
"""In the place of a finding's code: what the budget and every gain rest on."""

GPU: Final = "gpu"
NVML: Final = "nvml"
NATIVE: Final = "native"
"""The native helper, which a C++ compiler builds."""

LOOP, COMMUNICATION, DEVICES = "the training loop", "communication", "GPUs"
MEMORY, FRAMEWORKS, TROUBLE = "memory and host", "frameworks", "closer looks"
GROUPS: Final = (LOOP, COMMUNICATION, DEVICES, MEMORY, FRAMEWORKS, TROUBLE)
"""In the order in which a user reads of them."""


@dataclass(frozen=True)
class Collector:
    """What there is to know of a collector.

    module:     where it is, in this package; its function `install` takes the capture (`capture.open_capture`) and
                gives back what takes it away again
    group:      of GROUPS
    records:    what it records, in words
    needs:      GPU, NVML, NATIVE, or the name of a package: without any of these it records nothing
    judges:     codes of findings, and EVERYTHING: what cannot be judged without it. Of those that have none, a line of
                evidence is missing, or the MFU.
    proves:     codes of what may be found without it, but where nothing is found, nothing is proved
    each_call:  its hooks run for every communication, module, unit, action or call that waits for the device. Without
                the native helper they are Python, which would hold up a job on a device: it is not installed there.
    """

    module: str
    group: str
    records: str
    needs: tuple[str, ...] = ()
    judges: tuple[str, ...] = ()
    proves: tuple[str, ...] = ()
    each_call: bool = False


COLLECTORS: Final[dict[str, Collector]] = {
    "collectives": Collector(
        "communication.collectives", COMMUNICATION, "every collective, send and receive, and every wait for one",
        judges=(EVERYTHING,), proves=("run.hang", "run.desync"), each_call=True,
    ),
    "modules": Collector(
        "loop.modules", LOOP, "forward; at --level full each module, with the native helper in backward, too",
        judges=(EVERYTHING, "eval.uneven"), each_call=True,
    ),
    "phases": Collector(
        "loop.phases", LOOP, "backward, and waiting for the DataLoader",
        judges=(EVERYTHING,),
    ),
    "optimizers": Collector(
        "loop.optimizers", LOOP, "optimizer steps, which end the training step",
        judges=(EVERYTHING,),
    ),
    "loss-scale": Collector(
        "loop.loss_scale", LOOP, "steps that torch's GradScaler skips since gradients overflowed",
        judges=("precision.overflow",),
    ),
    "pipelining": Collector(
        "loop.pipelining", LOOP, "torch.distributed.pipelining: each stage's micro-batches, and the schedule",
        judges=("pipeline.bubble", "pipeline.imbalance", "pipeline.stall", "rank.straggler", "data.imbalance"),
        each_call=True,
    ),
    "checkpoints": Collector(
        "loop.checkpoints", LOOP, "saving checkpoints: torch.save, DCP, safetensors and trainers",
        judges=("checkpoint.stall", "pause.stop"),
    ),
    "activation-checkpoints": Collector(
        "loop.activation_checkpoints", LOOP, "which lines of the script have activations computed again in backward",
    ),
    "compilation": Collector(
        "loop.compilation", LOOP, "the time that torch.compile takes for itself; what it compiles again, and why",
        judges=("pause.stop", "compute.recompile"),
    ),
    "sharding": Collector(
        "communication.sharding", COMMUNICATION, "how FSDP divides the model, and its own work for that",
        judges=("comm.small-messages",), each_call=True,
    ),
    "tensor-parallelism": Collector(
        "communication.tensor_parallel", COMMUNICATION, "which groups are for tensor parallelism",
        judges=("comm.exposed", "comm.large-bucket", "comm.small-messages", "comm.volume"),
    ),
    "deepspeed": Collector(
        "frameworks.deepspeed", FRAMEWORKS, "DeepSpeed's engine: what it reduces, gathers and updates",
        needs=("deepspeed",), judges=(EVERYTHING,),
    ),
    "engine": Collector(
        "frameworks.dsprof_engine", FRAMEWORKS, "dsprof's own engine: its steps, communications, waits and copies",
        judges=(EVERYTHING,),
    ),
    "host": Collector(
        "host.gc_and_cpu_time", MEMORY, "garbage collection, CPU time, waiting for a core",
        judges=("pause.gc", "data.stall", "pause.stop", "compute.no-core"),
    ),
    # After the host, so that what a step used does not hold what counting it costs.
    "flops": Collector(
        "loop.flops", TROUBLE, "at --level full the floating-point operations of a step",
        needs=(NATIVE,),
    ),
    "devices": Collector(
        "devices.training_device", DEVICES, "which GPU a rank trains on",
        needs=(GPU,), judges=(EVERYTHING, "compute.throttle", "compute.host-sync"),
    ),
    "device-times": Collector(
        "devices.device_times", DEVICES, "when phases and communications ran on the GPU's streams",
        needs=(GPU, NATIVE), judges=(EVERYTHING, "pause.stop", "compute.host-sync"),
    ),
    "process-groups": Collector(
        "communication.process_groups", COMMUNICATION, "which process groups there are, and their ranks",
        judges=(EVERYTHING,),
    ),
    "watchdog": Collector(
        "failures.watchdog", TROUBLE, "where each thread stands, once a rank has stood still for --hang-timeout",
    ),
    "uncaught": Collector(
        "failures.uncaught_exception", TROUBLE,
        "the exception that ends a rank: type, message, and the line of the script",
    ),
    "call-sites": Collector(
        "communication.call_sites", COMMUNICATION, "which lines of the script issue which collectives",
        each_call=True,
    ),
    "memory": Collector(
        "memory.memory_sampler", MEMORY,
        "memory after each step and what it is for; at --level full CUDA's allocation history",
    ),
    "nvml": Collector(
        "devices.nvml", DEVICES, "clocks and what holds them down, power, heat, memory errors, links",
        needs=(GPU, NVML), judges=("compute.throttle",),
    ),
    "host-load": Collector(
        "host.machine_load", MEMORY, "what else keeps cores, disks and network busy; DataLoader workers",
        needs=("psutil",),
    ),
    "stacks": Collector(
        "host.stack_samples", TROUBLE,
        "where the training thread is, up to 25 times a second, for 0.1 % of a core (0.22 % of 30 s): in which lines a "
        "late rank differs from others",
    ),
    "host-sync": Collector(
        "devices.host_sync", DEVICES,
        "where the script waits for the GPU: synchronize; with the native helper .item() and copies",
        needs=(GPU,), judges=("compute.host-sync",), each_call=True,
    ),
    # Last, so that of the steps that it profiles nothing else is disturbed by its beginning.
    "deep": Collector(
        "devices.deep", TROUBLE,
        "torch.profiler's view of a few steps: with --deep A:B, or where the GPU may be waiting for launches",
    ),
}  # fmt: skip
"""By the names that `DSPROF_WITHOUT` knows them by."""


def without(names: str) -> frozenset[str]:
    """The collectors that `nvml,host-sync` names; nothing for an empty text. Raises ValueError."""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in COLLECTORS:
            hint = did_you_mean(name, COLLECTORS, otherwise=f"; there are {', '.join(sorted(COLLECTORS))}", show=str)
            raise ValueError(f"{name!r} is no collector{hint}")
    return frozenset(chosen)
