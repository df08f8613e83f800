"""benchmarks/gpu.py at toy size, on CPU: what it measures there, it measures on a GPU by the same code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import forked_python
import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.py"


def run(*args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return forked_python.run([sys.executable, str(SCRIPT), *args], capture_output=True, timeout=120, env=environment)


def test_at_toy_size(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = run(
        "--tiny", "--device", "cpu", "--rounds", "1", "--block", "1", "--offload-steps", "2", "--peak", "1e12",
        "--output", str(output),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert result["model"]["parameters"] == 118_528
    assert list(result["speed"]) == [f"stage {stage}" for stage in range(4)]
    for rows in result["speed"].values():
        assert list(rows) == ["torch", "engine", "again", "hooks", "profiler"]
        # 6 operations for each of the parameters but the inputs', and attention's: 12 * 2 layers * 64 * 32.
        a_token = 6 * (118_528 - 128 * 64 - 32 * 64) + 12 * 2 * 64 * 32
        assert rows["engine"]["mfu"] == pytest.approx(rows["engine"]["tokens_a_second"] * a_token / 1e12, abs=6e-5)
        assert rows["torch"]["seconds_a_step_to_torch"] == {"median": 1, "low": 1, "high": 1}
    assert len({rows["torch"]["last_loss"] for rows in result["speed"].values()}) == 1
    arms = result["offload"]
    assert list(arms) == ["fits", "optimizer on the host", "parameters on the host too"]
    for row in arms.values():
        assert row["trains"]
        assert row["losses"] == pytest.approx(arms["fits"]["losses"], rel=1e-3)
    lane = result["lane"]
    assert (lane["copies"], lane["right"], lane["done"], lane["in_order"]) == (16, 8, True, True)
    assert all(difference < 1e-4 for difference in result["difference_to_torchs_weights"].values())


@pytest.mark.slow
def test_without_a_gpu_it_says_what_to_write() -> None:
    done = run()
    assert done.returncode == 2
    assert "there is no CUDA GPU here; to try the script without one write --tiny --device cpu" in done.stderr
