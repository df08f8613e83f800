"""All that the memory collector asks of CUDA. None of it initializes CUDA or waits for a device.

Written against torch 2.11 and 2.13: `torch.cuda.memory` for what it has, `torch._C` for the observer of an OOM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from ..hooking import private

STATS: Final = {
    "allocated": "allocated_bytes", "reserved": "reserved_bytes", "active": "active_bytes",
    "inactive_split": "inactive_split_bytes",
}  # fmt: skip
"""Name of a `mem` row -> key of `torch.cuda.memory_stats_as_nested_dict()`."""
POOLS: Final = ("small_pool", "large_pool")
"""Beside `all`, which is both."""
COUNTS: Final = {"retries": "num_alloc_retries", "ooms": "num_ooms"}

RECORD: Final = "torch.cuda.memory:_record_memory_history"

OnOom = Callable[[int, int, int, int], None]
"""Device; bytes that were asked for; what the process may have of the device; what the device had left."""


class Cuda(Protocol):
    """What is asked. But for the first two, only where CUDA is in use; errors are the caller's to catch."""

    def initialized(self) -> bool:
        """Whether this process uses CUDA."""

    def when_initialized(self, call: Callable[[], None]) -> None:
        """At once, or as soon as it does; `call` must not raise."""

    def capturing(self) -> bool:
        """Whether what is issued now becomes part of a CUDA graph."""

    def devices(self) -> int:
        """How many this process sees."""

    def stats(self, device: int) -> dict[str, Any]:
        """As `torch.cuda.memory_stats_as_nested_dict`: empty for one that was never used."""

    def capacity(self, device: int) -> int:
        """Bytes that the process may have of it (`set_per_process_memory_fraction`)."""

    def free(self, device: int) -> int:
        """Bytes that the device has left, for any process."""

    def segments(self) -> list[dict[str, Any]]:
        """What the allocators hold now, without history."""

    def snapshot(self) -> dict[str, Any]:
        """The same with the history, as `_dump_snapshot` writes it."""

    def records_history(self) -> bool: ...

    def record_history(self, entries: int | None) -> None:
        """Keep the last so many events of each device, with Python's stack where memory was allocated; None: stop."""

    def observe_oom(self, call: OnOom) -> None:
        """Call it in the thread that ran out of memory. It cannot be taken away again."""

    def watch_recording(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call it whenever somebody else has the history recorded or not; what takes it away again."""


class TorchCuda:
    """torch's own."""

    def initialized(self) -> bool:
        import torch

        return bool(torch.cuda.is_initialized())

    def when_initialized(self, call: Callable[[], None]) -> None:
        private.need("torch.cuda:_lazy_call")(call)

    def capturing(self) -> bool:
        import torch

        return bool(torch.cuda.is_current_stream_capturing())

    def devices(self) -> int:
        import torch

        return torch.cuda.device_count()

    def stats(self, device: int) -> dict[str, Any]:
        import torch

        return dict(torch.cuda.memory_stats_as_nested_dict(device))

    def capacity(self, device: int) -> int:
        import torch

        total = int(torch.cuda.get_device_properties(device).total_memory)
        fraction = private.find("torch._C:_cuda_getMemoryFraction")
        return total if fraction is None else int(total * fraction(device))

    def free(self, device: int) -> int:
        import torch

        return int(torch.cuda.mem_get_info(device)[0])

    def segments(self) -> list[dict[str, Any]]:
        import torch

        try:
            return list(torch.cuda.memory.memory_snapshot(include_traces=False))
        except TypeError:  # torch before 2.12
            return list(torch.cuda.memory.memory_snapshot())

    def snapshot(self) -> dict[str, Any]:
        return dict(private.need("torch.cuda.memory:_snapshot")())

    def records_history(self) -> bool:
        return bool(private.need("torch._C:_cuda_isHistoryEnabled")())

    def record_history(self, entries: int | None) -> None:
        record = private.need(RECORD)
        record = getattr(record, "_dsprof", record)
        if entries is None:
            record(enabled=None)
        else:
            record(enabled="all", context="alloc", stacks="python", max_entries=entries)

    def observe_oom(self, call: OnOom) -> None:
        private.need("torch._C:_cuda_attach_out_of_memory_observer")(call)

    def watch_recording(self, call: Callable[[], None]) -> Callable[[], None]:
        import torch

        from ..hooking.uninstall import replace_attribute
        from ..hooking.wrap import stands_for

        record = private.need(RECORD)

        @stands_for(record)
        def _record_memory_history(*args: Any, **kwargs: Any) -> Any:
            call()
            return record(*args, **kwargs)

        _record_memory_history._dsprof = record  # type: ignore[attr-defined]
        return replace_attribute(torch.cuda.memory, RECORD.partition(":")[2], _record_memory_history)


def largest_free(segments: list[dict[str, Any]], device: int) -> int:
    """Bytes of the largest block that a device's cache has free."""
    sizes = [
        block["size"]
        for segment in segments
        if segment.get("device", 0) == device
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    return max(sizes, default=0)
