"""What is sampled of memory, when, and that no step of it touches a CUDA that is not in use."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import allocations
import pytest
import torch
from captures import Row, open_recorder, read_rows
from cuda_memory import FakeCuda, MiB, stats_of

from dsprof.collectors.capture.open_capture import OpenCapture
from dsprof.collectors.hooking.uninstall import Uninstall
from dsprof.collectors.memory.cuda_history import History
from dsprof.collectors.memory.cuda_memory import COUNTS, POOLS, STATS, TorchCuda, largest_free
from dsprof.collectors.memory.live_tensors import LiveTensors
from dsprof.collectors.memory.memory_sampler import Sampler
from dsprof.collectors.memory.process_memory import HostMemory, oom_kills
from dsprof.run import RunFolder
from dsprof.schema import OOM_SNAPSHOT_NAME, SNAPSHOT_NAME, Kind
from dsprof.trace.snapshot import read_snapshot


class Watched:
    """A sampler of a capture that a test writes step by step."""

    def __init__(self, folder: Path, cuda: FakeCuda, level: str = "light", most: int = 100_000) -> None:
        self.folder, self.cuda, self.on, self.now = folder, cuda, True, 0
        self.facts: list[dict[str, Any]] = []
        self.live = LiveTensors()
        self.recorder = open_recorder("python", folder)
        self.capture = OpenCapture(
            self.recorder, folder, level, lambda: self.on, lambda: None, lambda fact: self.facts.append(fact)
        )
        self.history = History(cuda, most)
        self.backwards: list[Callable[[], None]] = []
        sampler = Sampler(self.capture, cuda, HostMemory(), self.live, self.history, self._clock, self._clock)
        self._uninstall = sampler.install(self._before_backward)

    def _clock(self) -> int:
        return self.now

    def _before_backward(self, call: Callable[[], None]) -> Uninstall:
        self.backwards.append(call)
        return lambda: None

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for call in self.backwards:
                call()
            self.now += 1_000_000
            for hook in self.capture.samples:
                hook(1)

    def close(self) -> None:
        while self._uninstall:
            self._uninstall.pop()()
        self.recorder.close()

    def rows(self, lane: str, name: str | None = None) -> list[Row]:
        found = [row for row in read_rows(self.folder) if row.kind is Kind.MEM and row.lane == lane]
        return [row for row in found if name is None or row.name == name]

    def told(self, fact: str) -> list[dict[str, Any]]:
        found = [one for one in self.facts if one["fact"] == fact]
        return [{key: value for key, value in one.items() if key != "fact"} for one in found]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def make(*devices: dict[str, Any], **more: Any) -> Watched:
        level, most = more.pop("level", "light"), more.pop("most", 100_000)
        made.append(Watched(tmp_path / "capture", FakeCuda(*devices, **more), level, most))
        return made[-1]

    yield make
    for one in made:
        one.close()


# --- after each step ------------------------------------------------------------------------------


def test_a_process_without_cuda_is_sampled_and_cuda_is_asked_nothing(watched: Callable[..., Watched]) -> None:
    run = watched(in_use=False)
    run.step(3)
    names = {row.name for row in run.rows("memory.host")}
    assert {"resident", "resident_peak", "capacity"} <= names
    resident = run.rows("memory.host", "resident")[0]
    peak = run.rows("memory.host", "resident_peak")[0]
    assert 50 * MiB < resident.bytes <= peak.bytes < 100 * 1024 * MiB
    assert run.cuda.calls == []


def test_what_a_device_has_by_pool(watched: Callable[..., Watched]) -> None:
    used = stats_of(allocated=100 * MiB, reserved=160 * MiB, peak=140 * MiB, split=10 * MiB, retries=2)
    run = watched(used, stats_of())
    allocations.steady(run.cuda.memory, steps=1)
    run.step()
    rows = {(row.name, row.purpose): row.value if row.bytes < 0 else row.bytes for row in run.rows("memory.cuda.0")}
    assert rows == {
        ("allocated", ""): 100 * MiB, ("allocated", "small_pool"): 50 * MiB, ("allocated", "large_pool"): 50 * MiB,
        ("reserved", ""): 160 * MiB, ("reserved", "small_pool"): 80 * MiB, ("reserved", "large_pool"): 80 * MiB,
        ("active", ""): 100 * MiB, ("active", "small_pool"): 50 * MiB, ("active", "large_pool"): 50 * MiB,
        ("inactive_split", ""): 10 * MiB, ("inactive_split", "small_pool"): 5 * MiB,
        ("inactive_split", "large_pool"): 5 * MiB,
        ("allocated_peak", ""): 140 * MiB, ("reserved_peak", ""): 160 * MiB, ("retries", ""): 2.0, ("ooms", ""): 0.0,
        ("capacity", ""): 1024 * MiB, ("free", ""): 864 * MiB, ("largest_free", ""): 60 * MiB,
    }  # fmt: skip
    assert run.rows("memory.cuda.1") == [], "a device that holds nothing"


def test_a_number_is_written_when_it_changed_and_now_and_then(watched: Callable[..., Watched]) -> None:
    run = watched(stats_of(allocated=100, reserved=200))
    run.step(20)
    assert len(run.rows("memory.cuda.0", "reserved")) == 2 * 3, "in the first step and the seventeenth, by pool"
    run.cuda.per_device[0] = stats_of(allocated=100, reserved=300)
    run.step()
    assert [row.bytes for row in run.rows("memory.cuda.0", "reserved") if not row.purpose] == [200, 200, 300]


def test_a_step_is_cheap_for_cuda(watched: Callable[..., Watched]) -> None:
    run = watched(stats_of(allocated=100, reserved=200))
    run.step(17)  # the last that is looked at more closely is the sixteenth
    run.cuda.calls.clear()
    run.step()
    assert run.cuda.calls == ["capturing", "stats"]


def test_nothing_is_asked_while_a_cuda_graph_is_captured(watched: Callable[..., Watched]) -> None:
    run = watched(stats_of(allocated=100, reserved=200))
    run.cuda.graph = True
    run.step()
    assert run.cuda.calls == ["capturing"]


def test_the_keys_are_torchs() -> None:
    """Of the documentation of `torch.cuda.memory_stats`, which names them for every version."""
    told = torch.cuda.memory_stats.__doc__ or ""
    for key in (*STATS.values(), *COUNTS.values()):
        assert f'``"{key}' in told, key
    assert all(f"``{pool}``" in told for pool in POOLS)


def test_torch_is_not_made_to_initialize_cuda() -> None:
    cuda = TorchCuda()
    assert not cuda.initialized()
    called: list[int] = []
    cuda.when_initialized(lambda: called.append(1))
    assert not torch.cuda.is_initialized()
    assert called == []
    torch.cuda._queued_calls.pop()
    unwatch = cuda.watch_recording(lambda: called.append(2))
    assert torch.cuda.memory._record_memory_history.__name__ == "_record_memory_history"
    unwatch()
    assert not hasattr(torch.cuda.memory._record_memory_history, "_dsprof")


def test_the_largest_free_block() -> None:
    device = allocations.Device()
    device.free(device.alloc(60 * MiB), device.alloc(30 * MiB))
    device.alloc(24 * MiB)  # in the smaller segment, of which 6 MiB are left
    assert largest_free(device.snapshot()["segments"], 0) == 60 * MiB
    assert largest_free(device.snapshot()["segments"], 1) == 0


# --- what it is for -------------------------------------------------------------------------------


@pytest.fixture
def no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that earlier tests of this process have left tell of their tensors, too."""
    monkeypatch.setattr("dsprof.collectors.memory.live_tensors.hooks.memory_held", lambda: iter(()))


def model() -> tuple[torch.nn.Module, torch.optim.Optimizer, LiveTensors]:
    """1000 x 250 numbers and a buffer of 500, trained by Adam for a step."""
    layer = torch.nn.Linear(1000, 250, bias=False)
    layer.register_buffer("seen", torch.zeros(500))
    optimizer = torch.optim.Adam(layer.parameters(), foreach=False)
    layer(torch.ones(4, 1000)).sum().backward()
    optimizer.step()
    live = LiveTensors()
    live.modules.add(layer)
    live.optimizers.add(optimizer)
    return layer, optimizer, live


@pytest.mark.usefixtures("no_engines")
def test_what_the_tensors_of_a_model_are_for() -> None:
    layer, optimizer, live = model()
    parts = live.measure()
    assert parts == {
        ("host", "parameters"): 1_000_000, ("host", "gradients"): 1_000_000, ("host", "buffers"): 2000,
        ("host", "optimizer_states"): 2_000_004,
    }  # fmt: skip
    assert live.gradients() == {("host", "gradients"): 1_000_000}
    optimizer.zero_grad()
    assert live.gradients() == {}
    del layer, optimizer
    assert live.measure() == {}


@pytest.mark.usefixtures("no_engines")
def test_views_of_one_buffer_count_once_and_copies_in_another_format_are_the_optimizers() -> None:
    flat = torch.zeros(100)
    layers = [torch.nn.Linear(10, 5, bias=False) for _ in range(2)]
    for index, layer in enumerate(layers):
        layer.weight.data = flat[50 * index : 50 * index + 50].view(5, 10)
    master = flat.double().requires_grad_()
    optimizer = torch.optim.SGD([master], lr=0.1)
    live = LiveTensors()
    for layer in layers:
        live.modules.add(layer)
    live.optimizers.add(optimizer)
    assert live.measure() == {("host", "parameters"): 400, ("host", "optimizer_states"): 800}


@pytest.mark.usefixtures("no_engines")
def test_of_a_sharded_parameter_the_part_that_lies_here() -> None:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4,))
        layer = torch.nn.Linear(8, 16, bias=False)
        whole = DTensor.from_local(torch.zeros(4, 8), mesh, [Shard(0)])
        layer.weight = torch.nn.Parameter(whole)
        live = LiveTensors()
        live.modules.add(layer)
        assert live.measure() == {("host", "parameters"): 4 * 8 * 4}
    finally:
        torch.distributed.destroy_process_group()


def test_activations_are_what_there_is_more_when_backward_begins(watched: Callable[..., Watched]) -> None:
    """Gradients that went meanwhile made room."""
    layer, optimizer, live = model()
    run = watched(stats_of(allocated=100 * MiB, reserved=200 * MiB))
    run.live.modules.add(layer)
    run.step()  # after which it is looked at what memory is for
    assert run.rows("memory.cuda.0", "activations") == []
    run.cuda.per_device[0] = stats_of(allocated=130 * MiB, reserved=200 * MiB)
    run.step()
    run.step(4)
    (seen,) = [row for row in run.rows("memory.cuda.0", "activations") if row.start_ns == 2_000_000]
    assert seen.bytes == 30 * MiB
    assert [row.bytes for row in run.rows("memory.cuda.0", "between_steps")][:1] == [100 * MiB]
    parts = [row.name for row in run.rows("memory.host") if row.start_ns == 1_000_000]
    assert {"parameters", "gradients", "buffers"} <= set(parts)
    del optimizer, live


# --- the allocation history -----------------------------------------------------------------------


def test_no_history_below_level_full(watched: Callable[..., Watched]) -> None:
    run = watched(stats_of(allocated=100, reserved=200))
    run.step(2)
    run.close()
    assert run.cuda.recorded == []
    assert not (run.folder / SNAPSHOT_NAME).exists()


def test_the_history_begins_with_the_first_use_of_cuda_and_ends_with_a_snapshot(
    watched: Callable[..., Watched],
) -> None:
    run = watched(stats_of(allocated=100, reserved=200), in_use=False, level="full")
    assert run.cuda.calls == []
    run.cuda.initialize()
    assert run.cuda.recorded == [100_000]
    run.step(2)
    run.close()
    assert run.cuda.recorded == [100_000, None]
    assert (run.folder / SNAPSHOT_NAME).exists()
    assert read_snapshot(run.folder / SNAPSHOT_NAME).settings == run.cuda.memory.snapshot()["allocator_settings"]
    assert run.told("note") == []


def test_the_history_of_a_window_is_written_when_it_is_over(watched: Callable[..., Watched]) -> None:
    run = watched(stats_of(allocated=100, reserved=200), level="full")
    run.step(2)
    run.on = False
    run.step()
    assert run.cuda.recorded == [100_000, None]
    assert (run.folder / SNAPSHOT_NAME).exists()
    run.on = True
    for hook in run.capture.when_on:
        hook()
    assert run.cuda.recorded == [100_000, None, 100_000]


def test_a_history_whose_beginning_was_overwritten_is_told(watched: Callable[..., Watched]) -> None:
    run = watched(stats_of(allocated=100, reserved=200), level="full", most=20)
    allocations.steady(run.cuda.memory, steps=1)
    run.step()
    run.close()
    (note,) = run.told("note")
    assert note["text"].startswith("the memory history of device 0 begins with its last 20 events")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_history_that_the_script_records_is_left_alone(watched: Callable[..., Watched], when: str) -> None:
    run = watched(stats_of(allocated=100, reserved=200), in_use=False, level="full")
    if when == "before":
        run.cuda.recording = True
    run.cuda.initialize()
    if when == "after":
        run.cuda.script_records()
    recorded = list(run.cuda.recorded)
    run.step()
    run.close()
    assert run.cuda.recording, "nobody stopped it"
    assert run.cuda.recorded == recorded
    assert not (run.folder / SNAPSHOT_NAME).exists()
    (note,) = run.told("note")
    assert "the script records the history of CUDA memory itself, which is left alone" in note["text"]


# --- out of memory --------------------------------------------------------------------------------


def test_a_device_that_has_no_more_is_told_with_a_snapshot(watched: Callable[..., Watched]) -> None:
    layer, optimizer, live = model()
    run = watched(stats_of(allocated=700 * MiB, reserved=900 * MiB))
    run.live.modules.add(layer)
    run.step(3)
    run.cuda.run_out(0, asked=200 * MiB, free=124 * MiB)
    (told,) = run.told("out_of_memory")
    assert (told["place"], told["asked"], told["free"], told["capacity"]) == (
        "cuda.0", 200 * MiB, 124 * MiB, 1024 * MiB,
    )  # fmt: skip
    assert (told["allocated"], told["reserved"], told["step"]) == (700 * MiB, 900 * MiB, 3)
    assert told["stack"][0][0] == "FakeCuda.run_out"
    assert told["stack"][1][0] == "test_a_device_that_has_no_more_is_told_with_a_snapshot"
    assert (run.folder / OOM_SNAPSHOT_NAME).exists()
    for _ in range(5):
        run.cuda.run_out(0, asked=200 * MiB, free=124 * MiB)
    assert len(run.told("out_of_memory")) == 3, "a script may try sizes until one fits"
    del optimizer, live


def test_what_fails_in_the_observer_is_counted_and_does_not_reach_the_job(
    watched: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsprof.collectors.hooking import errors

    run = watched(stats_of(allocated=700 * MiB, reserved=900 * MiB))
    run.step()
    counted: list[str] = []
    here = threading.get_ident()
    # What other tests of this process have left, noted or on a thread, is not this one's.
    monkeypatch.setattr(errors, "noted", [])
    errors.send_to(lambda where, said: counted.append(where) if threading.get_ident() == here else None)
    try:
        run.cuda.per_device.clear()
        run.cuda.run_out(0, asked=200 * MiB, free=124 * MiB)
    finally:
        errors.send_to(None)
    assert counted == ["an out-of-memory error"]


# --- the host -------------------------------------------------------------------------------------


def cgroup_files(tmp_path: Path, lines: str, files: dict[str, str]) -> HostMemory:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "statm").write_text("1000 500 1 1 0 1 0\n")
    (proc / "self" / "cgroup").write_text(lines)
    (proc / "meminfo").write_text("MemTotal:       16384 kB\nMemFree: 1 kB\n")
    for name, content in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(content)
    return HostMemory(proc, cgroups)


def test_the_limit_of_a_cgroup_is_the_lowest_on_the_way_up(tmp_path: Path) -> None:
    host = cgroup_files(
        tmp_path, "0::/jobs/mine\n",
        {"jobs/mine/memory.max": "max\n", "jobs/memory.max": "4194304\n",
         "jobs/memory.events": "low 0\nhigh 0\nmax 7\noom 2\noom_kill 2\n", "memory.max": "8388608\n"},
    )  # fmt: skip
    limits = host.limits()
    assert (limits.cgroup, limits.path, limits.oom_kills) == (4194304, str(tmp_path / "cgroup" / "jobs"), 2)
    assert (limits.host, limits.least) == (16384 * 1024, 4194304)
    assert host.now() == (500 * resource.getpagesize(), 1000 * resource.getpagesize())
    host.close()


def test_the_first_version_of_cgroups_and_a_container_that_sees_its_own_as_the_root(tmp_path: Path) -> None:
    host = cgroup_files(
        tmp_path, "4:memory:/docker/abc\n0::/\n",
        {"memory/memory.limit_in_bytes": "2097152\n", "memory/memory.oom_control": "oom_kill_disable 0\noom_kill 1\n"},
    )  # fmt: skip
    limits = host.limits()
    assert (limits.cgroup, limits.oom_kills) == (2097152, 1)
    host.close()


def test_no_limit_at_all(tmp_path: Path) -> None:
    host = cgroup_files(tmp_path, "4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"})
    limits = host.limits()
    assert (limits.cgroup, limits.path, limits.oom_kills, limits.least) == (None, "", None, 16384 * 1024)
    assert oom_kills(tmp_path) is None
    host.close()


def test_facts_can_be_written(watched: Callable[..., Watched]) -> None:
    run = watched(stats_of(allocated=700 * MiB, reserved=900 * MiB))
    run.step()
    run.cuda.run_out(0, asked=200 * MiB, free=124 * MiB)
    assert json.loads(json.dumps(run.facts)) is not None
    assert RunFolder(run.folder).path == run.folder
