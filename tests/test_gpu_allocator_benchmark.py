"""benchmarks/gpu_allocator.py, which needs a GPU: what of it can be held without one."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import allocations
import pytest
from allocations import Device, MiB

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_allocator

    return gpu_allocator


def test_recordings_are_proved_and_predicted_from_each_other(benchmark: Any, tmp_path: Path) -> None:
    files = {}
    for at, setting in enumerate(("", "max_split_size_mb:64")):
        device = Device(device_bytes=1 << 40)
        allocations.pinned(device)
        counted = {
            "peak_reserved": 2200 * MiB, "reserved": 2200 * MiB, "retries": 0, "ooms": 0, "device_allocs": 40,
            "device_frees": 0,
        }  # fmt: skip
        files[setting] = tmp_path / f"{at}.pickle"
        files[setting].write_bytes(pickle.dumps((counted, device.snapshot())))
    found = benchmark.examine(files, None)
    assert set(found) == {"default", "max_split_size_mb:64"}
    assert found["default"]["exact"]["holds"]
    assert found["default"]["predicted"]["default"]["error_percent"] == 0.0
    told = benchmark.summary({"pinned": found})
    assert (told["runs"], told["exact"], told["predictions"]) == (2, 2, 4)
    assert told["peak_to_the_byte"] == 4


def test_all_settings_are_such_as_the_twin_knows(benchmark: Any) -> None:
    assert set(benchmark.FROM) < set(benchmark.SETTINGS)
    assert len(benchmark.SETTINGS) == len(set(benchmark.SETTINGS))
