"""A disk that fills up costs the capture, never the job."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import profile

SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
print("trained")
dist.destroy_process_group()
"""


@pytest.fixture
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize(("small_disk", "captured"), [("32k", 0), ("1500k", 1), ("2300k", 2)], indirect=["small_disk"])
@pytest.mark.parametrize("native", ["on", "off"])
def test_the_job_ends_as_it_would_and_the_verdict_says_what_is_missing(
    small_disk: Path, captured: int, native: str
) -> None:
    script = small_disk.parent / "train.py"
    script.write_text(SCRIPT)
    finished = profile(small_disk, script, flags=("--native", native))
    assert finished.status == 0, finished.stderr
    assert finished.stdout.count("trained") == 2
    assert "[dsprof] verdict" in finished.stderr or "[dsprof] warning" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert f"{captured}/2 ranks" in finished.stderr or captured == 0
    if captured < 2:
        assert "could not be written" in finished.stderr or "No space left" in finished.stderr
