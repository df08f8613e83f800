"""The collectors of a capture, in the order in which they are installed. To add one, add a line."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Final

from . import (
    call_sites,
    checkpoints,
    collectives,
    compilation,
    deep,
    device_times,
    devices,
    engine_events,
    flops,
    host,
    host_load,
    host_sync,
    memory,
    modules,
    nvml,
    optimizers,
    phases,
    pipelining,
    process_groups,
    sharding,
    watchdog,
)
from .collector import Collector
from .frameworks import deepspeed, tensor_parallel

COLLECTORS: Final[dict[str, Collector]] = {
    "collectives": lambda capture: [collectives.install(capture.recorder)],
    "modules": lambda capture: [modules.install(capture.recorder, every=capture.full)],
    "phases": lambda capture: phases.install(capture.recorder),
    "optimizers": lambda capture: [optimizers.install(capture.recorder, capture.step_ended)],
    "pipelining": lambda capture: pipelining.install(capture.recorder),
    "checkpoints": lambda capture: checkpoints.install(capture.recorder),
    "compilation": lambda capture: [compilation.install(capture.recorder)],
    "sharding": lambda capture: sharding.install(capture.recorder, capture.before_end.append),
    "tensor-parallelism": lambda capture: tensor_parallel.install(),
    "deepspeed": lambda capture: deepspeed.install(capture.recorder, capture.step_ended),
    "engine": lambda capture: [engine_events.install(capture.recorder, capture.step_ended)],
    "host": host.install,
    # After the host, so that what a step used does not hold what counting it costs.
    "flops": flops.install,
    "devices": devices.install,
    "device-times": device_times.install,
    "process-groups": process_groups.install,
    "watchdog": watchdog.install,
    "call-sites": call_sites.install,
    "memory": memory.install,
    "nvml": nvml.install,
    "host-load": host_load.install,
    "host-sync": host_sync.install,
    # Last, so that of the steps that it profiles nothing else is disturbed by its beginning.
    "deep": deep.install,
}
"""By the names that `DSPROF_WITHOUT` knows them by."""


def without(names: str) -> frozenset[str]:
    """The collectors that `nvml,host-sync` names; nothing for an empty text. Raises ValueError."""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in COLLECTORS:
            near = get_close_matches(name, COLLECTORS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(COLLECTORS))}"
            raise ValueError(f"{name!r} is no collector; {hint}")
    return frozenset(chosen)
