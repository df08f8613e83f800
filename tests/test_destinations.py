"""Disks that are full, read-only or limited: the job goes on, and the report says what is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import forked_python
import pytest
from jobs import environment

from dsprof.collectors.capture import scratch
from dsprof.run import RunFolder
from dsprof.trace import load

SCRIPT = """
import sys, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    optimizer.step()
print("trained")
sys.exit(5)
"""


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, with those mount options."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def run(tmp_path: Path, *flags: str, before: str = "") -> str:
    """What `dsprof run` says of the script, whose own status is 5; in one line, as the verdict's are broken."""
    (tmp_path / "train.py").write_text(before + SCRIPT)
    done = forked_python.run(
        [sys.executable, "-m", "dsprof", "run", "--native", "off", "--no-report", *flags, "train.py"],
        cwd=tmp_path, env=environment(), capture_output=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (5, "trained\n"), done.stderr
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


@pytest.mark.parametrize("disk", ["size=300m"], indirect=True)
def test_a_local_disk_that_fills_up(tmp_path: Path, disk: Path) -> None:
    fill = f"open('{disk}/filler', 'wb').write(bytes(299 << 20))\n"
    said = run(tmp_path, "-o", "run", "--scratch", "disk", before=fill)
    # It was fit when the job started; now there is no room for a chunk.
    assert "captures are written to " in said
    assert "rank 0: captured into the run folder directly: " in said
    assert load(RunFolder(tmp_path / "run")).run.ranks[0].last_step == 9


@pytest.mark.parametrize("disk", ["size=300m"], indirect=True)
def test_a_local_disk_that_fills_up_after_the_capture_has_begun(tmp_path: Path, disk: Path) -> None:
    fill = f"""
import torch
from dsprof.collectors.capture import recorder_setup
started = recorder_setup.place
def place(*args):
    try:
        return started(*args)
    finally:
        with open('{disk}/filler', 'wb', buffering=0) as filler:
            try:
                while filler.write(bytes(1 << 16)):
                    pass
            except OSError:
                pass
recorder_setup.place = place
"""
    said = run(tmp_path, "-o", "run", "--scratch", "disk", before=fill)
    assert "rank 0: no records were written" in said


@pytest.mark.parametrize("disk", ["size=700k"], indirect=True)
def test_a_full_shared_disk_leaves_the_capture_on_the_local_one(tmp_path: Path, disk: Path) -> None:
    """The run folder is on it: there is room for run.json, and none for a chunk."""
    said = run(tmp_path, "-o", "disk/run", "--scratch", "local")
    local = scratch.stand_in(disk / "run", tmp_path / "local") / "capture"
    (capture,) = local.iterdir()
    assert (
        "[dsprof] warning: the capture of rank 0 is not all in disk/run/capture/ (No space left on device); the rest "
        f"is kept on {load_host(capture)}: cp -r {capture.relative_to(tmp_path)} disk/run/capture/"
    ) in said
    assert "rank 0: the newest part of its capture could not be copied (No space left on device); it lies in " in said
    # What the message says to type brings it back.
    subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
    subprocess.run(["cp", "-r", str(capture), f"{disk}/run/capture/"], check=True)
    assert load(RunFolder(disk / "run")).run.ranks[0].last_step == 9


def load_host(capture: Path) -> str:
    return capture.name.split(".", 2)[2].rpartition(".")[0]


@pytest.mark.parametrize("limited", ["run", "local"])
def test_a_limit_on_the_size_of_files(tmp_path: Path, limited: str) -> None:
    """As a quota does: no chunk can be made, with the capture in the run folder or elsewhere."""
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
    said = run(tmp_path, "-o", "run", *(("--scratch", "local") if limited == "local" else ()), before=limit)
    assert "rank 0: no records were written" in said
    assert not list((tmp_path / "local").glob("dsprof-*/*"))


def test_a_run_folder_that_becomes_read_only(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(shared)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        remount = f"import subprocess\nsubprocess.run(['mount', '-o', 'remount,ro', '{shared}'], check=True)\n"
        said = run(tmp_path, "-o", "shared/run", "--scratch", "local", before=remount)
        assert (
            "the capture of rank 0 is not all in shared/run/capture/ (Read-only file system); the rest is kept on "
            in said
        )
        assert "run.json: cannot be written" in said or "Read-only file system" in said
    finally:
        subprocess.run(["umount", "--lazy", str(shared)], check=True)
