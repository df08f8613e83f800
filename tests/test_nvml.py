"""The device collector, asked with a fake NVML that gives every answer and every error."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
from captures import Row, read_rows
from fake_nvml import FakeNvml
from jobs import environment

from dsprof import gauges
from dsprof.collectors.capture import side_thread
from dsprof.collectors.capture.facts import Fact
from dsprof.collectors.capture.open_capture import OpenCapture
from dsprof.collectors.devices import nvml
from dsprof.collectors.recorder.python_recorder import PyRecorder
from dsprof.schema import Kind

GB = 1 << 30

TABLE = {
    "device.utilization_percent": 97.0,
    "device.memory_utilization_percent": 41.0,
    "device.memory_used_bytes": 60.0 * GB,
    "device.memory_total_bytes": 80.0 * GB,
    "device.power_w": 612.5,
    "device.power_limit_w": 700.0,
    "device.sm_clock_mhz": 1755.0,
    "device.sm_clock_max_mhz": 1980.0,
    "device.memory_clock_mhz": 2619.0,
    "device.memory_clock_max_mhz": 2620.0,
    "device.clock_reasons": 68.0,
    "device.temperature_c": 71.0,
    "device.ecc_corrected": 4.0,
    "device.ecc_uncorrected": 1.0,
    "device.pcie_generation": 4.0,
    "device.pcie_generation_max": 5.0,
    "device.pcie_width": 8.0,
    "device.pcie_width_max": 16.0,
    "device.pcie_sent_bytes_per_s": 1_500_000.0,
    "device.pcie_received_bytes_per_s": 22_000_000.0,
    "device.pcie_replays": 12.0,
    "device.nvlinks": 3.0,
    "device.nvlink_errors": 178.0,
}
"""What the fake's answers are as gauges; three of its four links are up, and have (10 link + kind) errors."""
FEATURES = {"fact": "gpu", "index": 3, "uuid": "GPU-1234", "name": "NVIDIA H100", "driver": "580.65"}


class Names:
    """Of a recorder, as much as is needed to see which gauges there are."""

    def __init__(self) -> None:
        self.told: dict[str, float] = {}

    def intern(self, name: str) -> str:
        return name

    def span(self, kind: int, name: str, start: int, end: int, issue: int, value: float, *rest: Any) -> None:
        self.told[name] = value


class Bench:
    """A capture, and the looks at a fake device."""

    def __init__(
        self, folder: Path, fake: FakeNvml | Exception, name: str | int = "GPU-1234", recorder: Any = None
    ) -> None:
        folder.mkdir()
        self.folder = folder
        self.facts: list[Fact] = []
        self.over = False
        self.recorder = recorder or PyRecorder(folder)
        capture = OpenCapture(self.recorder, folder, "light", lambda: True, lambda: None, self.facts.append)

        def library() -> Any:
            if isinstance(fake, Exception):
                raise fake
            return fake

        self.looks = nvml.Watch(capture, name, library, lambda: self.over).looks()

    def look(self, times: int = 1) -> bool:
        """Whether there is more to see after so many looks."""
        return all(next(self.looks, self) is None for _ in range(times))

    def rows(self) -> list[Row]:
        self.recorder.close()
        return read_rows(self.folder)

    def told(self) -> dict[str, float | None]:
        return {row.name: row.value for row in self.rows()}

    @property
    def notes(self) -> list[str]:
        return [fact["text"] for fact in self.facts if fact["fact"] == "note"]


def test_every_answer(tmp_path: Path) -> None:
    fake = FakeNvml()
    bench = Bench(tmp_path / "capture", fake)
    assert bench.look()
    rows = bench.rows()
    assert {row.name: row.value for row in rows} == TABLE
    assert {(row.kind, row.lane, row.thread) for row in rows} == {(Kind.GAUGE, "gpu.3", threading.get_native_id())}
    assert bench.facts == [FEATURES]
    bench.looks.close()
    assert [call for call in fake.calls if call[0] in ("nvmlInit", "nvmlShutdown")] == [
        ("nvmlInit",),
        ("nvmlShutdown",),
    ]
    asked = {name for name, *_ in fake.calls if name.startswith("nvmlDeviceGet")}
    assert asked <= {name for name in vars(pynvml) if name.startswith("nvml")}


def test_what_hardly_changes_is_asked_for_less_often(tmp_path: Path) -> None:
    fake = FakeNvml()
    bench = Bench(tmp_path / "capture", fake)
    assert bench.look(11)
    counted: dict[str, int] = {}
    for row in bench.rows():
        counted[row.name] = counted.get(row.name, 0) + 1
    assert counted == {
        **dict.fromkeys(TABLE, 11),
        **dict.fromkeys([name for name in TABLE if "pcie" in name or "ecc" in name], 3),
        **dict.fromkeys([name for name in TABLE if "nvlink" in name], 2),
        **dict.fromkeys([name for name in TABLE if name.endswith(("_max_mhz", "_max", "_total_bytes"))], 1),
        gauges.POWER_LIMIT: 1,
    }


FUNCTIONS = {
    ("nvmlDeviceGetUtilizationRates",): (gauges.UTILIZATION, gauges.MEMORY_UTILIZATION),
    ("nvmlDeviceGetMemoryInfo", pynvml.nvmlMemory_v2): (gauges.MEMORY_USED, gauges.MEMORY_TOTAL),
    ("nvmlDeviceGetPowerUsage",): (gauges.POWER,),
    ("nvmlDeviceGetEnforcedPowerLimit",): (gauges.POWER_LIMIT,),
    ("nvmlDeviceGetClockInfo", 1): (gauges.SM_CLOCK,),
    ("nvmlDeviceGetClockInfo", 2): (gauges.MEMORY_CLOCK,),
    ("nvmlDeviceGetMaxClockInfo", 1): (gauges.SM_CLOCK_MAX,),
    ("nvmlDeviceGetMaxClockInfo", 2): (gauges.MEMORY_CLOCK_MAX,),
    ("nvmlDeviceGetCurrentClocksEventReasons",): (gauges.CLOCK_REASONS,),
    ("nvmlDeviceGetTemperature", 0): (gauges.TEMPERATURE,),
    ("nvmlDeviceGetTotalEccErrors", 0, 0): (gauges.ECC_CORRECTED,),
    ("nvmlDeviceGetTotalEccErrors", 1, 0): (gauges.ECC_UNCORRECTED,),
    ("nvmlDeviceGetCurrPcieLinkGeneration",): (gauges.PCIE_GENERATION,),
    ("nvmlDeviceGetMaxPcieLinkGeneration",): (gauges.PCIE_GENERATION_MAX,),
    ("nvmlDeviceGetCurrPcieLinkWidth",): (gauges.PCIE_WIDTH,),
    ("nvmlDeviceGetMaxPcieLinkWidth",): (gauges.PCIE_WIDTH_MAX,),
    ("nvmlDeviceGetPcieThroughput", 0): (gauges.PCIE_SENT,),
    ("nvmlDeviceGetPcieThroughput", 1): (gauges.PCIE_RECEIVED,),
    ("nvmlDeviceGetPcieReplayCounter",): (gauges.PCIE_REPLAYS,),
    ("nvmlDeviceGetNvLinkState", 0): (gauges.NVLINKS, gauges.NVLINK_ERRORS),
    ("nvmlDeviceGetNvLinkErrorCounter", 1, 3): (gauges.NVLINK_ERRORS,),
}
ERRORS = sorted(code for code in pynvml.NVMLError._valClassMapping if code)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: "-".join(map(str, function)))
def test_every_error_of_every_function(tmp_path: Path, function: tuple[Any, ...]) -> None:
    """One that is final takes that gauge away, in silence; one that is not, until the next look; one that says that the
    device is gone ends the looking, with a note."""
    for code in ERRORS:
        error = pynvml.NVMLError(code)
        fake = FakeNvml({function: error})
        names = Names()
        bench = Bench(tmp_path / f"capture{code}", fake, recorder=names)
        more = bench.look()
        missing = set(FUNCTIONS[function])
        if (code, function[0]) == (13, "nvmlDeviceGetMemoryInfo"):  # then it is asked as older drivers are
            missing = set()
        if code in (1, 9, 15, 16, 18):  # not initialized, no driver, lost, to be reset, of another version
            assert not more
            assert bench.notes == [
                f"the GPU's clocks, power and errors are not known: NVML says {type(error).__name__}: {error}"
            ]
            assert fake.calls[-1] == ("nvmlShutdown",)
            continue
        assert more
        assert bench.notes == []
        asked = [(call[0], *call[2:]) for call in fake.calls].count(function)
        bench.look(60)
        asked_again = [(call[0], *call[2:]) for call in fake.calls].count(function) - asked
        assert (asked_again == 0) == (code in (2, 3, 4, 6, 13) and missing != set()), code
        assert names.told == {name: value for name, value in TABLE.items() if name not in missing}


def test_an_older_driver_says_throttle_where_a_newer_one_says_event(tmp_path: Path) -> None:
    old = {
        ("nvmlDeviceGetCurrentClocksEventReasons",): pynvml.NVMLError_FunctionNotFound(),
        ("nvmlDeviceGetCurrentClocksThrottleReasons",): 0x20,
    }
    bench = Bench(tmp_path / "capture", FakeNvml(old))
    assert bench.look()
    assert bench.told() == {**TABLE, gauges.CLOCK_REASONS: 32.0}


def test_an_older_driver_counts_what_it_keeps_as_used(tmp_path: Path) -> None:
    old = {("nvmlDeviceGetMemoryInfo", pynvml.nvmlMemory_v2): pynvml.NVMLError_FunctionNotFound()}
    bench = Bench(tmp_path / "capture", FakeNvml(old))
    assert bench.look()
    assert bench.told() == TABLE


def test_an_error_that_passes(tmp_path: Path) -> None:
    fake = FakeNvml({("nvmlDeviceGetPowerUsage",): [pynvml.NVMLError_Timeout(), 100_000, 101_000]})
    bench = Bench(tmp_path / "capture", fake)
    assert bench.look(3)
    assert [row.value for row in bench.rows() if row.name == gauges.POWER] == [100.0, 101.0]


@pytest.mark.parametrize(
    ("fake", "says"),
    [
        (ModuleNotFoundError("No module named 'pynvml'"), "ModuleNotFoundError: No module named 'pynvml'"),
        (FakeNvml({("nvmlInit",): pynvml.NVMLError_LibraryNotFound()}),
         "NVMLError_LibraryNotFound: NVML Shared Library Not Found"),
        (FakeNvml({("nvmlInit",): pynvml.NVMLError_DriverNotLoaded()}),
         "NVMLError_DriverNotLoaded: Driver Not Loaded"),
        (FakeNvml({("nvmlDeviceGetHandleByUUID", "GPU-1234"): pynvml.NVMLError_NotFound()}),
         "NVMLError_NotFound: Not Found"),
        (FakeNvml({("nvmlDeviceGetName",): pynvml.NVMLError_NoPermission()}),
         "NVMLError_NoPermission: Insufficient Permissions"),
    ],
    ids=["no package", "no library", "no driver", "no such device", "no permission"],
)  # fmt: skip
def test_where_there_is_no_nvml_there_is_one_note(tmp_path: Path, fake: Any, says: str) -> None:
    bench = Bench(tmp_path / "capture", fake)
    assert not bench.look(3)
    assert bench.facts == [
        {"fact": "note", "text": f"the GPU's clocks, power and errors are not known: NVML says {says}"}
    ]
    assert bench.rows() == []


def test_a_device_that_tells_nothing(tmp_path: Path) -> None:
    silent = {function: pynvml.NVMLError_NotSupported() for function in FUNCTIONS}
    bench = Bench(tmp_path / "capture", FakeNvml(silent))
    assert not bench.look(100)
    assert (bench.notes, bench.rows()) == ([], [])


def test_a_part_of_a_gpu_is_asked_for_what_is_its_own(tmp_path: Path) -> None:
    fake = FakeNvml()
    bench = Bench(tmp_path / "capture", fake, name="MIG-77")
    assert bench.look()
    by_handle: dict[str, set[str]] = {}
    for name, *arguments in fake.calls:
        if arguments and name not in ("nvmlDeviceGetHandleByUUID", "nvmlDeviceGetDeviceHandleFromMigDeviceHandle"):
            by_handle.setdefault(arguments[0], set()).add(name)
    assert by_handle["handle of MIG-77"] == {
        "nvmlDeviceGetUUID", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMemoryInfo",
    }  # fmt: skip
    assert {"nvmlDeviceGetPowerUsage", "nvmlDeviceGetIndex"} <= by_handle["the whole of it"]


def test_nothing_is_written_once_the_capture_closes(tmp_path: Path) -> None:
    """Also of an answer that the driver gives only then."""
    fake = FakeNvml()
    bench = Bench(tmp_path / "capture", fake)
    answered: list[str] = []

    class Late:
        @property
        def gpu(self) -> int:
            bench.over = True
            answered.append("late")
            return 50

    fake.answers["nvmlDeviceGetUtilizationRates",] = Late()
    assert not bench.look()
    assert answered == ["late"]
    assert bench.rows() == []


# --- which device ---------------------------------------------------------------------------------

UUID = "5fd4c6e1-1c1e-1c1e-1c1e-0123456789ab"


@pytest.mark.parametrize(
    ("number", "visible", "uuid", "name"),
    [
        (0, None, UUID, f"GPU-{UUID}"),
        (1, "3,2", f"GPU-{UUID}", f"GPU-{UUID}"),
        (0, "", "", 0),
        (2, None, "", 2),
        (1, "3, 2", "", 2),
        (1, "GPU-aaaa,GPU-bbbb", "", "GPU-bbbb"),
        (0, "MIG-77, MIG-78", UUID, "MIG-77"),
        (0, "MIG-GPU-5fd4/1/0", "", "MIG-GPU-5fd4/1/0"),
        (3, "0,1", "", 3),
    ],
)
def test_what_nvml_knows_a_device_by(number: int, visible: str | None, uuid: str, name: str | int) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert nvml.device_name(number, environ, uuid) == name


def test_the_thread_starts_where_cuda_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    fake, imported_on = FakeNvml(), []

    def import_on_side_thread(name: str) -> Any:
        imported_on.append((name, threading.current_thread().name))
        return fake

    steps: list[Callable[[], None]] = []
    facts: list[Fact] = []
    looked = threading.Event()

    def write_fact(fact: Fact) -> None:
        facts.append(fact)
        looked.set()

    (tmp_path / "capture").mkdir()
    recorder = PyRecorder(tmp_path / "capture")
    capture = OpenCapture(recorder, tmp_path, "light", lambda: True, lambda: None, write_fact, after_step=steps)
    monkeypatch.setattr(nvml, "import_on_side_thread", import_on_side_thread)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    (uninstall,) = nvml.install(capture)
    steps[0]()
    assert (steps, imported_on) == ([], [])

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: type("Properties", (), {"uuid": UUID})())
    nvml.install(capture)
    uninstalls = nvml.install(capture)
    for step in tuple(steps):
        step()
    assert looked.wait(60)
    for one in (uninstall, *uninstalls):
        one()
    assert {*imported_on} == {("pynvml", "dsprof-nvml")}
    assert facts[0] == FEATURES
    assert ("nvmlDeviceGetHandleByUUID", f"GPU-{UUID}") in fake.calls
    recorder.close()


# --- the thread -----------------------------------------------------------------------------------


def test_a_call_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_thread, "LAST_WAIT_S", 0.0)
    hangs, inside = threading.Event(), threading.Event()

    def looks() -> side_thread.Poller:
        inside.set()
        hangs.wait()
        yield

    thread = side_thread.SideThread("test", looks)
    thread.start()
    assert inside.wait(60)
    thread.stop()
    assert thread.stopping
    hangs.set()


def test_an_error_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[tuple[str, str]] = []
    seen = threading.Event()

    def count(where: str, error: BaseException) -> None:
        counted.append((where, str(error)))
        seen.set()

    def looks() -> side_thread.Poller:
        yield
        raise ValueError("ours")

    monkeypatch.setattr(side_thread, "count_error", count)
    thread = side_thread.SideThread("test", looks, every_s=0.0)
    thread.start()
    assert seen.wait(60)
    thread.stop()
    assert counted == [("test", "ours")]


def test_a_hanging_driver_does_not_keep_the_process(tmp_path: Path) -> None:
    program = """
import threading, time
from dsprof.collectors.capture import side_thread
inside = threading.Event()
def looks():
    inside.set()
    threading.Event().wait()
    yield
thread = side_thread.SideThread("nvml", looks)
thread.start()
inside.wait()
thread.stop()
print("ended")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment(), cwd=tmp_path
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


def test_forks_wait_for_an_import(tmp_path: Path) -> None:
    """A child that is forked in the middle of it would have that module's lock taken for good."""
    (tmp_path / "slow_module.py").write_text(
        "import shared\nshared.begun.set()\nassert shared.forking.wait(60)\nshared.order.append('imported')\n"
    )
    (tmp_path / "shared.py").write_text(
        "import threading\nbegun, forking, order = threading.Event(), threading.Event(), []\n"
    )
    program = """
import os, sys, threading
sys.path.insert(0, ".")
import shared
from dsprof.collectors.capture import side_thread
def looks():
    side_thread.import_on_side_thread("slow_module")
    yield
thread = side_thread.SideThread("test", looks)
os.register_at_fork(before=lambda: shared.order.append("forked"))  # runs after those that are registered later
thread.start()
assert shared.begun.wait(60)
threading.Timer(0.2, shared.forking.set).start()
pid = os.fork()
if not pid:
    import slow_module
    os._exit(7)
print(shared.order, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
thread.stop()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment(), cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "['imported', 'forked'] 7\n"), done.stderr
