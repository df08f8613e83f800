"""`get_accelerator()`: the GPU through torch.cuda, or the CPU, under the names DeepSpeed has for both."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from .absent import refusal


class Accelerator:
    """What ranks compute on. `index` is a GPU of this host; None is this rank's present one.

    On a CPU memory is that of this process, in bytes, and streams and events are None.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._cuda = name == "cuda"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(refusal(f"deepspeed.accelerator.get_accelerator().{name}"))

    # --- devices

    def device_name(self, device_index: int | None = None) -> str:
        """`cpu`, `cuda` or `cuda:1`."""
        return f"cuda:{device_index}" if self._cuda and device_index is not None else self._name

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """The block in which it is the present one."""
        return torch.cuda.device(device_index) if self._cuda else contextlib.nullcontext()

    def set_device(self, device_index: int) -> None:
        """Make it the present one."""
        if self._cuda:
            torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        """The present GPU; on a CPU the local rank, as if it had one of its own."""
        return torch.cuda.current_device() if self._cuda else int(os.environ.get("LOCAL_RANK", "0"))

    def current_device_name(self) -> str:
        """`cpu` or `cuda:1`."""
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """GPUs; on a CPU the ranks of this host."""
        return torch.cuda.device_count() if self._cuda else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def is_available(self) -> bool:
        """Always, or it would be the other one."""
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for what was launched."""
        if self._cuda:
            torch.cuda.synchronize(device_index)

    def is_synchronized_device(self) -> bool:
        """Whether what is called has been done when the call returns."""
        return not self._cuda

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def communication_backend_name(self) -> str:
        """`nccl` or `gloo`."""
        return "nccl" if self._cuda else "gloo"

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is there."""
        return tensor.device.type == self._name

    # --- random numbers

    def random(self) -> Any:
        """The module torch.random."""
        return torch.random

    def manual_seed(self, seed: int) -> None:
        """Seed the present device."""
        (torch.cuda if self._cuda else torch).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed all."""
        if self._cuda:
            torch.cuda.manual_seed_all(seed)
        else:
            torch.manual_seed(seed)

    def initial_seed(self) -> int:
        """What the present device was seeded with."""
        return torch.cuda.initial_seed() if self._cuda else torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """The state of the generator."""
        return torch.cuda.get_rng_state(self._or_present(device_index)) if self._cuda else torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set it."""
        if self._cuda:
            torch.cuda.set_rng_state(new_state, self._or_present(device_index))
        else:
            torch.set_rng_state(new_state)

    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator itself."""
        return torch.cuda.default_generators[device_index] if self._cuda else torch.default_generator

    # --- streams and events

    @property
    def Stream(self) -> Any:
        """The class of streams."""
        return torch.cuda.Stream if self._cuda else None

    @property
    def Event(self) -> Any:
        """The class of events."""
        return torch.cuda.Event if self._cuda else None

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """The block whose work goes to `stream`."""
        return torch.cuda.stream(stream) if self._cuda else contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> Any:
        """Where work goes now."""
        return torch.cuda.current_stream(device_index) if self._cuda else None

    def default_stream(self, device_index: int | None = None) -> Any:
        """Where it goes by default."""
        return torch.cuda.default_stream(device_index) if self._cuda else None

    # --- memory

    def empty_cache(self) -> None:
        """Give back what torch keeps for later."""
        if self._cuda:
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """In use."""
        return torch.cuda.memory_allocated(device_index) if self._cuda else _resident()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The peak of that; on a CPU since the process began."""
        return torch.cuda.max_memory_allocated(device_index) if self._cuda else _peak()

    def memory_reserved(self, device_index: int | None = None) -> int:
        """In use, and kept for later."""
        return torch.cuda.memory_reserved(device_index) if self._cuda else _resident()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The peak of that."""
        return torch.cuda.max_memory_reserved(device_index) if self._cuda else _peak()

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Begin peaks anew; the operating system's own, which counts on a CPU, cannot be."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """torch.cuda.memory_stats; on a CPU what is allocated, and its peak."""
        if self._cuda:
            return dict(torch.cuda.memory_stats(device_index))
        return {"allocated_bytes.all.current": _resident(), "allocated_bytes.all.peak": _peak()}

    def total_memory(self, device_index: int | None = None) -> int:
        """Of the device."""
        return torch.cuda.get_device_properties(device_index).total_memory if self._cuda else host_memory()[0]

    def available_memory(self, device_index: int | None = None) -> int:
        """Of that, free."""
        return torch.cuda.mem_get_info(device_index)[0] if self._cuda else host_memory()[1]

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """`tensor` in memory that a GPU can read; as it is without one."""
        return tensor.pin_memory() if self._cuda else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it is."""
        return tensor.is_pinned() if self._cuda else False

    # --- types

    def is_bf16_supported(self) -> bool:
        """Whether the engine trains in bf16 here."""
        return torch.cuda.is_bf16_supported() if self._cuda else True

    def is_fp16_supported(self) -> bool:
        """Whether the engine trains in fp16 here, which it does on a CPU too."""
        return True

    def is_triton_supported(self) -> bool:
        """Whether Triton's kernels would run: none is used here."""
        return False

    def supported_dtypes(self) -> list[torch.dtype]:
        """In which the engine trains."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    # --- marks

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Begin a range of NVTX; on a CPU there is none."""
        if self._cuda:
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: str | None = None) -> None:
        """End it."""
        if self._cuda:
            torch.cuda.nvtx.range_pop()

    def _or_present(self, device_index: int | None) -> int:
        return self.current_device() if device_index is None else device_index


@functools.cache
def get_accelerator() -> Accelerator:
    """The GPU, if torch sees one, else the CPU."""
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")


def is_current_accelerator_supported() -> bool:
    """Both are."""
    return True


def host_memory() -> tuple[int, int]:
    """Bytes of this host's memory: all, and what is available."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {words[0]: int(words[1]) * 1024 for words in lines if len(words) > 2}
    return sizes["MemTotal:"], sizes["MemAvailable:"]


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
