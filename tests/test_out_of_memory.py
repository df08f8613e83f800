"""Jobs that run out of the host's memory under `dsprof run`: what held it is told, and they end as they would have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from armed import both, captured, train
from jobs import profile

from dsprof.collectors.memory.out_of_memory import asked_for

MiB = 1 << 20

HOARDER = """
import os, resource, sys, torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1000, 2000), torch.nn.ReLU(), torch.nn.Linear(2000, 1000))
optimizer = torch.optim.Adam(model.parameters(), foreach=False)
outputs = []

def train(step):
    optimizer.zero_grad()
    output = model(torch.ones(8, 1000))
    output.sum().backward()
    optimizer.step()
    return output

def keep(step):
    outputs.append(torch.ones(4 * 2**20))  # 16 MiB

for step in range({steps}):
    train(step)
    if step == 3:
        {limit}
    if step > 3:
        keep(step)
print("trained")
"""
LIMITED = """
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20, resource.RLIM_INFINITY))
        while True:
            keep(step)
"""
"""Nothing else asks for memory from then on."""


def hoarder(tmp_path: Path, limit: str = LIMITED, steps: int = 400) -> Path:
    script = tmp_path / "hoard.py"
    script.write_text(HOARDER.replace("{limit}", limit.strip()).replace("{steps}", str(steps)))
    return script


def evidence(finding: dict[str, Any]) -> dict[str, Any]:
    return {item["metric"]: item["value"] for item in finding["evidence"]}


def test_a_job_whose_address_space_is_limited(tmp_path: Path) -> None:
    done = profile(tmp_path, hoarder(tmp_path), ranks=None)
    assert done.status == 1
    assert "can't allocate memory" in done.stderr
    assert done.stdout == ""
    found = {finding["code"]: finding for finding in done.findings["findings"]}
    died, oom = found["run.rank-died"], found["memory.oom-risk"]
    assert "out of memory: 16.0 MiB more were asked for" in died["title"]
    assert done.findings["verdict"]["status"] == "failed"
    assert oom["severity"] == "high"
    assert died["where"]["steps"] == [3, 3]
    line = 1 + (tmp_path / "hoard.py").read_text().splitlines().index(
        "    outputs.append(torch.ones(4 * 2**20))  # 16 MiB"
    )
    assert oom["title"].startswith(f"rank 0 ran out of memory at hoard.py:{line}: 16.0 MiB more, with ")
    told = evidence(oom)
    weights = (1000 * 2000 + 2000 + 2000 * 1000 + 1000) * 4
    assert told["parameters"] == told["gradients"] == weights
    assert told["optimizer states"] == pytest.approx(2 * weights, abs=100)
    (kept,) = [metric for metric in told if metric.startswith("held by outputs (hoard.py, <module>; ")]
    assert told[kept] >= 8 * 16 * MiB
    assert oom["fixes"][0]["title"].startswith("outputs (hoard.py, <module>; ")


@both
def test_an_error_that_the_script_catches_is_no_end(native: str, tmp_path: Path) -> None:
    done = train(
        tmp_path,
        """
        import torch
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(torch.ones(1, 2)).sum().backward(); optimizer.step()
        try:
            torch.empty(2**58)
        except RuntimeError as error:
            print("caught")
        """,
        native=native,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "caught\n", "")
    assert captured(tmp_path).of("out_of_memory") == []


def test_pythons_own_error_is_told_too(tmp_path: Path) -> None:
    done = train(
        tmp_path,
        """
        import torch
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(torch.ones(1, 2)).sum().backward(); optimizer.step()
        try:
            bytearray(2**60)
        except MemoryError as error:
            raise ValueError("the data is too large") from error
        """,
        native="0",
    )
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: the data is too large\n")
    (told,) = captured(tmp_path).of("out_of_memory")
    assert (told["error"], told["asked"], told["step"], told["place"]) == ("MemoryError", None, 3, "host")
    assert told["stack"][0][0] == "<module>"
    assert told["parts"] == {"parameters": 24, "gradients": 24}


@both
def test_losses_are_the_same_bit_for_bit(native: str, tmp_path: Path) -> None:
    code = """
        import torch
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Dropout(0.3), torch.nn.Linear(128, 8))
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(40):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 64)).square().mean()
            loss.backward()
            optimizer.step()
            print(loss.item().hex())
        """
    with_it = train(tmp_path, code, native=native, DSPROF_LEVEL="full")
    alone = train(tmp_path, code, native=native, DSPROF="0")
    assert with_it.returncode == 0
    assert with_it.stderr == ""
    assert with_it.stdout == alone.stdout
    rows = [row for row in captured(tmp_path).rows if row.lane == "memory.host"]
    assert {"resident", "parameters", "gradients", "optimizer_states", "activations"} <= {row.name for row in rows}


@pytest.mark.parametrize(("said", "asked"), [
    ("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate "
     "16777216 bytes. Error code 12 (Cannot allocate memory)", 16777216),
    ("Unable to allocate 7.45 GiB for an array with shape (1000, 1000000)", int(7.45 * 2**30)),
    ("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has", 2 * MiB),
    ("", None),
])  # fmt: skip
def test_what_was_asked_for(said: str, asked: int | None) -> None:
    assert asked_for(said) == asked


# --- a cgroup -------------------------------------------------------------------------------------


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup of at most 400 MiB; skips where none can be made, or the kernel does not keep to it."""
    first = Path("/sys/fs/cgroup/memory")
    root = first if first.is_dir() else Path("/sys/fs/cgroup")
    folder = root / f"dsprof-test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if first.is_dir() else "memory.max"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("no cgroup can be made here")
    try:
        try:
            (folder / limit).write_text(str(400 * MiB))
            done = subprocess.run(
                [sys.executable, "-c", f"open({str(folder / 'cgroup.procs')!r}, 'w').write('0'); bytearray(600 << 20)"]
            )
        except OSError:
            pytest.skip("the memory of a cgroup cannot be limited here")
        if done.returncode != -signal.SIGKILL:
            pytest.skip("the kernel does not keep to the limit of a cgroup here")
        yield folder
    finally:
        folder.rmdir()


def test_a_job_that_the_kernel_kills_in_a_cgroup(tmp_path: Path, cgroup: Path) -> None:
    script = hoarder(tmp_path, limit="pass")
    joins = f"open({str(cgroup / 'cgroup.procs')!r}, 'w').write('0')\n"
    script.write_text(joins + script.read_text())
    done = profile(tmp_path, script, ranks=None)
    assert done.status == 128 + signal.SIGKILL
    found = {finding["code"]: finding for finding in done.findings["findings"]}
    assert "killed for want of memory" in found["run.rank-died"]["title"]
    oom = found["memory.oom-risk"]
    assert oom["title"].startswith("rank 0 was killed for want of memory: ")
    assert evidence(oom)["parameters"] == (1000 * 2000 + 2000 + 2000 * 1000 + 1000) * 4
