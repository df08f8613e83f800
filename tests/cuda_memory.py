"""A CUDA allocator that is not there: answers as torch's does, under its keys, and keeps what it was asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allocations import Device

from dsprof.collectors.memory.cuda_memory import OnOom

MiB = 1 << 20
STATISTICS = ("current", "peak", "allocated", "freed")
SIZED = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes")
COUNTED = ("allocation", "segment", "active", "inactive_split")
PLAIN = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
"""Keys of torch 2.13's `torch.cuda.memory_stats_as_nested_dict()` (docs of `torch.cuda.memory_stats`)."""


def stats_of(allocated: int = 0, reserved: int = 0, peak: int = 0, retries: int = 0, split: int = 0) -> dict[str, Any]:
    """As torch gives them: half of it in each pool."""
    sizes = {
        "allocated_bytes": allocated, "reserved_bytes": reserved, "active_bytes": allocated,
        "inactive_split_bytes": split, "requested_bytes": allocated,
    }  # fmt: skip

    def pools(size: int, most: int) -> dict[str, dict[str, int]]:
        return {
            pool: {"current": size // part, "peak": max(size, most) // part, "allocated": size, "freed": 0}
            for pool, part in (("all", 1), ("small_pool", 2), ("large_pool", 2))
        }

    found: dict[str, Any] = {key: pools(sizes[key], peak) for key in SIZED}
    found |= {key: pools(1, 1) for key in COUNTED}
    found |= dict.fromkeys(PLAIN, 0) | {"num_alloc_retries": retries}
    found |= {key: pools(0, 0)["all"] for key in ("oversize_allocations", "oversize_segments")}
    return {**found, "max_split_size": -1}


class FakeCuda:
    """Devices whose statistics are set by the test. `calls`: what was asked, but for whether CUDA is in use."""

    def __init__(self, *devices: dict[str, Any], capacity: int = 1024 * MiB, in_use: bool = True) -> None:
        self.per_device = list(devices)
        self.total, self.in_use = capacity, in_use
        self.graph = False
        self.calls: list[str] = []
        self.recorded: list[int | None] = []
        self.recording = False
        self.memory = Device()
        self._waiting: list[Callable[[], None]] = []
        self._observers: list[OnOom] = []
        self._watchers: list[Callable[[], None]] = []

    # --- what the test does

    def initialize(self) -> None:
        self.in_use = True
        while self._waiting:
            self._waiting.pop(0)()

    def run_out(self, device: int, asked: int, free: int) -> None:
        for observer in self._observers:
            observer(device, asked, self.total, free)

    def script_records(self, on: bool = True) -> None:
        """The script calls `torch.cuda.memory._record_memory_history`."""
        for watcher in self._watchers:
            watcher()
        self.recording = on

    # --- what it is asked

    def initialized(self) -> bool:
        return self.in_use

    def when_initialized(self, call: Callable[[], None]) -> None:
        if self.in_use:
            call()
        else:
            self._waiting.append(call)

    def _asked(self, what: str) -> None:
        assert self.in_use, f"{what} would have initialized CUDA"
        self.calls.append(what)

    def capturing(self) -> bool:
        self._asked("capturing")
        return self.graph

    def devices(self) -> int:
        self._asked("devices")
        return len(self.per_device)

    def stats(self, device: int) -> dict[str, Any]:
        self._asked("stats")
        return self.per_device[device]

    def capacity(self, device: int) -> int:
        self._asked("capacity")
        return self.total

    def free(self, device: int) -> int:
        self._asked("free")
        return self.total - int(self.per_device[device]["reserved_bytes"]["all"]["current"])

    def segments(self) -> list[dict[str, Any]]:
        self._asked("segments")
        found: list[dict[str, Any]] = self.memory.snapshot()["segments"]
        return found

    def snapshot(self) -> dict[str, Any]:
        self._asked("snapshot")
        return self.memory.snapshot()

    def records_history(self) -> bool:
        self._asked("records_history")
        return self.recording

    def record_history(self, entries: int | None) -> None:
        self._asked("record_history")
        self.recorded.append(entries)
        self.recording = entries is not None

    def observe_oom(self, call: OnOom) -> None:
        self._asked("observe_oom")
        self._observers.append(call)

    def watch_recording(self, call: Callable[[], None]) -> Callable[[], None]:
        self._watchers.append(call)
        return lambda: self._watchers.remove(call)
