"""Three steps that dsprof traces by itself: what makes a rank suspicious, whom it asks, what holds it back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from captures import open_recorder
from sleeping_jobs import JOBS, SleepingRanks

from dsprof import control, settings
from dsprof.analyzer.rules.compute.device_kernels import MOST_UNSEEN
from dsprof.analyzer.study import study as study_of
from dsprof.analyzer.work.device_idle import unseen_idle_ms
from dsprof.collectors.capture.identity import Identity, use_settings
from dsprof.collectors.capture.open_capture import OpenCapture
from dsprof.collectors.capture.window import Switch, Window
from dsprof.collectors.devices import deep
from dsprof.collectors.devices.deep import Suspicion
from dsprof.collectors.devices.launching import ClockSample, DevicePhase, clock_offset, launching_share
from dsprof.collectors.hooking import errors
from dsprof.control import Control, DeepRequest
from dsprof.schema import CONTROL_FILE, DEEP_FILE

MS = 1_000_000

# --- the share ----------------------------------------------------------------------------------


def steps_of(
    count: int, host_ms: float, device_ms: float, start_ms: float = 0.0
) -> tuple[list[DevicePhase], dict[int, int]]:
    """Steps of one phase: the host launches it in `host_ms`, the device is through with it in `device_ms`, or when the
    host is, and begins the next when both are there."""
    phases, ends, host, free = [], {}, start_ms, start_ms
    for _ in range(count):
        issue, host = host, host + host_ms
        begin = max(issue, free)
        free = max(begin + device_ms, host)
        phases.append(DevicePhase(int(issue * MS), int(begin * MS), int(free * MS)))
        ends[int(issue * MS)] = int(host * MS)
    return phases, ends


def test_a_device_that_waits_for_each_launch_is_suspicious_all_the_time() -> None:
    assert launching_share(*steps_of(20, host_ms=10, device_ms=2)) == (1.0, 1.0)


def test_a_host_that_runs_ahead_is_not() -> None:
    phases, ends = steps_of(20, host_ms=2, device_ms=10)
    first, second = launching_share(phases, ends) or (None, None)
    assert first == pytest.approx(2 / 100)  # the first phase, before the host was ahead
    assert second == 0


def test_a_stop_of_the_host_makes_one_half_suspicious_only() -> None:
    ahead, ends = steps_of(10, host_ms=2, device_ms=10)
    behind, more = steps_of(10, host_ms=10, device_ms=2, start_ms=100)
    first, second = launching_share([*ahead, *behind], ends | more) or (0.0, 0.0)
    assert first < MOST_UNSEEN < second


def test_what_is_computed_again_in_a_backward_counts_once() -> None:
    phases, ends = steps_of(20, host_ms=10, device_ms=2)
    inner = [DevicePhase(one.issue_ns + MS, one.start_ns + MS, one.end_ns - MS) for one in phases]
    both = ends | {one.issue_ns: one.issue_ns + 5 * MS for one in inner}
    assert launching_share([*phases, *inner], both) == (1.0, 1.0)


def test_of_few_phases_nothing_is_told() -> None:
    assert launching_share(*steps_of(7, host_ms=10, device_ms=2)) is None
    assert launching_share([], {}) is None


def test_the_clocks_are_aligned_by_the_tightest_samples() -> None:
    offset = 5 * MS
    loose = [ClockSample(offset + at, offset + at + 2 * MS, at) for at in range(0, 100 * MS, 10 * MS)]
    tight = [ClockSample(offset + at - 1000, offset + at + 1000, at) for at in (3 * MS, 7 * MS, 11 * MS)]
    assert clock_offset([*loose, *tight]) == offset
    assert clock_offset([]) is None


# --- the control file ---------------------------------------------------------------------------

REQUEST = DeepRequest(40, 43, (0, 1), 0.94)


def test_of_two_ranks_that_ask_at_once_one_does(tmp_path: Path) -> None:
    path = tmp_path / CONTROL_FILE
    assert control.ask_once(path, REQUEST)
    assert not control.ask_once(path, DeepRequest(50, 53, (0,), 0.5))
    assert control.read(path) == Control(None, REQUEST)
    assert [one.name for one in tmp_path.iterdir()] == [CONTROL_FILE]


def test_who_turns_the_capture_off_leaves_what_was_asked(tmp_path: Path) -> None:
    path = tmp_path / CONTROL_FILE
    control.ask_once(path, REQUEST)
    control.turn(path, "off")
    assert control.read(path) == Control(False, REQUEST)


def test_a_user_who_steers_the_capture_is_not_interfered_with(tmp_path: Path) -> None:
    path = tmp_path / CONTROL_FILE
    control.turn(path, "on")
    assert not control.ask_once(path, REQUEST)
    assert control.read(path) == Control(True, None)


@pytest.mark.parametrize(
    "said",
    ["", "[]", "{}", '{"deep": 3}', '{"deep": {"first": 3}}',
     '{"deep": {"first": 3, "last": 3, "ranks": [], "share": 1}}',
     '{"deep": {"first": -1, "last": 3, "ranks": [0], "share": 1}}', '{"capture": "maybe"}',
     '{"deep": {"first": 1, "last": 3, "ranks": ["0"], "share": 1}}'],
)  # fmt: skip
def test_what_the_file_cannot_say_is_refused(tmp_path: Path, said: str) -> None:
    (tmp_path / CONTROL_FILE).write_text(said)
    with pytest.raises(ValueError, match=r"control\.json|Expecting"):
        control.read(tmp_path / CONTROL_FILE)


def test_a_rank_hears_what_is_new(tmp_path: Path) -> None:
    recorder = open_recorder("python", tmp_path / "capture")
    now = [100.0]
    switch = Switch(recorder, Window(), tmp_path, lambda: now[0])
    heard: list[Control] = []
    switch.when_told.append(heard.append)
    control.ask_once(tmp_path / CONTROL_FILE, REQUEST)
    for _ in range(3):
        now[0] += 1
        switch.after_step()
    recorder.close()
    assert heard == [Control(None, REQUEST)]
    assert switch.on


# --- one rank, and several ----------------------------------------------------------------------


class Device:
    """What torch.cuda says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        self.used, self.capturing, self.free = True, False, 10 << 30
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.used)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        self.torn_down = True
        monkeypatch.setattr(deep, "sees_devices", lambda: True)
        monkeypatch.setattr(deep, "can_be_torn_down", lambda: self.torn_down)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (self.free, 80 << 30))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


@dataclass
class Rank:
    """A rank whose steps take 100 ms, and are sampled each."""

    suspicion: Suspicion
    capture: OpenCapture
    facts: list[dict[str, Any]]
    profiled: list[tuple[str, int]]
    """What was asked of the profiler, and in which step."""
    written: list[Callable[[], None]]
    now: list[int]
    on: list[bool]
    taken: int = 0
    windows: list[Any] = field(default_factory=list)

    def step(self) -> None:
        self.taken += 1
        self.now[0] += 100 * MS
        for hook in tuple(self.capture.after_step):
            hook()
        for sample in tuple(self.capture.samples):
            sample(1)

    def steps(self, count: int) -> Rank:
        for _ in range(count):
            self.step()
        return self


MakeRank = Callable[..., Rank]


@pytest.fixture
def rank(device: Device, tmp_path: Path) -> Iterator[MakeRank]:
    opened = []

    def make(number: int = 0, world: int = 1, share: Any = (0.9, 1.0), step_ms: int = 100) -> Rank:
        recorder: Any = open_recorder("python", tmp_path / f"capture{number}")
        recorder.graphs_seen = 0
        facts: list[dict[str, Any]] = []
        profiled: list[tuple[str, int]] = []
        written: list[Callable[[], None]] = []
        now, on = [0], [True]
        capture = OpenCapture(
            recorder, tmp_path / f"capture{number}", "light", lambda: on[0], lambda: None, facts.append, run=tmp_path
        )

        def profile() -> Callable[[Path | None], None]:
            profiled.append(("begin", made.taken))
            return lambda file: profiled.append((f"end {file.name if file else None}", made.taken))

        suspicion = Suspicion(
            capture, recorder, Identity(number, world, 0, 0, "host", 1), lambda since_ns: share, profile,
            clock_ns=lambda: now[0] * step_ms // 100, write=written.append,
        )  # fmt: skip
        suspicion.install()
        made = Rank(suspicion, capture, facts, profiled, written, now, on)
        opened.append((suspicion, recorder))
        return made

    yield make
    for suspicion, recorder in opened:
        suspicion.close()
        recorder.close()


def test_three_steps_are_traced_once(rank: MakeRank) -> None:
    one = rank().steps(200)
    assert one.profiled == [("begin", 16), (f"end {DEEP_FILE}", 19)]
    (fact,) = one.facts
    assert (fact["fact"], fact["first"], fact["last"], fact["share"]) == ("deep", 16, 18, 0.95)
    assert one.capture.after_step == []


@pytest.mark.parametrize("share", [None, (0.0, 0.0), (0.09, 0.9), (0.9, 0.05)])
def test_what_is_not_suspicious_is_looked_at_a_few_times(rank: MakeRank, share: Any) -> None:
    looks: list[int] = []
    one = rank()
    one.suspicion._share = lambda since_ns: looks.append(one.taken) or share  # type: ignore[func-returns-value]
    one.steps(4000)
    assert looks == [15, 30, 60, 120, 240, 480, 960, 1920]
    assert (one.profiled, one.facts, one.capture.after_step) == ([], [], [])


def test_what_becomes_suspicious_later_is_traced_then(rank: MakeRank) -> None:
    one = rank()
    one.suspicion._share = lambda since_ns: (0.5, 0.5) if one.taken >= 100 else (0.0, 0.0)
    assert one.steps(300).profiled == [("begin", 121), (f"end {DEEP_FILE}", 124)]


@pytest.mark.parametrize(("step_ms", "traced"), [(1000, 3), (1400, 2), (2500, 1), (4000, 0)])
def test_long_steps_are_fewer(rank: MakeRank, step_ms: int, traced: int) -> None:
    one = rank(step_ms=step_ms).steps(100)
    steps = [number for _, number in one.profiled]
    assert steps == ([16, 16 + traced] if traced else [])


def test_nothing_happens_without_a_device(rank: MakeRank, device: Device) -> None:
    import torch.autograd.profiler as profiler

    before = profiler.profile._prepare_trace
    device.used = False
    one = rank().steps(100)
    assert (one.profiled, one.facts, one.capture.after_step) == ([], [], [])
    assert profiler.profile._prepare_trace is before


def test_what_fails_is_counted_once_and_given_up(rank: MakeRank) -> None:
    looks = []

    def fails(since_ns: int) -> None:
        looks.append(since_ns)
        raise OSError("gone")

    one = rank()
    one.suspicion._share = fails
    for thread in threading.enumerate():
        if thread.name == "dsprof-asks":  # of another test: what fails in it would be counted here, and once only
            thread.join(timeout=5)
    errors.send_to(one.suspicion._recorder.note_error)
    try:
        one.steps(100)
    finally:
        errors.send_to(None)
    assert len(looks) == 1
    said = [error for hook, _, error in one.suspicion._recorder.failures() if hook == "deep"]
    assert said == ["OSError: gone"]
    assert (one.profiled, one.capture.after_step, one.capture.samples) == ([], [], [])


def test_a_job_that_ends_before_says_nothing(rank: MakeRank) -> None:
    one = rank().steps(15)
    one.suspicion.close()
    assert (one.profiled, one.facts) == ([], [])


def test_what_would_harm_the_job_is_not_done(rank: MakeRank, device: Device) -> None:
    def noted(one: Rank) -> str:
        assert one.steps(100).profiled == []
        (fact,) = one.facts
        return str(fact["text"])

    graphs = rank(0)
    graphs.suspicion._recorder.graphs_seen = 2
    assert noted(graphs) == (
        "the job has captured a CUDA graph, which a profiler that begins later could break, so dsprof traced no steps "
        "by itself to see for how long the device stands idle"
    )
    device.capturing = True
    assert "captured a CUDA graph" in noted(rank(1))
    device.capturing = False
    device.free = 100 << 20
    assert "only 100 MiB left" in noted(rank(2))
    device.free = 10 << 30
    device.torn_down = False
    assert "would stay in the process (CUDA before 12.6)" in noted(rank(4))
    device.torn_down = True
    theirs = rank(3).steps(10)
    theirs.suspicion._window.other_begins()
    assert "a torch.profiler of the job's own was at work at step 16" in noted(theirs)


def test_one_that_the_job_has_prepared_for_later_is_left_alone(rank: MakeRank) -> None:
    """By a schedule with a long warm-up, before anything is looked at."""
    from torch.profiler import ProfilerActivity, profile, schedule

    one = rank().steps(2)
    theirs = profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=50, active=1))
    theirs.start()
    try:
        one.steps(40)
    finally:
        theirs.stop()
    assert one.profiled == []
    assert "a torch.profiler of the job's own was at work at step 16" in one.facts[0]["text"]


def test_one_that_the_job_begins_meanwhile_ends_ours_first(rank: MakeRank) -> None:
    one = rank().steps(16)
    one.suspicion._window.other_begins()
    assert one.profiled == [("begin", 16), ("end None", 16)]
    assert "began a torch.profiler of its own" in one.facts[0]["text"]
    assert one.facts[1]["given_up"]


def test_a_profile_is_not_ended_while_a_graph_is_captured(rank: MakeRank, device: Device) -> None:
    one = rank().steps(17)
    device.capturing = True
    one.steps(4)
    device.capturing = False
    assert one.steps(3).profiled == [("begin", 16), (f"end {DEEP_FILE}", 22)]


def test_all_ranks_trace_the_same_steps(rank: MakeRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    ranks = [rank(0, 2, share=(0.0, 0.0)), rank(1, 2)]
    for one in ranks:
        one.steps(15)
    assert [len(one.written) for one in ranks] == [0, 1]
    ranks[1].written[0]()  # after the step, beside the training
    said = control.read(tmp_path / CONTROL_FILE)
    assert said.deep == DeepRequest(15 + 25 + 2, 15 + 25 + 2 + 3, (0, 1), 0.95)
    ranks[0].steps(3)
    for one in ranks:
        one.suspicion.told(said)
        one.suspicion.told(said)  # a user has turned the capture on meanwhile
        one.steps(50)
        assert one.profiled == [("begin", 42), (f"end {DEEP_FILE}", 45)]
        assert one.facts[-1]["share"] == 0.95


def test_of_thousands_of_ranks_a_few_trace(rank: MakeRank, tmp_path: Path) -> None:
    one = rank(2000, 4096).steps(15)
    one.written[0]()
    said = control.read(tmp_path / CONTROL_FILE).deep
    assert said is not None
    assert said.ranks == (*range(8), 2000)
    assert said.first == 15 + 150 + 2  # many hosts, whose folder lies on a network
    other = rank(9, 4096).steps(15)
    other.suspicion.told(Control(None, said))
    assert other.steps(400).profiled == []
    assert len(other.written) == 1  # which found that another one had asked


def test_a_rank_that_hears_too_late_traces_nothing(rank: MakeRank) -> None:
    one = rank(0, 2, share=(0.0, 0.0)).steps(50)
    one.suspicion.told(Control(None, DeepRequest(50, 53, (0, 1), 0.9)))
    assert one.steps(50).profiled == []


# --- when it watches at all ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "watches"),
    [
        ({}, True), ({"DSPROF_DEEP": "never"}, False), ({"DSPROF_STEPS": "3:90"}, False),
        ({"DSPROF_DURATION": "9"}, False), ({"DSPROF_TRIAL": "{}"}, False),
    ],
)  # fmt: skip
def test_who_asks_for_a_part_only_gets_no_more(
    given: dict[str, str], watches: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert installed(tmp_path, monkeypatch, given) == watches


@pytest.mark.parametrize("variable", ["NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "KINETO_USE_DAEMON"])
def test_another_tool_is_left_alone(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    assert not installed(tmp_path, monkeypatch, {})


def test_another_try_of_the_job_traces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not installed(tmp_path, monkeypatch, {})
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    control.ask_once(tmp_path / CONTROL_FILE, REQUEST)
    assert not installed(tmp_path, monkeypatch, {})


def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], level: str = "light") -> bool:
    recorder = open_recorder("python", tmp_path / "capture")
    monkeypatch.setattr(deep, "NativeRecorder", type(recorder))
    monkeypatch.setattr(recorder, "collect_device", lambda: 0, raising=False)
    for name in [*os.environ]:
        if name.startswith("DSPROF"):
            monkeypatch.delenv(name)
    bring_back = use_settings(given)
    try:
        capture = OpenCapture(
            recorder, tmp_path / "capture", level, lambda: True, lambda: None, lambda fact: None, run=tmp_path
        )
        uninstall = deep.install(capture)
        watches = bool(capture.samples)
        for one in uninstall:
            one()
        assert (capture.samples, capture.after_step) == ([], [])
        return watches
    finally:
        bring_back()
        recorder.close()


def test_level_full_traces_nothing_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not installed(tmp_path, monkeypatch, {}, level="full")


def test_who_names_a_level_gets_no_more(tmp_path: Path) -> None:
    def asked(given: dict[str, str], environ: dict[str, str] | None = None) -> str:
        return settings.load(given, environ or {}, tmp_path).deep

    assert asked({}) == ""
    assert asked({"level": "light"}) == "never"
    assert asked({}, {"DSPROF_LEVEL": "full"}) == "never"
    assert asked({"level": "full", "deep": "5:7"}) == "5:7"
    assert asked({"deep": "never"}) == "never"
    (tmp_path / "pyproject.toml").write_text('[tool.dsprof]\ndeep = "never"\n')
    assert asked({}) == "never"
    with pytest.raises(settings.SettingsError, match="or never for none"):
        asked({"deep": "sometimes"})


# --- on the sleeping device ---------------------------------------------------------------------


ARGUMENTS = ("--steps=26", "--blocks=3", "--forward-ms=1", "--backward-ms=1", "--launch-ms=6", "--item-every=1")
"""The host takes 6 ms to launch a block that takes the device 1 ms."""
THOUGH_IT_SEES_NO_DEVICE = f"""
import runpy, sys
from dsprof.collectors.devices import deep
deep.sees_devices = deep.can_be_torn_down = lambda: True
sys.path.insert(0, {str(JOBS)!r})
runpy.run_path({str(JOBS / "faults.py")!r}, run_name="__main__")
"""


def test_a_launch_bound_job_is_traced_and_computes_the_same(sleeping_ranks: SleepingRanks, tmp_path: Path) -> None:
    """torch.profiler sees nothing of this device, and is begun all the same: what it sees of the host is there, and the
    steps, what they cost, and what is said of them."""
    script = tmp_path / "job.py"
    script.write_text(THOUGH_IT_SEES_NO_DEVICE)
    plain = sleeping_ranks.run(tmp_path / "plain", "faults.py", *ARGUMENTS, armed=False)
    ran = sleeping_ranks.run(tmp_path / "traced", str(script), *ARGUMENTS, DSPROF_DEEP="")
    assert ran.told[0]["losses"] == plain.told[0]["losses"]
    assert "profiler_st" not in (tmp_path / "traced" / "err.0").read_text()  # Kineto's own words
    run = ran.trace.run
    (fact,) = (fact for fact in run.facts if fact["fact"] == "deep")
    first, last = fact["first"], fact["last"]
    assert first >= 16
    assert last == first + 2
    said = next(text for text in run.warnings if "traced with torch.profiler, as" in text)
    assert said.startswith(
        f"steps {first} to {last} were traced with torch.profiler, as for {100 * fact['share']:.0f} %"
    )
    assert f"; that took {max(0.0, fact['longer_ms']):,.0f} ms longer than other steps" in said
    rows = ran.rows()
    operators = rows[(rows["kind"] == "kernel") & (rows["source"] == "imported")]
    assert {first, first + 1, last} <= set(operators["step"]) <= set(fact["profiled"])
    study = study_of(ran.trace)
    ordinary = set(study.step_numbers.tolist())
    assert not set(fact["profiled"]) & ordinary
    assert len(ordinary) >= 10
    # The rank told of itself, while it ran, what is told of the run.
    assert study.step_ms is not None
    assert fact["share"] == pytest.approx(unseen_idle_ms(study) / study.step_ms, abs=0.05)


def test_a_profiler_that_sees_no_device_is_not_begun(sleeping_ranks: SleepingRanks, tmp_path: Path) -> None:
    ran = sleeping_ranks.run(tmp_path, "faults.py", *ARGUMENTS, DSPROF_DEEP="")
    run = ran.trace.run
    assert [fact for fact in run.facts if fact["fact"] == "deep"] == []
    (said,) = (text for text in run.warnings if "by itself" in text)
    assert "the profiler of this torch does not see what devices do, so dsprof traced no steps by itself" in said
