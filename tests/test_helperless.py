"""Without the native helper no Python function stands in the way of a job that trains on a device."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from armed import Captured, captured, train

from dsprof.analyzer import analyze
from dsprof.analyzer.rules.missing_collectors import EVERYTHING, reasons, unproved
from dsprof.collectors.capture import recorder_setup, without_helper
from dsprof.collectors.capture.without_helper import NEED_HELPER, SWITCHED_OFF, device_job, left_out
from dsprof.collectors.catalogue import COLLECTORS
from dsprof.collectors.recorder.record import LIMIT_BYTES
from dsprof.run import RunFolder
from dsprof.schema import Kind
from dsprof.trace import load

JOB = """
import sys, torch, torch.distributed as dist
from torch.utils.data import DataLoader

# A device's backend, which communicates as gloo does: what torch calls NCCL on a GPU.
def create(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)

dist.Backend.register_backend("sleepy", create, devices="cuda")
call, wait, get_future = torch.nn.Module.__call__, dist.Work.wait, dist.Work.get_future
dist.init_process_group("{backend}", store=dist.HashStore(), rank=0, world_size=1)
hooked = [
    torch.nn.Module.__call__ is not call, dist.Work.wait is not wait, dist.Work.get_future is not get_future,
    *(torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{{name}}", "BackendSelect")
      for name in ("allreduce_", "broadcast_", "send")),
]
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8), init_sync=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(torch.linspace(0, 1, 320).reshape(40, 8), batch_size=2):
    loss = model(batch).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(hooked, float(loss.detach()).hex())
dist.destroy_process_group()
"""
ON_DEVICE, ON_CPU = "cpu:gloo,cuda:sleepy", "gloo"
NO_COMPILER = "no C++ compiler found (set CXX, or install g++)"


def run(tmp_path: Path, backend: str, **env: str) -> subprocess.CompletedProcess[str]:
    """On a machine without a helper and without a compiler."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    bare = {"CXX": "/nowhere/c++", "DSPROF_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp")}
    done = train(tmp_path, JOB.format(backend=backend), native="", **(bare | env))
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def on_device(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Captured]:
    """A job on a device, what it printed and what was captured of it."""
    folder = tmp_path_factory.mktemp("device")
    done = run(folder, ON_DEVICE)
    return folder, done.stdout, captured(folder)


def test_a_job_on_a_device_meets_no_python_wrapper(on_device: tuple[Path, str, Captured], tmp_path: Path) -> None:
    _, said, _ = on_device
    assert said.startswith(f"{[False] * 6} 0x")
    unwatched = run(tmp_path, ON_DEVICE, DSPROF="0")
    assert unwatched.stdout == said  # the same loss, too


def test_its_phases_and_steps_are_recorded(on_device: tuple[Path, str, Captured]) -> None:
    _, _, found = on_device
    assert {row.kind for row in found.rows} <= {Kind.PHASE, Kind.MEM, Kind.GAUGE, Kind.PAUSE, Kind.MARK}
    for phase in ("data", "backward", "optimizer"):
        assert len(found.phases(phase)) >= 20
    assert found.phases("forward") == []
    assert found.of("left_out") == [{"collectors": sorted(NEED_HELPER)}]
    (note,) = found.of("note")
    why = "a process group communicates by sleepy on cuda"
    assert note == {
        "text": f"only phases and steps were recorded of a job on a device ({why}): no native helper ({NO_COMPILER});"
        " `dsprof build` makes it, then run the job again"
    }


def test_the_verdict_says_so(on_device: tuple[Path, str, Captured]) -> None:
    folder, _, found = on_device
    analysis = analyze(load(RunFolder(folder / "run")))
    assert analysis.verdict.status == "inconclusive"
    said = (
        "of a job on a device only phases and steps are recorded without the native helper, which `dsprof build` makes"
    )
    assert said in analysis.verdict.headline
    for code in ("comm.exposed", "pause.stop"):
        assert analysis.not_judged[code] == said, code
    assert "data.stall" in analysis.not_judged  # for that reason, or as the steps of a busy machine differ
    assert {"comm.exposed", "run.hang", "run.desync", "eval.uneven"}.isdisjoint(analysis.passed)
    assert f"rank 0: {found.of('note')[0]['text']}" in analysis.capture.warnings
    assert all(len(warning) < 300 for warning in analysis.capture.warnings)  # and none is cut short


def test_a_job_on_the_cpu_is_recorded_in_python(tmp_path: Path) -> None:
    done = run(tmp_path, ON_CPU)
    assert done.stdout.startswith(f"{[True] * 6} 0x")
    found = captured(tmp_path)
    assert {"backward", "forward", "optimizer"} <= {row.name for row in found.phases()}
    assert any(row.kind is Kind.COMM for row in found.rows)
    assert found.of("left_out") == []
    (note,) = found.of("note")
    assert note == {"text": f"recorded in Python, which is slower, as there is no native helper: {NO_COMPILER}"}


def test_where_it_cannot_be_told_nothing_is_slowed_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something private of torch's has moved: the capture opens all the same, and the error is counted."""

    def moved() -> str:
        raise AttributeError("no pg_backend_config")

    counted: list[str] = []
    monkeypatch.setenv("DSPROF_NATIVE", "off")
    monkeypatch.setattr(recorder_setup, "device_job", moved)
    monkeypatch.setattr(recorder_setup, "count_error", lambda where, error: counted.append(f"{where}: {error}"))
    recorder, native, found = recorder_setup.recorder(tmp_path, LIMIT_BYTES, copied=False)
    recorder.close()
    assert not native
    assert found == left_out(SWITCHED_OFF, "or perhaps not: it could not be told")
    assert found.collectors == NEED_HELPER
    assert counted == ["what the job trains on: no pg_backend_config"]


# --- the decision


def test_what_is_left_out() -> None:
    assert set(COLLECTORS) >= NEED_HELPER
    assert left_out(SWITCHED_OFF, None) == (frozenset(), "")  # somebody knows
    assert left_out(SWITCHED_OFF, "torch.cuda is in use") == (
        NEED_HELPER,
        "only phases and steps were recorded of a job on a device (torch.cuda is in use): no native helper (switched"
        " off by --native off or DSPROF_NATIVE); run it without that",
    )


@pytest.mark.parametrize(
    ("config", "shows"),
    [
        ("cpu:gloo,cuda:gloo", None),
        ("cpu:gloo", None),
        ("cpu:ucc,cuda:ucc", None),  # serves both
        ("cpu:fake,cuda:fake,hpu:fake,xpu:fake", None),
        ("cuda:nccl", "nccl on cuda"),
        ("cpu:gloo,cuda:nccl", "nccl on cuda"),
        ("xpu:xccl", "xccl on xpu"),
        ("cpu:gloo,npu:hccl", "hccl on npu"),
        ("", None),
    ],
)
def test_backends(config: str, shows: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(without_helper, "_backends", lambda: [config])
    expected = None if shows is None else f"a process group communicates by {shows}"
    assert device_job({}, tmp_path) == expected


def test_one_group_of_many_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(without_helper, "_backends", lambda: ["cpu:gloo,cuda:gloo", "cuda:nccl"])
    assert device_job({}, tmp_path) == "a process group communicates by nccl on cuda"


def test_one_that_is_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a job of one process, which may have no group."""
    assert device_job({}, tmp_path) is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert device_job({}, tmp_path) == "torch.cuda is in use"


def test_where_tensors_are_made_on_a_device(tmp_path: Path) -> None:
    """What torch calls the default device it finds out by making a tensor there."""
    with torch.device("cuda"):
        assert device_job({}, tmp_path) is None


@pytest.mark.parametrize(
    ("built_for", "file", "hides"),
    [
        ("cuda", "nvidia0", "CUDA_VISIBLE_DEVICES"),
        ("cuda", "nvidia12", "CUDA_VISIBLE_DEVICES"),
        ("hip", "kfd", "HIP_VISIBLE_DEVICES"),
        ("xpu", "dri/renderD128", "ZE_AFFINITY_MASK"),
    ],
)
def test_one_that_can_be_seen(
    built_for: str, file: str, hides: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a job that has joined a group by gloo, and so may yet use it. No driver is asked, which could spoil a fork."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    monkeypatch.setattr(torch.version, built_for, "12.6", raising=False)

    def ask(*args: object) -> None:
        raise AssertionError("a driver was asked")

    for place, name in ((torch.cuda, "_lazy_init"), (torch.cuda, "is_available"), (torch.cuda, "device_count"),
                        (torch._C, "_cuda_getDeviceCount"), (torch._C, "_get_accelerator")):  # fmt: skip
        monkeypatch.setattr(place, name, ask, raising=False)
    assert device_job({}, tmp_path) is None  # a process without a group that trains already trains on the CPU
    monkeypatch.setattr(without_helper, "_backends", lambda: ["cpu:gloo,cuda:gloo"])
    seen = f"it can see one, and {hides}= hides it from a job that computes on the CPU"
    assert device_job({}, tmp_path) == device_job({hides: "0,1"}, tmp_path) == seen
    for hidden in ("", "-1", "none", "NoDevFiles"):
        assert device_job({hides: hidden}, tmp_path) is None
    monkeypatch.setattr(torch.version, built_for, None, raising=False)  # a torch that could not use it
    assert device_job({}, tmp_path) is None


def test_a_machine_without_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(without_helper, "_backends", lambda: ["cpu:gloo,cuda:gloo"])
    (tmp_path / "nvidiactl").touch()  # a driver, and no device passed into the container
    assert device_job({}, tmp_path) is None


def test_both_kinds_of_reasons() -> None:
    facts = {"left_out": [{"collectors": ["modules"]}], "without": [{"collectors": ["phases", "collectives"]}]}
    assert reasons(facts, ["checkpoint.stall"]) == {
        EVERYTHING: "the collectors collectives, phases were switched off (--without); of a job on a device only phases"
        " and steps are recorded without the native helper, which"
        " `dsprof build` makes"
    }
    off = "the collector collectives was switched off (--without)"
    assert unproved(facts, ["run.hang", "run.desync"]) == {
        "run.hang": off,
        "run.desync": off,
    }
    assert unproved({}, ["run.hang"]) == {}
