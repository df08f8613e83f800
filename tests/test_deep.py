"""The deep look: the window of a profiler, and its rows in the trace of a capture."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kineto_traces as kt
import pandas as pd
import pytest
from captures import open_recorder, read_rows
from jobs import profile

from dsprof import settings
from dsprof.analyzer.budget.irregular import find_irregular, profiled_steps
from dsprof.collectors.devices.torch_profiler import (
    LOG_LEVEL,
    DeepWindow,
    _torn_down,
    begin_profile,
    silently,
    watch_others,
)
from dsprof.launch.launch import environment
from dsprof.ranges import parse_deep
from dsprof.run import RunFolder, RunInfo
from dsprof.schema import COLUMNS, DEEP_FILE
from dsprof.trace.capture import Capture
from dsprof.trace.deep import add_deep
from dsprof.trace.records import empty

# --- the window ---------------------------------------------------------------------------------


def test_a_few_steps_are_read_like_a_slice() -> None:
    assert parse_deep("20:23") == (20, 23)
    for text in ("", "20:", "0:51", "x"):
        with pytest.raises(ValueError, match="such as 20:"):
            parse_deep(text)
    with pytest.raises(settings.SettingsError, match="--deep"):
        settings.load({"deep": "5"})
    assert settings.load({"deep": "5:7"}).deep == "5:7"


@pytest.mark.parametrize(
    ("cuda", "before", "meanwhile", "after"),
    [
        ("13.0", {}, {"TEARDOWN_CUPTI": "1"}, {}),
        ("12.6", {"TEARDOWN_CUPTI": "0"}, {"TEARDOWN_CUPTI": "0"}, {"TEARDOWN_CUPTI": "0"}),
        ("12.4", {}, {}, {}),
        (None, {}, {}, {}),
    ],
)
def test_the_device_is_not_watched_any_more_when_the_profiler_has_ended(
    cuda: str | None, before: dict[str, str], meanwhile: dict[str, str], after: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("torch.version.cuda", cuda)
    environment = dict(before)
    as_it_was = _torn_down(environment)
    assert environment == meanwhile
    as_it_was()
    assert environment == after


def test_what_torch_wants_of_a_compiled_job_with_graphs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", "12.8")
    environment: dict[str, str] = {}
    as_it_was = _torn_down(environment)
    environment["TEARDOWN_CUPTI"] = "0"  # as torch.profiler's start does
    as_it_was()
    assert environment == {"TEARDOWN_CUPTI": "0"}


class Profiled:
    """A profiler that only notes what is asked of it."""

    def __init__(self, fails: bool = False) -> None:
        self.calls: list[str] = []
        self._fails = fails

    def __call__(self) -> Callable[[Path | None], None]:
        self.calls.append("begin")

        def end(file: Path | None) -> None:
            self.calls.append(f"end {file.name if file else None}")
            if self._fails:
                raise RuntimeError("no room")

        return end


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    recorder = open_recorder("python", tmp_path / "capture")
    yield recorder
    recorder.close()


def window_of(
    opened: Any, profiled: Profiled, facts: list[dict[str, Any]], first: int = 2, last: int = 4
) -> DeepWindow:
    return DeepWindow(first, last, Path("capture"), opened, facts.append, profiled)


def steps(window: DeepWindow, profiled: Profiled, count: int) -> list[int]:
    """How many calls of the profiler there were after each step."""
    seen = []
    for _ in range(count):
        window.after_step()
        seen.append(len(profiled.calls))
    return seen


def test_the_profiler_begins_and_ends_where_steps_do(opened: Any, tmp_path: Path) -> None:
    profiled, facts = Profiled(), list[dict[str, Any]]()
    assert steps(window_of(opened, profiled, facts), profiled, 6) == [0, 1, 1, 2, 2, 2]
    assert profiled.calls == ["begin", f"end {DEEP_FILE}"]
    (fact,) = facts
    assert (fact["fact"], fact["first"], fact["last"]) == ("deep", 2, 3)
    assert fact["start_ns"] < fact["end_ns"]
    assert [row.name for row in read_rows(tmp_path / "capture")] == ["torch.profiler begins", "torch.profiler ends"]


def test_a_job_that_ends_within_the_window_keeps_what_there_is(opened: Any) -> None:
    profiled, facts = Profiled(), list[dict[str, Any]]()
    window = window_of(opened, profiled, facts, first=0, last=9)
    window.install()
    steps(window, profiled, 3)
    window.close()
    window.close()
    assert profiled.calls == ["begin", f"end {DEEP_FILE}"]
    note, fact = facts
    assert note["text"] == "--deep: of steps 0:9 the job took the first 3 only"
    assert (fact["first"], fact["last"]) == (0, 2)


def test_a_window_beyond_the_end_is_told(opened: Any) -> None:
    profiled, facts = Profiled(), list[dict[str, Any]]()
    window = window_of(opened, profiled, facts, first=20, last=23)
    steps(window, profiled, 12)
    window.close()
    window.close()
    assert profiled.calls == []
    (note,) = facts
    assert note["text"] == (
        "--deep: steps 20:23 were asked for, and the job ended after 12, so no steps were profiled by --deep"
    )


def test_kineto_keeps_silent_about_the_window_unless_asked(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    deep = settings.Settings(deep="5:7")
    assert environment({}, folder, deep, bootstrap=False)["KINETO_LOG_LEVEL"] == "6"
    assert environment({"KINETO_LOG_LEVEL": "2"}, folder, deep, bootstrap=False)["KINETO_LOG_LEVEL"] == "2"
    for asked in ("", "never"):
        assert "KINETO_LOG_LEVEL" not in environment({}, folder, settings.Settings(deep=asked), bootstrap=False)


def test_one_that_dsprof_begins_by_itself_keeps_silent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the job is as it was, before and after."""
    said: list[str | None] = []
    profile = lambda: said.append(os.environ.get(LOG_LEVEL)) or (lambda file: None)  # type: ignore[func-returns-value]  # noqa: E731
    monkeypatch.delenv(LOG_LEVEL, raising=False)
    silently(profile)()
    assert LOG_LEVEL not in os.environ
    monkeypatch.setenv(LOG_LEVEL, "2")
    silently(profile)()
    assert said == ["6", "2"]
    assert os.environ[LOG_LEVEL] == "2"


def test_a_profiler_of_the_jobs_own_is_left_alone(opened: Any) -> None:
    profiled, facts = Profiled(), list[dict[str, Any]]()
    window = window_of(opened, profiled, facts)
    window.other_begins()
    assert steps(window, profiled, 6) == [0] * 6
    assert "a torch.profiler of the job's own was at work at step 2" in facts[0]["text"]


def test_one_that_begins_within_the_window_ends_ours_first(opened: Any) -> None:
    profiled, facts = Profiled(), list[dict[str, Any]]()
    window = window_of(opened, profiled, facts)
    steps(window, profiled, 2)
    window.other_begins()
    assert profiled.calls == ["begin", "end None"]
    assert "began a torch.profiler of its own at step 2" in facts[0]["text"]
    assert facts[1]["given_up"]
    assert steps(window, profiled, 4) == [2] * 4


def test_a_profiler_that_fails_costs_nothing_but_the_window(opened: Any) -> None:
    profiled, facts = Profiled(fails=True), list[dict[str, Any]]()
    assert steps(window_of(opened, profiled, facts), profiled, 6) == [0, 1, 1, 2, 2, 2]
    assert "could not be kept (RuntimeError: no room)" in facts[0]["text"]
    assert facts[1]["fact"] == "deep"


def test_a_profiler_that_fails_to_begin_is_not_left_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would crash the job at its exit, in C++."""
    import torch

    def fails(self: Any, key: str, value: str) -> None:
        raise AttributeError("module 'torch._C' has no attribute '_nccl_version'")

    monkeypatch.setattr(torch.profiler.profile, "add_metadata_json", fails)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.profiler.profile, "_get_distributed_info", lambda self: {"backend": "nccl"})
    with pytest.raises(AttributeError, match="_nccl_version"):
        begin_profile()
    assert not torch._C._autograd._profiler_enabled()


def test_the_jobs_own_profilers_are_seen(opened: Any) -> None:
    import torch
    from torch.autograd import profiler
    from torch.profiler import ProfilerActivity

    window = window_of(opened, Profiled(), [])
    before = profiler.profile._prepare_trace, profiler.profile.__exit__, profiler._run_on_profiler_start
    unwatch = watch_others(window)
    try:
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as theirs:
            assert window.others == 1
            torch.ones(2).add(1)
        assert window.others == 0
        assert any(event.key == "aten::add" for event in theirs.key_averages())
    finally:
        unwatch()
    assert (profiler.profile._prepare_trace, profiler.profile.__exit__, profiler._run_on_profiler_start) == before


# --- the trace ----------------------------------------------------------------------------------

EPOCH = 1_700_000_000_000_000_000
OWN: list[dict[str, Any]] = [
    {"kind": "step", "name": "step", "lane": "main", "step": 7, "start_ns": 1_000_000, "dur_ns": 1_000_000,
     "thread": 1},
    {"kind": "phase", "name": "forward", "lane": "main", "step": 7, "start_ns": 1_005_000, "dur_ns": 200_000,
     "thread": 1},
    {"kind": "comm", "name": "all_reduce", "lane": "comm.0", "step": 7, "start_ns": 1_390_000, "issue_ns": 1_390_000,
     "host_ns": 30_000, "group": "0", "seq": 40, "bytes": 4000, "thread": 2},
    {"kind": "comm", "name": "all_reduce", "lane": "comm.0", "step": 7, "start_ns": 1_950_000, "issue_ns": 1_950_000,
     "host_ns": 10_000, "group": "0", "seq": 41, "bytes": 4000, "thread": 2},
    {"kind": "step", "name": "step", "lane": "main", "step": 8, "start_ns": 2_000_000, "dur_ns": 500_000, "thread": 1},
    {"kind": "step", "name": "step", "lane": "main", "step": 9, "start_ns": 2_500_000, "dur_ns": 500_000, "thread": 1},
]  # fmt: skip


def own_rows() -> pd.DataFrame:
    rows = pd.DataFrame([{"rank": 3, "restart": 0, "source": "measured", "ended": True, **row} for row in OWN])
    return rows.reindex(columns=list(COLUMNS)).astype(dict(COLUMNS))


def capture_of(folder: Path, events: list[kt.Event] | str) -> Capture:
    text = events if isinstance(events, str) else kt.as_kineto(events, baseTimeNanoseconds=EPOCH)
    kt.write(folder, text, DEEP_FILE)
    meta = {"clock": {"monotonic_ns": 5_000, "epoch_ns": EPOCH + 5_000}}
    fact = {"fact": "deep", "start_ns": 990_000, "end_ns": 2_100_000, "first": 7, "last": 7}
    return Capture(folder, empty(0), {}, meta, facts=[fact])


def test_kernels_and_launches_are_added_on_the_captures_clock(tmp_path: Path) -> None:
    capture = capture_of(tmp_path, kt.training())
    rows, problems = add_deep(capture, own_rows())
    assert problems == []
    assert dict(rows.dtypes.astype(str)) == COLUMNS
    kernels = rows[rows["kind"] == "kernel"]
    assert kernels[["rank", "name", "lane", "step", "start_ns", "issue_ns"]].to_numpy().tolist() == [
        [3, "gemm", "cuda.7", 7, 1_050_000, 1_020_000], [3, "gemm", "cuda.7", 7, 1_200_000, 1_160_000],
        [3, "gemm", "cuda.7", 7, 1_400_000, 1_350_000], [3, "adam", "cuda.7", 7, 1_800_000, 1_790_000],
    ]  # fmt: skip
    assert set(rows.loc[rows["kind"] == "launch", "lane"]) == {"main", "thread.2"}
    assert len(rows[rows["kind"] == "step"]) == 3
    assert rows["start_ns"].is_monotonic_increasing
    assert capture.facts[0]["profiled"] == [7, 8]


@pytest.mark.parametrize("args", [None, kt.COLLECTIVE])
def test_a_collective_is_there_once_with_its_kernels_times(tmp_path: Path, args: dict[str, Any] | None) -> None:
    rows, _ = add_deep(capture_of(tmp_path, kt.training(args=args)), own_rows())
    comm = rows[rows["kind"] == "comm"].astype(object)
    assert comm[["seq", "lane", "start_ns", "dur_ns", "corr"]].where(comm.notna(), None).to_numpy().tolist() == [
        [40, "cuda.20", 1_410_000, 190_000, 34], [41, "comm.0", 1_950_000, None, None],
    ]  # fmt: skip
    assert comm["arrival_ns"].dropna().tolist() == [1_410_000]
    assert not rows["name"].astype(str).str.contains("nccl").any()


def test_a_window_in_which_nothing_of_the_device_was_seen_is_told(tmp_path: Path) -> None:
    """What Kineto says of its errors is silenced with the lines that it writes when it begins and ends."""
    on_host = [kt.op("aten::linear", 1010, 20)]
    for asked, events, told in ((True, on_host, 1), (False, on_host, 0), (True, kt.training(), 0)):
        capture = capture_of(tmp_path, events)
        capture.facts[0]["device"] = asked
        problems = add_deep(capture, own_rows())[1]
        assert len(problems) == told
        assert all("saw nothing of it; KINETO_LOG_LEVEL=0" in problem for problem in problems)


def test_a_communication_that_is_none_of_ours_stays_a_kernel(tmp_path: Path) -> None:
    other = {**kt.COLLECTIVE, "Process Group Name": "9"}
    rows, _ = add_deep(capture_of(tmp_path, kt.training(args=other)), own_rows())
    assert rows.loc[rows["kind"] == "comm", "dur_ns"].isna().all()
    assert rows.loc[(rows["kind"] == "kernel") & (rows["lane"] == "cuda.20"), "name"].tolist() == ["all_reduce"]


def test_gloos_collectives_are_ours_alone(tmp_path: Path) -> None:
    events = [kt.op("aten::linear", 1010, 20), kt.note("gloo:all_reduce", 1390, 40, 3), kt.op("aten::mul", 1500, 10)]
    rows, _ = add_deep(capture_of(tmp_path, events), own_rows())
    assert rows["kind"].astype(str).value_counts().to_dict() == {"step": 3, "comm": 2, "kernel": 2, "phase": 1}
    assert set(rows.loc[rows["kind"] == "kernel", "lane"]) == {"main"}


def test_a_file_that_cannot_be_read_costs_only_itself(tmp_path: Path) -> None:
    rows, problems = add_deep(capture_of(tmp_path, "{}"), own_rows())
    assert rows.equals(own_rows())
    assert problems == [f"{DEEP_FILE}: left out (holds no traceEvents, neither at the top nor one level down)"]
    capture = capture_of(tmp_path, kt.training())
    capture.meta.clear()
    assert "does not tell both clocks" in add_deep(capture, own_rows())[1][0]


def test_profiled_steps_are_not_ordinary_on_any_rank() -> None:
    run = RunInfo(id="", name="", command=[], facts=[{"fact": "deep", "rank": 1, "profiled": [7, 8]}])
    assert profiled_steps(run) == {7, 8}
    table = pd.DataFrame({"rank": 0, "step": range(4, 12), "dur_ns": 1_000_000, "start_ns": 0, "compute": 1.0})
    empty_rows = pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in COLUMNS.items()})
    irregular = find_irregular(
        table.assign(data=0.0, optimizer=0.0, offload=0.0, pause=0.0, other=0.0), empty_rows, {7, 8}
    )
    assert irregular.steps.tolist() == [4, 5, 6, 9, 10, 11]


# --- a real job ---------------------------------------------------------------------------------

SCRIPT = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(0)
for _ in range(12):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
print(sum(float(p.abs().sum()) for p in model.parameters()))
"""


def test_a_real_window(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = profile(tmp_path, script, ranks=None, flags=("--deep", "6:8", "--no-report"))
    assert done.status == 0
    assert "profiler_st" not in done.stderr  # Kineto's own words
    analysis = done.analysis()
    (fact,) = (fact for fact in analysis.run.facts if fact["fact"] == "deep")
    assert (fact["first"], fact["last"], fact["profiled"]) == (6, 7, [6, 7, 8])
    rows = analysis.rows
    linear = rows[(rows["kind"] == "kernel") & (rows["name"] == "aten::linear")]
    forward = rows[(rows["kind"] == "phase") & (rows["name"] == "forward")].set_index("step")["start_ns"]
    assert linear["step"].tolist() == [6, 7]
    assert (linear["start_ns"].to_numpy() >= forward[linear["step"]].to_numpy() - 1_000_000).all()
    assert not {6, 7, 8} & set(analysis.steps.loc[analysis.steps["ordinary"], "step"])
    assert json.loads(done.folder.findings_json.read_text())["findings"] is not None
