"""benchmarks/gpu_device.py where there is no GPU: how it compares, and that all of it that can does run."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import forked_python
import numpy as np
import pandas as pd
import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu_device.py"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_device", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_nvidia_smi_says(benchmark: Any) -> None:
    fields = ["power.draw", "ecc.errors.corrected.volatile.total", "clocks_event_reasons.active", "clocks.sm"]
    assert benchmark.parse(fields, "612.50, [N/A], 0x0000000000000044, 1755\n") == {
        "power.draw": 612.5, "clocks_event_reasons.active": 68.0, "clocks.sm": 1755.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "when", "gauge", "tolerance", "agrees"),
    [
        (500.0, 10.2, "device.power_w", 40, True),
        (545.0, 10.2, "device.power_w", 40, False),
        (455.0, 10.2, "device.power_w", 40, False),
        (500.0, 30.0, "device.power_w", 40, False),  # nothing was read around it
        (500.0, 30.0, "device.power_limit_w", 0, True),  # which is read seldom
        (500.0, 10.2, "device.clock_reasons", None, True),
        (501.0, 10.2, "device.clock_reasons", None, False),
    ],
)
def test_agreement(benchmark: Any, said: float, when: float, gauge: str, tolerance: float | None, agrees: bool) -> None:
    times, values = np.array([9.0, 10.0, 11.0]), np.array([500.0, 504.0, 500.0])
    assert benchmark.agrees(said, when, times, values, tolerance, gauge) is agrees


def test_a_gauge_that_is_missing_or_wrong_is_not_ok(benchmark: Any) -> None:
    rows = pd.DataFrame(
        [
            {"kind": "gauge", "name": "device.power_w", "start_ns": second * 10**9, "value": 300.0}
            for second in range(20)
        ]
    )
    said = [(float(second), {"power.draw": 310.0, "temperature.gpu": 60.0}) for second in range(1, 19)]
    found = benchmark.compare(said, rows)
    assert (found["device.power_w"]["agree"], found["device.power_w"]["ok"]) == (18, True)
    assert (found["device.temperature_c"]["asked"], found["device.temperature_c"]["ok"]) == (18, False)
    assert found["device.sm_clock_mhz"]["asked"] == 0
    off = [(when, {"power.draw": 390.0}) for when, _ in said]
    assert not benchmark.compare(off, rows)["device.power_w"]["ok"]


def test_a_line_that_is_not_named_is_not_ok(benchmark: Any) -> None:
    def row(line: int, call: str, ms: float) -> dict[str, Any]:
        return {"site": f"{SCRIPT}:{line}", "purpose": call, "dur_ns": ms * 1e6}

    rows = pd.DataFrame([row(10, "item", 20), row(11, "item", 2), row(12, "nonzero", 20), row(13, "item", 20)])
    wanted = [{"call": call, "line": line, "least_ms": 16.0} for line, call in
              ((10, "item"), (11, "item"), (12, "item"), (13, None), (14, "item"), (15, None))]  # fmt: skip
    assert [item["ok"] for item in benchmark.check_sites(wanted, rows)] == [True, False, False, False, False, True]


def test_it_runs_without_a_gpu(tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--output", str(tmp_path / "out.json")]
    refused = forked_python.run(command, capture_output=True, timeout=120, env=environment)
    assert refused.returncode == 2
    assert "there is no CUDA GPU here; to try the script without one write --device cpu" in refused.stderr
    command += ["--device", "cpu", "--seconds", "1", "--pairs", "2"]
    done = forked_python.run(command, capture_output=True, timeout=240, env=environment)
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["errors"] == [], done.stderr
    assert (result["device"], result["sites"], result["not_told"]) == ("cpu", [], sorted(result["gauges"]))
    assert set(result["cost"]) == {"item", "copy within the device", "item on the host"}
