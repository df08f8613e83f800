"""What a device's streams did, by events: on a device that is not there (`fake_device.cpp`), and from rows."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import forked_python
import numpy as np
import pandas as pd
import pytest
import torch
from jobs import environment

from dsprof.collectors.native import build
from dsprof.run import RunFolder
from dsprof.schema import BACKWARD_DONE, DEVICE_CLOCK
from dsprof.trace import load
from dsprof.trace.derive import derive
from dsprof.trace.derive.streams import clock_offsets

MS = 1_000_000

JOB = """
import atexit, json, sys
import torch
from torch import nn
import fake_device

losses = []
# Last of all: what short steps have put on the stream is read when the capture closes.
atexit.register(lambda: print(json.dumps({"losses": losses, "counts": fake_device.counts()})))

torch.cuda.is_initialized, torch.cuda.current_device = lambda: True, lambda: 0

class Busy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        fake_device.launch(4)
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        fake_device.launch(8)
        return grad

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return Busy.apply(self.linear(x))

class Sgd(torch.optim.SGD):
    def step(self, closure=None):
        fake_device.launch(2)
        return super().step(closure)

torch.manual_seed(0)
model = Layer()
optimizer = Sgd(model.parameters(), 0.1)
for step in range(30):
    if step == FAIL_AT:
        fake_device.fail()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss))
    if step % 4 == 3:
        fake_device.drain()
fake_device.drain()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `import fake_device` finds it."""
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA itself")
    place = tmp_path_factory.mktemp("fake")
    compiler = build._compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    includes = [Path(torch.__file__).parent / "include", sysconfig.get_paths()["include"]]
    libraries = Path(torch.__file__).parent / "lib"
    subprocess.run(
        [
            *compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-w",
            *(f"-isystem{include}" for include in includes), str(Path(__file__).parent / "fake_device.cpp"),
            "-o", str(place / "fake_device.so"), f"-L{libraries}", "-ltorch_cpu", "-lc10",
        ],
        check=True, timeout=300,
    )  # fmt: skip
    return place


def run(folder: Path, where: Path, *, fail_at: int = -1, armed: bool = True) -> dict[str, dict[str, int] | list[float]]:
    script = where / "job.py"
    script.write_text(JOB.replace("FAIL_AT", str(fail_at)))
    paths = [str(folder), *sys.path]
    command = [sys.executable, str(script)]
    if armed:
        command = [sys.executable, "-m", "dsprof", "run", "-q", "--no-report", "-o", str(where / "run")]
        # These would ask a CUDA that is not there.
        command += ["--without", "memory,nvml,host-sync", str(script)]
    ended = forked_python.run(
        command, env={**environment(), "PYTHONPATH": ":".join(filter(None, paths))}, cwd=where,
        capture_output=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_phases_are_timed_on_the_stream_and_nothing_waits_for_the_device(folder: Path, tmp_path: Path) -> None:
    told = run(folder, tmp_path)
    counts = told["counts"]
    assert isinstance(counts, dict)
    assert counts["record"] > 100
    assert counts["elapsed"] > 100
    assert "synchronize" not in counts
    trace = load(RunFolder(tmp_path / "run"))
    rows = trace.rows
    stream = rows[(rows["kind"] == "kernel") & rows["dur_ns"].notna()]
    assert set(stream["lane"]) == {"cuda.0"}
    for name, took in {"forward": 4, "backward": 8, "optimizer": 2}.items():
        spans = stream.loc[stream["name"] == name, "dur_ns"].to_numpy(np.int64) / MS
        assert len(spans) >= 28, name  # the first step shows that there is a device
        # The host may be late, so a span may be longer, but where it was ahead it is what the device took.
        assert spans.min() >= took - 0.05
        assert np.median(spans) == pytest.approx(took, abs=0.2)
    # On the host the same phases take next to nothing: what the device does is told by its own lane.
    assert (stream["start_ns"] + stream["dur_ns"].astype("int64") > stream["issue_ns"].astype("int64")).all()
    assert not [warning for warning in trace.run.warnings if "error" in warning]


def test_the_budget_follows_the_stream_where_the_host_is_ahead(folder: Path, tmp_path: Path) -> None:
    from dsprof.analyzer import analyze

    run(folder, tmp_path)
    budget = analyze(load(RunFolder(tmp_path / "run"))).budget
    # 12 and 2 ms of each 14, of which the host takes less than one.
    assert budget["compute"] / budget["optimizer"] == pytest.approx(6, rel=0.2)
    assert budget["compute"] + budget["optimizer"] > 0.8 * sum(budget.values())


def test_losses_are_the_same_without_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    watched, plain = run(folder, tmp_path / "with"), run(folder, tmp_path / "without", armed=False)
    assert watched["losses"] == plain["losses"]
    assert plain["counts"] == {}


def test_a_device_that_fails_is_left_alone_and_told_once(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path, fail_at=12)
    trace = load(RunFolder(tmp_path / "run"))
    told = [warning for warning in trace.run.warnings if "illegal memory access" in warning]
    assert len(told) == 1
    assert "events of a device" in told[0]
    assert (trace.rows["kind"] == "step").sum() >= 29


# --- from rows


def rows_of(*rows: dict[str, object]) -> pd.DataFrame:
    common = {"thread": 1, "source": "measured", "ended": True, "dur_ns": pd.NA, "device": False}
    return pd.DataFrame([{**common, **row} for row in rows])


def sample(device_ns: int, early: int, late: int) -> dict[str, object]:
    return {"kind": "gauge", "name": DEVICE_CLOCK, "start_ns": early, "dur_ns": late - early, "value": float(device_ns)}


def test_the_tightest_samples_tell_how_far_the_clocks_are_apart() -> None:
    told = rows_of(*(sample(at * MS, at * MS + 900, at * MS + 1100) for at in range(4)),
                   *(sample(at * MS, at * MS - 50_000, at * MS + 90_000) for at in range(12)))  # fmt: skip
    when, offset, doubt = clock_offsets(told)
    assert offset.tolist() == [1000.0]
    assert doubt == 100.0
    assert when[0] == 1.5 * MS


def test_clocks_that_drift_apart_are_followed() -> None:
    second = 1_000_000_000
    at = np.arange(0, 200, 5) * second
    drift = 5000 + at * 50e-6  # 50 ppm
    told = rows_of(*(sample(int(t), int(t + d) - 30_000, int(t + d) + 30_000) for t, d in zip(at, drift, strict=True)))
    when, offset, _ = clock_offsets(told)
    assert len(when) == 10
    found = np.interp(at, when, offset)
    inner = (at > when[0]) & (at < when[-1])
    assert np.abs(found - drift)[inner].max() < 300_000


def test_a_streams_wait_bears_the_number_of_the_hosts_and_the_reducers_are_derived() -> None:
    comm = {"kind": "comm", "group": "0", "dtype": "float32", "device": True}
    stream = {"lane": "cuda.0", "device": True}
    rows = rows_of(
        {"kind": "phase", "name": "forward", "start_ns": 0, "dur_ns": 10},
        {"kind": "phase", "name": "backward", "start_ns": 10, "dur_ns": 20},
        {"kind": "phase", "name": "optimizer", "start_ns": 40, "dur_ns": 5},
        {"kind": "wait", "name": "all_gather", "start_ns": 5, "dur_ns": 1, "group": "1", "seq": 7},
        {"kind": "kernel", "name": "forward", "start_ns": 100, "dur_ns": 100, "issue_ns": 0, **stream},
        {"kind": "wait", "name": "wait", "start_ns": 150, "dur_ns": 10, "issue_ns": 5, **stream},
        {"kind": "kernel", "name": "backward", "start_ns": 200, "dur_ns": 400, "issue_ns": 10, **stream},
        {"kind": "kernel", "name": BACKWARD_DONE, "start_ns": 500, "dur_ns": 0, "issue_ns": 28, **stream},
        {"kind": "kernel", "name": "optimizer", "start_ns": 600, "dur_ns": 50, "issue_ns": 40, **stream},
        {"name": "all_reduce", "start_ns": 300, "dur_ns": 100, "issue_ns": 15, "seq": 0, **comm},
        {"name": "all_reduce", "start_ns": 450, "dur_ns": 120, "issue_ns": 25, "seq": 1, **comm},
    )
    derived = derive(rows, {"ddp", "device"})
    waits = derived[(derived["kind"] == "wait") & (derived["lane"] == "cuda.0")]
    told = waits[["name", "group", "seq", "start_ns", "dur_ns", "source"]].values.tolist()
    assert told == [
        ["all_gather", "1", 7, 150, 10, "measured"],
        ["all_reduce", "0", 1, 500, 70, "derived"],
    ]
    kernels = derived[derived["kind"] == "kernel"]
    assert kernels["name"].tolist() == ["forward", "backward", "optimizer"]
    assert kernels["step"].tolist() == [0, 0, 0]  # by when they were issued
    assert derived.loc[derived["kind"] == "comm", "purpose"].tolist() == ["gradient", "gradient"]
    # The host did not wait for what its device communicates.
    assert not ((derived["kind"] == "wait") & (derived["lane"] == "main") & (derived["source"] == "derived")).any()
