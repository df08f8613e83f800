"""`get_accelerator()`: the GPU through torch.cuda, or the CPU, under the names DeepSpeed has for both."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from torch import cuda

from ..monitors.breakdown import HostMeter
from .names import refusal

Calls = tuple[Any, Any]
"""What a name stands for on a GPU, and on a CPU: what is called there, or a class, of which a CPU has none."""


def _said(gpu: Any, cpu: Any) -> Calls:
    """Answers that nothing changes."""
    return (lambda: gpu), (lambda: cpu)


def _of_one(gpu: Callable[[int], Any], cpu: Callable[[], Any] = lambda: None) -> Calls:
    """Of one GPU of this host, by its index, by default this rank's present one; a CPU is the only one."""

    def of_gpu(device_index: int | None = None) -> Any:
        return gpu(cuda.current_device() if device_index is None else device_index)

    return of_gpu, lambda device_index=None: cpu()


def _nothing(*_: Any, **__: Any) -> None:
    """On a CPU there is none of it."""


def _variable(name: str, default: str) -> Callable[[], int]:
    return lambda: int(os.environ.get(name, default))


_HOST: Final = HostMeter()
"""Memory of this process, which on a CPU stands for the device's."""


def host_memory() -> tuple[int, int]:
    """Bytes of this host's memory: all, and what is available."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {words[0]: int(words[1]) * 1024 for words in lines if len(words) > 2}
    return sizes["MemTotal:"], sizes["MemAvailable:"]


_IS_SYNCHRONIZED: Final = _said(False, True)
_RESERVED: Final = _of_one(cuda.memory_reserved, _HOST.memory_allocated)
_MOST_RESERVED: Final = _of_one(cuda.max_memory_reserved, _HOST.max_memory_allocated)
_RESET_PEAKS: Final = _of_one(cuda.reset_peak_memory_stats)

NAMES: Final[Mapping[str, Calls]] = {
    # devices; a rank on a CPU is as if it had one of its own
    "set_device": (lambda device_index: cuda.set_device(device_index), _nothing),
    "current_device": (cuda.current_device, _variable("LOCAL_RANK", "0")),
    "device_count": (cuda.device_count, _variable("LOCAL_WORLD_SIZE", "1")),
    "device": (lambda device_index=None: cuda.device(device_index), lambda device_index=None: nullcontext()),
    "is_available": _said(True, True),
    "synchronize": _of_one(cuda.synchronize),
    "is_synchronized_device": _IS_SYNCHRONIZED,
    "use_host_timers": _IS_SYNCHRONIZED,
    "resolves_data_dependency": _IS_SYNCHRONIZED,
    "handles_memory_backpressure": _IS_SYNCHRONIZED,
    "communication_backend_name": _said("nccl", "gloo"),
    # random numbers
    "random": _said(torch.random, torch.random),
    "manual_seed": (cuda.manual_seed, torch.manual_seed),
    "manual_seed_all": (cuda.manual_seed_all, torch.manual_seed),
    "initial_seed": (cuda.initial_seed, torch.initial_seed),
    "get_rng_state": _of_one(cuda.get_rng_state, torch.get_rng_state),
    "set_rng_state": (
        lambda new_state, device_index=None: cuda.set_rng_state(
            new_state, "cuda" if device_index is None else device_index
        ),
        lambda new_state, device_index=None: torch.set_rng_state(new_state),
    ),
    "default_generator": (
        lambda device_index: cuda.default_generators[device_index],
        lambda device_index: torch.default_generator,
    ),
    # streams
    "Stream": (cuda.Stream, None),
    "Event": (cuda.Event, None),
    "stream": (cuda.stream, lambda stream: nullcontext()),
    "current_stream": _of_one(cuda.current_stream),
    "default_stream": _of_one(cuda.default_stream),
    # memory, in bytes
    "empty_cache": (cuda.empty_cache, _nothing),
    "memory_allocated": _of_one(cuda.memory_allocated, _HOST.memory_allocated),
    "max_memory_allocated": _of_one(cuda.max_memory_allocated, _HOST.max_memory_allocated),
    "memory_reserved": _RESERVED,
    "memory_cached": _RESERVED,
    "max_memory_reserved": _MOST_RESERVED,
    "max_memory_cached": _MOST_RESERVED,
    "reset_peak_memory_stats": _RESET_PEAKS,
    "reset_max_memory_allocated": _RESET_PEAKS,
    "reset_max_memory_cached": _RESET_PEAKS,
    "memory_stats": _of_one(
        lambda index: dict(cuda.memory_stats(index)),
        lambda: {
            "allocated_bytes.all.current": _HOST.memory_allocated(),
            "allocated_bytes.all.peak": _HOST.max_memory_allocated(),
        },
    ),
    "total_memory": _of_one(lambda index: cuda.get_device_properties(index).total_memory, lambda: host_memory()[0]),
    "available_memory": _of_one(lambda index: cuda.mem_get_info(index)[0], lambda: host_memory()[1]),
    "pin_memory": (
        lambda tensor, make_copy=True, match_shape=True: tensor.pin_memory(),
        lambda tensor, make_copy=True, match_shape=True: tensor,
    ),
    "is_pinned": (torch.Tensor.is_pinned, lambda tensor: False),
    # types in which the engine trains; it uses none of Triton's kernels
    "is_bf16_supported": (cuda.is_bf16_supported, lambda: True),
    "is_fp16_supported": _said(True, True),
    "is_triton_supported": _said(False, False),
    # marks
    "range_push": (lambda msg, domain=None, category=None: cuda.nvtx.range_push(msg), _nothing),
    "range_pop": (lambda domain=None: cuda.nvtx.range_pop(), _nothing),
}
"""Name -> what it is."""


class Accelerator:
    """What ranks compute on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._cuda = name == "cuda"

    def __getattr__(self, name: str) -> Any:
        if name in NAMES:
            gpu, cpu = NAMES[name]
            return gpu if self._cuda else cpu
        raise AttributeError(
            name if name.startswith("__") else refusal(f"deepspeed.accelerator.get_accelerator().{name}")
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *NAMES})

    def device_name(self, device_index: int | None = None) -> str:
        """`cpu`, `cuda` or `cuda:1`."""
        return f"cuda:{device_index}" if self._cuda and device_index is not None else self._name

    def current_device_name(self) -> str:
        """`cpu` or `cuda:1`."""
        return self.device_name(self.current_device())

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is there."""
        return tensor.device.type == self._name

    def supported_dtypes(self) -> list[torch.dtype]:
        """In which the engine trains."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]


@functools.cache
def get_accelerator() -> Accelerator:
    """The GPU, if torch sees one, else the CPU."""
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")


def is_current_accelerator_supported() -> bool:
    """Both are."""
    return True
