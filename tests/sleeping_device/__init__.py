"""A GPU that sleeps instead of computing, for a torch without CUDA: `cuda:0` tensors, streams, events, graphs and an
NCCL that runs on the device while the host goes on.

`import sleeping_device` before torch starts it: `build.py` makes its library, SLEEPING_DEVICE names its folder.
What the device does when is computed (timeline.hpp) and `log()` tells it, so that a profiler can be held against it.

timeline.hpp   streams, events, graphs: when each operation begins and ends
guard.cpp      what torch and profilers ask of its streams and events
memory.cpp     its allocators
tensors.cpp    how its tensors are made
copies.cpp     between host and device
kernels.cpp    all other operators
nccl.cpp       the backend `nccl` of torch.distributed
bindings.cpp   what of it is given to Python
build.py       compiles it, once for each torch
torch_cuda.py  torch.cuda on it
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

_LIBRARIES = Path(os.environ["SLEEPING_DEVICE"]) if "SLEEPING_DEVICE" in os.environ else None


def _load(folder: Path) -> Any:
    """Load the library and what it needs in their order: torch asks for CUDA's hooks while it is imported."""
    if "torch" in sys.modules:
        raise ImportError("import sleeping_device before torch")
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch_libraries = Path(spec.origin).parent / "lib"
    ours = folder / "sleeping_bindings.so"
    for library in (*(torch_libraries / f"lib{name}.so" for name in ("c10", "torch_cpu", "torch_python")), ours):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401

    loader = ExtensionFileLoader("sleeping_bindings", str(ours))
    bindings = importlib.util.module_from_spec(importlib.util.spec_from_loader("sleeping_bindings", loader))  # type: ignore[arg-type]
    loader.exec_module(bindings)
    return bindings


if _LIBRARIES is not None:
    _device = _load(_LIBRARIES)
    from . import torch_cuda

    torch_cuda.install(_device)
    kernel = _device.kernel
    """kernel(name, ms): a kernel of that length on the current stream."""
    log = _device.log
    """All that the device did so far, when it has done it: dicts of name, stream, launch_ns, reached_ns (its stream got
    to it), arrival_ns (it could begin but for other ranks), begin_ns and end_ns, of CLOCK_MONOTONIC. Waits of a stream
    for another one's event are `wait`, from reached_ns to end_ns."""

    def counts() -> dict[str, int]:
        """How often the device was asked, and told, what."""
        return {**_device.counts(), **torch_cuda.told}

    memory = _device.memory
    """allocated and peak bytes, allocations."""
    slow_down = _device.slow_down
    skip = _device.skip
    """skip(ms): host and device are that much later at once, as `now_ns` tells; CLOCK_MONOTONIC is not."""
    now_ns = _device.now_ns
    fail = _device.fail
    set_kernel = _device.set_kernel
    """set_kernel(us): the length of a kernel that has none of its own."""
    set_link = _device.set_link
    """set_link(latency_us, gb_per_s)"""
    reset_peak = _device.reset_peak
