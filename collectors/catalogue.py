"""The collectors of a capture, in the order in which they are installed. To add one, add a line."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Final, NamedTuple

from .capture.open_capture import Collector
from .communication import (
    call_sites,
    collectives,
    process_groups,
    sharding,
    symmetric_memory,
    tensor_parallel,
)
from .devices import device_times, host_sync, nvml, torch_profiler, training_device
from .failures import uncaught_exception, watchdog
from .frameworks import deepspeed, dsprof_engine
from .host import gc_and_cpu_time, machine_load
from .loop import checkpoints, compilation, flops, modules, optimizers, phases, pipelining
from .memory import memory_sampler

COLLECTORS: Final[dict[str, Collector]] = {
    "collectives": lambda capture: [collectives.install(capture.recorder), *symmetric_memory.install()],
    "modules": lambda capture: [modules.install(capture.recorder, every=capture.full)],
    "phases": lambda capture: phases.install(capture.recorder),
    "optimizers": lambda capture: [optimizers.install(capture.recorder, capture.step_ended)],
    "pipelining": lambda capture: pipelining.install(capture.recorder),
    "checkpoints": lambda capture: checkpoints.install(capture.recorder),
    "compilation": lambda capture: [compilation.install(capture.recorder)],
    "sharding": lambda capture: sharding.install(capture.recorder, capture.before_end.append),
    "tensor-parallelism": lambda capture: tensor_parallel.install(),
    "deepspeed": lambda capture: deepspeed.install(capture.recorder, capture.step_ended),
    "engine": lambda capture: [dsprof_engine.install(capture.recorder, capture.step_ended)],
    "host": gc_and_cpu_time.install,
    # After the host, so that what a step used does not hold what counting it costs.
    "flops": flops.install,
    "devices": training_device.install,
    "device-times": device_times.install,
    "process-groups": process_groups.install,
    "watchdog": watchdog.install,
    "uncaught": uncaught_exception.install,
    "call-sites": call_sites.install,
    "memory": memory_sampler.install,
    "nvml": nvml.install,
    "host-load": machine_load.install,
    "host-sync": host_sync.install,
    # Last, so that of the steps that it profiles nothing else is disturbed by its beginning.
    "deep": torch_profiler.install,
}
"""By the names that `DSPROF_WITHOUT` knows them by."""


class About(NamedTuple):
    """What `dsprof doctor` says of a collector. needs: GPU, NVML, NATIVE, or a package's name: without any of these it
    records nothing."""

    group: str
    records: str
    needs: tuple[str, ...] = ()


GPU: Final = "gpu"
NVML: Final = "nvml"
NATIVE: Final = "native"
"""The native helper, which a C++ compiler builds."""
LOOP, COMMUNICATION, DEVICES = "the training loop", "communication", "GPUs"
MEMORY, FRAMEWORKS, TROUBLE = "memory and host", "frameworks", "closer looks"

ABOUT: Final[dict[str, About]] = {
    "modules": About(LOOP, "forward; at --level full each module, with the native helper in backward, too"),
    "phases": About(LOOP, "backward, and waiting for the DataLoader"),
    "optimizers": About(LOOP, "optimizer steps, which end the training step"),
    "checkpoints": About(LOOP, "saving checkpoints: torch.save, DCP, safetensors and trainers"),
    "compilation": About(LOOP, "the time that torch.compile takes for itself"),
    "pipelining": About(LOOP, "torch.distributed.pipelining: each stage's micro-batches, and the schedule"),
    "collectives": About(COMMUNICATION, "every collective, send and receive, and every wait for one"),
    "process-groups": About(COMMUNICATION, "which process groups there are, and their ranks"),
    "call-sites": About(COMMUNICATION, "which lines of the script issue which collectives"),
    "sharding": About(COMMUNICATION, "how FSDP divides the model, and its own work for that"),
    "tensor-parallelism": About(COMMUNICATION, "which groups are for tensor parallelism"),
    "devices": About(DEVICES, "which GPU a rank trains on", (GPU,)),
    "device-times": About(DEVICES, "when phases and communications ran on the GPU's streams", (GPU, NATIVE)),
    "host-sync": About(
        DEVICES, "where the script waits for the GPU: synchronize; with the native helper .item() and copies", (GPU,)
    ),
    "nvml": About(DEVICES, "clocks and what holds them down, power, heat, memory errors, links", (GPU, NVML)),
    "memory": About(MEMORY, "memory after each step and what it is for; at --level full CUDA's allocation history"),
    "host": About(MEMORY, "garbage collection, CPU time, waiting for a core"),
    "host-load": About(MEMORY, "what else keeps cores, disks and network busy; DataLoader workers", ("psutil",)),
    "deepspeed": About(FRAMEWORKS, "DeepSpeed's engine: what it reduces, gathers and updates", ("deepspeed",)),
    "engine": About(FRAMEWORKS, "dsprof's own engine, by what it tells itself"),
    "flops": About(TROUBLE, "at --level full the floating-point operations of a step", (NATIVE,)),
    "deep": About(TROUBLE, "with --deep A:B torch.profiler's view of a few steps"),
    "uncaught": About(TROUBLE, "the exception that ends a rank: type, message, and the line of the script"),
    "watchdog": About(TROUBLE, "where each thread stands, once a rank has stood still for --hang-timeout"),
}
"""Of each, group by group."""


def without(names: str) -> frozenset[str]:
    """The collectors that `nvml,host-sync` names; nothing for an empty text. Raises ValueError."""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in COLLECTORS:
            near = get_close_matches(name, COLLECTORS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(COLLECTORS))}"
            raise ValueError(f"{name!r} is no collector; {hint}")
    return frozenset(chosen)
