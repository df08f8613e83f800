"""What the host is busy with: readings of psutil and of /proc, and the thread that takes them."""

from __future__ import annotations

import multiprocessing
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from armed import captured, train
from captures import read_rows

from dsprof import gauges
from dsprof.collectors.capture.open_capture import OpenCapture
from dsprof.collectors.host import hindrances, machine_load
from dsprof.collectors.recorder.python_recorder import PyRecorder
from dsprof.collectors.system.proc import PAGE, TICKS_A_SECOND
from dsprof.schema import Kind


class FakePsutil:
    Error = psutil.Error

    def cpu_times_percent(self) -> Any:
        return SimpleNamespace(user=60.0, system=10.0, idle=20.0, iowait=5.0, steal=5.0)

    def virtual_memory(self) -> Any:
        return SimpleNamespace(available=64 << 30)

    def disk_io_counters(self) -> Any:
        return SimpleNamespace(read_bytes=10_000, write_bytes=20_000)

    def net_io_counters(self, pernic: bool) -> Any:
        assert pernic
        card = SimpleNamespace(bytes_sent=100, bytes_recv=1000)
        return {"lo": SimpleNamespace(bytes_sent=9999, bytes_recv=9999), "eth0": card, "ib0": card}


OF_PROCESS = {
    "process.resident_bytes": 3.0 * PAGE, "process.involuntary_switches": 11.0, "process.read_bytes": 1000.0,
    "process.written_bytes": 2000.0,
}  # fmt: skip
OF_MACHINE = {
    "host.cpu_percent": 75.0, "host.cpu_steal_percent": 5.0, "host.memory_available_bytes": 64.0 * 2**30,
    "host.disk_read_bytes": 10_000.0, "host.disk_written_bytes": 20_000.0, "host.network_sent_bytes": 200.0,
    "host.network_received_bytes": 2000.0,
}  # fmt: skip


def capture(folder: Path) -> OpenCapture:
    (folder / "capture").mkdir()
    recorder = PyRecorder(folder / "capture")
    return OpenCapture(recorder, folder, "light", lambda: True, lambda: None, lambda fact: None)


def told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: Any, *, first: bool, looks: int = 1
) -> list[dict[str, float | None]]:
    """What each of so many looks writes."""
    monkeypatch.setattr(machine_load, "import_on_side_thread", lambda name: {"psutil": fake}[name])
    monkeypatch.setattr("multiprocessing.process._children", set())
    monkeypatch.setattr(machine_load.resource, "getrusage", lambda who: SimpleNamespace(ru_nivcsw=11))
    own = tmp_path / "proc" / "self"
    own.mkdir(parents=True)
    (own / "statm").write_text("100 3 2 1 0 1 0\n")
    (own / "io").write_text("rchar: 5\nwchar: 6\nread_bytes: 1000\nwrite_bytes: 2000\ncancelled_write_bytes: 0\n")
    opened = capture(tmp_path)
    seen = machine_load.looks(opened, first, lambda: False, str(tmp_path / "proc"))
    found = []
    next(seen)  # nothing yet: shares are since the one before
    for _ in range(looks):
        before = len(read_rows(tmp_path / "capture"))
        next(seen)
        rows = read_rows(tmp_path / "capture")[before:]
        assert {row.kind for row in rows} <= {Kind.GAUGE}
        found.append({row.name: row.value for row in rows})
    seen.close()
    opened.recorder.close()
    return found


def test_the_first_rank_of_a_machine_tells_of_it_in_every_second_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = told(tmp_path, monkeypatch, FakePsutil(), first=True, looks=4)
    assert found == [OF_PROCESS, {**OF_PROCESS, **OF_MACHINE}] * 2


def test_other_ranks_tell_of_themselves_and_do_without_psutil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(tmp_path, monkeypatch, None, first=False, looks=2) == [OF_PROCESS] * 2


@pytest.mark.parametrize(
    "error", [psutil.AccessDenied(1), PermissionError("no"), NotImplementedError(), AttributeError()]
)
def test_what_is_not_told_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    asked: list[int] = []

    class Refuses(FakePsutil):
        def virtual_memory(self) -> Any:
            asked.append(1)
            raise error

    fake = Refuses()
    fake.disk_io_counters = lambda: None  # type: ignore[method-assign]
    refused = ("available_bytes", "disk_read_bytes", "disk_written_bytes")
    less = {name: value for name, value in OF_MACHINE.items() if not name.endswith(refused)}
    found = told(tmp_path, monkeypatch, fake, first=True, looks=4)
    assert found == [OF_PROCESS, {**OF_PROCESS, **less}] * 2
    assert asked == [1]


@pytest.mark.parametrize("text", ["", "rchar: 5\n", "what is this"])
def test_what_a_kernel_does_not_count_is_left_out(tmp_path: Path, text: str) -> None:
    """/proc/self/io is there where the kernel accounts for it, and where a sandbox lets it be read."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "io").write_text(text)
    opened = capture(tmp_path)
    seen = machine_load.looks(opened, False, lambda: False, str(tmp_path / "proc"))
    for _ in range(3):
        next(seen)
    opened.recorder.close()
    assert {row.name for row in read_rows(tmp_path / "capture")} == {gauges.SWITCHED_OUT, gauges.MAJOR_FAULTS}


@pytest.mark.parametrize(
    ("stat", "seconds"),
    [
        ("usage_usec 900\nnr_throttled 3\nthrottled_usec 250000\n", [(gauges.THROTTLED, 0.25)]),
        ("usage_usec 900\nuser_usec 500\n", [(gauges.THROTTLED, 0.0)]),  # without the cpu controller: no quota
        ("", []),  # not ours to read
    ],
)
def test_how_long_a_quota_stopped_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stat: str, seconds: list[tuple[str, float]]
) -> None:
    (tmp_path / "cpu.stat").write_text(re.sub(r"_usec \d+", "_usec 0", stat))
    monkeypatch.setattr(hindrances.proc, "cgroups_of", lambda controller, root: [(tmp_path, 2)])
    throttled = hindrances.Throttled()
    assert [*throttled("/proc")] == [(name, 0.0) for name, _ in seconds]
    (tmp_path / "cpu.stat").write_text(stat)
    assert [*throttled("/proc")] == seconds


def test_the_quota_that_stops_it_now_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's own quota may have stopped others for long, and this process while it began: what its container's does
    now is seen beside it, and what both do at once counts once."""
    pod, container = tmp_path / "pod", tmp_path / "pod" / "container"
    container.mkdir(parents=True)
    monkeypatch.setattr(hindrances.proc, "cgroups_of", lambda controller, root: [(container, 2), (pod, 2)])
    throttled, told = hindrances.Throttled(), []
    for of_pod, of_container in ((90.0, 1.0), (95.0, 1.0), (95.0, 3.5), (96.0, 4.0), (96.0, 0.5)):
        (pod / "cpu.stat").write_text(f"throttled_usec {of_pod * 1e6:.0f}\n")
        (container / "cpu.stat").write_text(f"throttled_usec {of_container * 1e6:.0f}\n")
        ((name, seconds),) = throttled("/proc")
        assert name == gauges.THROTTLED
        told.append(seconds)
    assert told == [0.0, 5.0, 7.5, 8.5, 8.5]  # a container that is made anew counts from the beginning


def test_the_host_itself_answers(tmp_path: Path) -> None:
    opened = capture(tmp_path)
    seen = machine_load.looks(opened, True, lambda: False)
    for _ in range(3):
        next(seen)
    opened.recorder.close()
    found = {row.name: row.value for row in read_rows(tmp_path / "capture")}
    resident = found[gauges.RESIDENT]
    assert resident is not None
    assert abs(resident - psutil.Process().memory_info().rss) < resident / 2
    assert 0 <= (found[gauges.CPU_BUSY] or 0) <= 100
    assert {gauges.SWITCHED_OUT, gauges.MEMORY_AVAILABLE, gauges.NETWORK_SENT} <= set(found)


# --- workers --------------------------------------------------------------------------------------


def proc(folder: Path, **states: tuple[str, str]) -> str:
    """A /proc with these processes: state, and the function of the kernel."""
    for pid, (state, function) in states.items():
        (folder / pid[1:]).mkdir()
        (folder / pid[1:] / "stat").write_text(f"{pid[1:]} (a (pt) D) {state} 1 2 3")
        (folder / pid[1:] / "wchan").write_text(function)
    return str(folder)


def test_where_workers_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = proc(
        tmp_path, p11=("R", "0"), p12=("D", "folio_wait_bit"), p13=("D", "folio_wait_bit"), p14=("D", "0"),
        p15=("S", "pipe_read"), p16=("Z", "0"), p17=("D", "nfs_wait"),
    )  # fmt: skip
    processes = [type("Child", (), {"pid": pid})() for pid in (11, 12, 13, 14, 15, 16, 17, 99, None)]
    monkeypatch.setattr("multiprocessing.process._children", set(processes))
    assert dict(machine_load.read_workers(folder)) == {
        "workers.alive": 6, "workers.busy": 1, "workers.on_disk": 4, "workers.in.folio_wait_bit": 2,
        "workers.in.nfs_wait": 1,
    }  # fmt: skip
    monkeypatch.setattr("multiprocessing.process._children", set(processes[-2:]))
    assert dict(machine_load.read_workers(folder)) == {}


def test_workers_of_this_process() -> None:
    fork = multiprocessing.get_context("fork")
    sleeper = fork.Process(target=time.sleep, args=(60,), daemon=True)
    sleeper.start()
    try:
        found = dict(machine_load.read_workers("/proc"))
        assert found["workers.alive"] >= 1
        assert found["workers.busy"] + found["workers.on_disk"] <= found["workers.alive"]
    finally:
        sleeper.kill()
        sleeper.join()


# --- the thread -----------------------------------------------------------------------------------


def test_it_is_imported_and_asked_on_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[tuple[str, str]] = []
    asked = threading.Event()

    class Tells(FakePsutil):
        def cpu_times_percent(self) -> Any:
            asked.set()
            return super().cpu_times_percent()

    def import_on_side_thread(name: str) -> Any:
        imported.append((name, threading.current_thread().name))
        return Tells()

    monkeypatch.setattr(machine_load, "import_on_side_thread", import_on_side_thread)
    monkeypatch.setattr(machine_load.identity, "identify", lambda: SimpleNamespace(local_rank=0))
    opened = capture(tmp_path)
    (stop,) = machine_load.install(opened)
    assert asked.wait(60)
    stop()
    assert imported == [("psutil", "dsprof-host-load")]
    opened.recorder.close()


def test_a_training_thread_loads_neither(tmp_path: Path) -> None:
    """psutil is imported beside the training; pynvml not at all where no GPU is in use."""
    done = train(
        tmp_path,
        """
        import sys, threading
        import torch  # which itself imports pynvml, where it is
        seen, asked = [], threading.Event()
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name in ("psutil", "pynvml"):
                    seen.append((name, threading.current_thread().name))
                    asked.set()
        sys.meta_path.insert(0, Finder())
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert asked.wait(60)
        print(seen)
        """,
        native="0",
    )
    assert (done.returncode, done.stdout) == (0, "[('psutil', 'dsprof-host-load')]\n"), done.stderr
    captured(tmp_path)  # and no errors inside


def test_threads_with_ever_new_names_do_not_use_up_those_of_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hindrances, "_names", set())
    (tmp_path / "self" / "task" / "7").mkdir(parents=True)
    ticks = f"7 (python) S {' '.join(['0'] * 10)} {3 * TICKS_A_SECOND} {TICKS_A_SECOND} 0 0"
    (tmp_path / "self" / "task" / "7" / "stat").write_text(ticks)
    told = set()
    for number in range(1000):
        thread = SimpleNamespace(name=f"Thread-{number} (save)", native_id=7)
        monkeypatch.setattr(hindrances, "_threads", lambda one=thread: [one])
        told |= set(hindrances.read_threads(str(tmp_path)))
    assert len(told) == hindrances.MOST_NAMES
    assert ("python_thread.Thread-0 (save)", 4.0) in told
    monkeypatch.setattr(hindrances, "_threads", lambda: [SimpleNamespace(name="Thread-0 (save)", native_id=7)])
    assert list(hindrances.read_threads(str(tmp_path))) == [("python_thread.Thread-0 (save)", 4.0)]  # it still is
