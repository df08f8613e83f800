"""Losses of scripts that train with a framework are those without the profiler, bit for bit, at every level."""

from __future__ import annotations

import sys
from pathlib import Path

import forked_python
import pytest
from framework_runs import JOBS, STEPS, rows_of, skip_without_packages
from jobs import ABORTED, environment, profile

INNER = {
    ("tensor_parallel.py",): "1.down",
    ("fsdp1.py",): "1.down",
    ("fsdp2.py",): "1.down",
    ("fsdp2_pipeline.py",): "down",
    ("torch_pipelines.py",): "down",
    ("unusual.py", "optimizers_in_backward"): "1.down",
    ("unusual.py", "threads"): "1.down",
    ("accelerate_loop.py",): "1.down",
    ("transformers_trainer.py",): "transformer.h.1.mlp.c_fc",
    ("lightning_trainer.py",): "net.1.down",
    ("deepspeed_zero.py", "1"): "1.down",
    ("deepspeed_zero.py", "3"): "1.down",
    ("deepspeed_autotp.py",): "model.layers.1.mlp.down_proj",
    ("deepspeed_pipeline.py", "1F1B"): "1.down",
    ("deepspeed_pipeline.py", "DualPipeV"): "3.down",
}
"""Job -> a module two levels or more below the outermost, which level full must show."""


@pytest.mark.slow
@pytest.mark.parametrize("level", ["light", "full"])
@pytest.mark.parametrize("job", INNER, ids=" ".join)
def test_losses_are_those_without_the_profiler(job: tuple[str, ...], level: str, tmp_path: Path) -> None:
    skip_without_packages(job)
    (tmp_path / "watched").mkdir()
    (tmp_path / "plain").mkdir()
    watched = profile(tmp_path / "watched", JOBS / job[0], *job[1:], flags=("--no-report", "--level", level))
    assert watched.status == 0, watched.stderr
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for _ in range(3):
        done = forked_python.run(
            [*torchrun, str(JOBS / job[0]), *job[1:]], cwd=tmp_path / "plain", env=environment(),
            capture_output=True,
        )  # fmt: skip
        if ABORTED not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        losses = [(tmp_path / which / f"losses.{rank}").read_text() for which in ("watched", "plain")]
        assert losses[0] == losses[1]
        assert len(losses[0].split()) >= STEPS
    if level == "full":
        modules = rows_of(watched)
        modules = modules[modules["kind"] == "module"]
        assert INNER[job] in set(modules["name"])
