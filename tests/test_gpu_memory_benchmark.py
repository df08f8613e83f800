"""benchmarks/gpu_memory.py, which needs a GPU: what of it can be held without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_memory

    return gpu_memory


def test_the_lines_that_a_finding_must_name_are_there(benchmark: object) -> None:
    lines = (BENCHMARKS / "gpu_memory.py").read_text().splitlines()
    for mark in benchmark.LINES.values():  # type: ignore[attr-defined]
        numbers = benchmark.lines_of(mark)  # type: ignore[attr-defined]
        assert numbers, mark
        for number in numbers:
            assert "torch." in lines[number - 1], "it allocates"


@pytest.mark.slow
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_memory.py")], capture_output=True, text=True, timeout=120,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "there is no CUDA GPU here\n"
