"""A disk that fills up costs the capture, never the job."""

from __future__ import annotations

import re
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


NOTHING_WRITTEN = ": no records were written\n"
LEFT_OUT = " records could not be written (disk full, or slower than the job)"
NO_REPORT = (
    "warning   report.html: not written (No space left on device); make room or fix the permissions, then "
    "`dsprof report`\n"
)

CASES = {
    "32k": {  # not even the first chunk of one rank, nor what is merged
        "[dsprof] warning: 0.0 MiB free for run; what does not fit is not captured\n": 1,
        "capture   0/2 ranks (missing 0-1), ": 1,
        NOTHING_WRITTEN: 2,
        "warning   run.json: not updated (No space left on device)\n": 1,
        NO_REPORT: 1,
        "[dsprof] warning: the disk of run is full; the capture may be incomplete\n": 1,
    },
    "1500k": {  # the chunk of one rank, whichever comes first
        "[dsprof] warning: 1.5 MiB free for run; what does not fit is not captured\n": 1,
        "capture   1/2 ranks (missing ": 1,
        NOTHING_WRITTEN: 1,
        LEFT_OUT: 1,
        NO_REPORT: 1,
    },
    "2300k": {  # both chunks, but no report
        "[dsprof] warning: 2.2 MiB free for run; what does not fit is not captured\n": 1,
        "capture   2/2 ranks, ": 1,
        ", 0 records dropped, ": 1,
        NOTHING_WRITTEN: 0,
        LEFT_OUT: 0,
        NO_REPORT: 1,
    },
}
"""Size of the disk -> what stderr says, and how often."""


@pytest.mark.parametrize(
    ("small_disk", "size"),
    [pytest.param(size, size, marks=[] if size == "1500k" else [pytest.mark.slow]) for size in CASES],
    indirect=["small_disk"],
)
@pytest.mark.parametrize("native", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_the_job_ends_as_it_would_and_the_verdict_says_what_is_missing(
    small_disk: Path, size: str, native: str
) -> None:
    script = small_disk.parent / "train.py"
    script.write_text(SCRIPT)
    finished = profile(small_disk, script, flags=("--native", native))
    assert finished.status == 0, finished.stderr
    assert finished.stdout.count("trained") == 2
    assert "Traceback" not in finished.stderr
    said = re.sub(r"\n {10}(?=\S)", " ", finished.stderr)  # without the breaks of 80 columns
    assert {text: said.count(text) for text in CASES[size]} == CASES[size], finished.stderr
