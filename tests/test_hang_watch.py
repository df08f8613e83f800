"""The launcher's watch over captures that are being written, with a clock of its own. The ranks are of other hosts, so
that nothing of this one counts."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dsprof import settings
from dsprof.collectors.recorder.python_recorder import PyRecorder
from dsprof.launch.talk import Talk
from dsprof.launch.watch import HangWatch
from dsprof.run import RunFolder
from dsprof.schema import CAPTURE_OFF, HOST_SYNC, STANDSTILL, Kind

TIMEOUT_S = 60.0
WAITS, ABSENT = 0, 1


@dataclass
class Job:
    """Two ranks, of which one waits in the third all_reduce."""

    path: Path
    recorders: list[PyRecorder] = field(default_factory=list)
    now_s: float = 1000.0

    def __post_init__(self) -> None:
        for rank in (WAITS, ABSENT):
            self.folder(rank).mkdir(parents=True)
            recorder = PyRecorder(self.folder(rank))
            self.recorders.append(recorder)
            name, group = recorder.intern("all_reduce"), recorder.group("0")
            for seq in range(2):
                recorder.comm(Kind.COMM, name, 10, 20, 10, 64, group, seq, -1, 7, 0, -1, -1, 0, 0)
            if rank == WAITS:
                self.waits = recorder.comm(Kind.COMM, name, 10, 0, 10, 64, group, 2, -1, 7, 0, -1, -1, 0, 0)
            self.state(rank, {"fact": "group", "name": "0", "ranks": [0, 1]})

    def comes(self) -> None:
        """The rank that was missing issues it."""
        recorder = self.recorders[ABSENT]
        name, group = recorder.intern("all_reduce"), recorder.group("0")
        recorder.comm(Kind.COMM, name, 30, 40, 30, 64, group, 2, -1, 7, 0, -1, -1, 0, 0)

    def folder(self, rank: int) -> Path:
        return self.path / "capture" / f"rank{rank:05d}.0.elsewhere{rank}.7"

    def state(self, rank: int, fact: dict[str, Any]) -> None:
        with (self.folder(rank) / "facts.jsonl").open("a") as file:
            file.write(json.dumps(fact) + "\n")

    def stands(self, rank: int, **about: Any) -> None:
        said = {"fact": STANDSTILL, "since_ns": 1, "at_ns": 2, "works": False, "site": "/home/me/train.py:33", **about}
        self.state(rank, said)

    def watch(self, *, abort: bool = False) -> HangWatch:
        return HangWatch(lambda: RunFolder(self.path), Talk(), TIMEOUT_S, abort=abort, clock=lambda: self.now_s)

    def after(self, seconds: float, watch: HangWatch) -> bool:
        self.now_s += seconds
        return watch.look()

    @property
    def hangs(self) -> list[dict[str, Any]]:
        return RunFolder(self.path).read_hangs()


@pytest.fixture
def job(tmp_path: Path) -> Any:
    made = Job(tmp_path)
    yield made
    for recorder in made.recorders:
        recorder.close()


def test_it_is_told_once_and_when_it_goes_on(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    watch = job.watch()
    job.stands(ABSENT)
    assert not job.after(0, watch)
    assert not job.after(TIMEOUT_S, watch)
    assert capsys.readouterr().err == ""
    assert not job.after(3, watch)
    said = capsys.readouterr().err
    assert (
        "hang: rank 1 has not reached all_reduce 2 of group 0, in which rank 0 waits; rank 1 is at train.py:33" in said
    )
    assert [(hang["code"], hang["culprits"], hang["went_on"]) for hang in job.hangs] == [("run.hang", [1], False)]
    assert not job.after(100, watch)
    assert capsys.readouterr().err == ""
    job.comes()
    job.after(TIMEOUT_S, watch)
    assert "the job goes on, after 223 s" in capsys.readouterr().err
    assert [(hang["went_on"], hang["stood_s"], hang["aborted"]) for hang in job.hangs] == [(True, 223.0, False)]


def test_what_moves_while_the_job_is_ended_is_no_going_on(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """As where Ctrl-C was typed on another host: ranks close what was under way."""
    watch = job.watch()
    job.stands(ABSENT)
    job.after(0, watch)
    job.after(TIMEOUT_S + 3, watch)
    assert "hang: rank 1" in capsys.readouterr().err
    job.recorders[WAITS].end(job.waits)
    for recorder in job.recorders:
        recorder.mark(Kind.MARK, recorder.intern("clean-up"))
    job.after(1, watch)
    job.after(TIMEOUT_S + 3, watch)
    assert capsys.readouterr().err == ""
    assert [hang["went_on"] for hang in job.hangs] == [False]
    job.comes()
    job.after(TIMEOUT_S, watch)
    assert "the job goes on, after" in capsys.readouterr().err


def test_a_job_that_was_started_anew_goes_on(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    watch = job.watch()
    job.stands(ABSENT)
    job.after(0, watch)
    job.after(TIMEOUT_S + 3, watch)
    for rank in (WAITS, ABSENT):
        anew = job.path / "capture" / f"rank{rank:05d}.1.elsewhere{rank}.8"
        anew.mkdir()
        job.recorders.append(PyRecorder(anew))
    job.after(1, watch)
    assert "the job goes on, after" in capsys.readouterr().err


def test_it_is_ended_if_that_is_wanted(job: Job) -> None:
    watch = job.watch(abort=True)
    job.stands(ABSENT)
    assert not job.after(0, watch)
    assert job.after(TIMEOUT_S + 2, watch)


@pytest.mark.parametrize(
    ("about", "phase", "said"),
    [
        ({"works": True}, "", "rank 1 works"),
        ({}, "checkpoint", "rank 1 saves a checkpoint"),
        ({}, "compile", "compiles"),
    ],
)
def test_a_rank_that_works_is_only_noted(
    about: dict[str, Any], phase: str, said: str, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = job.watch(abort=True)
    job.stands(ABSENT, **about)
    if phase:
        job.recorders[ABSENT].begin(Kind.PHASE, job.recorders[ABSENT].intern(phase))
    assert not job.after(0, watch)
    for _ in range(20):
        assert not job.after(TIMEOUT_S, watch)
    told = capsys.readouterr().err
    assert told.count("not called a hang") == 1
    assert said in told
    assert job.hangs == []


def test_a_rank_that_spins_until_its_device_is_done_does_not_work(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    watch = job.watch(abort=True)
    job.stands(ABSENT, works=True)
    recorder = job.recorders[ABSENT]
    call = recorder.intern("torch.cuda.synchronize")
    handle = recorder.span(Kind.MARK, recorder.intern(HOST_SYNC), 30, 0, 0, None, -1, 0, 0, -1, -1, 0, call)
    assert not job.after(0, watch)
    assert job.after(TIMEOUT_S + 2, watch)
    said = capsys.readouterr().err
    assert "rank 1 is at train.py:33, where it waits for its device (torch.cuda.synchronize)" in said
    recorder.span_end(handle, 30, 40, -1)
    assert watch.look() is False  # which is progress


def test_what_looks_like_work_for_one_look_is_not_told(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """As what a rank did just before it fell asleep."""
    watch = job.watch()
    job.stands(ABSENT, works=True)
    job.after(0, watch)
    job.after(TIMEOUT_S + 2, watch)
    assert capsys.readouterr().err == ""
    job.stands(ABSENT)
    job.after(3, watch)
    said = capsys.readouterr().err
    assert "hang: rank 1" in said
    assert "works" not in said


def test_nothing_is_said_of_what_is_not_known(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    watch = job.watch(abort=True)
    assert not job.after(0, watch)
    assert not job.after(TIMEOUT_S + 2, watch)  # the rank has not said where it stands
    job.stands(ABSENT)
    job.recorders[ABSENT].mark(Kind.MARK, job.recorders[ABSENT].intern(CAPTURE_OFF), 2.0)
    job.after(TIMEOUT_S, watch)
    assert not job.after(TIMEOUT_S + 2, watch)  # it records nothing for now
    assert capsys.readouterr().err == ""


def test_every_rank_that_moves_begins_it_anew(job: Job) -> None:
    watch = job.watch(abort=True)
    job.stands(ABSENT)
    job.after(0, watch)
    for _ in range(10):
        job.recorders[WAITS].mark(Kind.MARK, job.recorders[WAITS].intern("beat"))
        assert not job.after(TIMEOUT_S - 1, watch)


@pytest.mark.parametrize("text", ["1", "-3", "soon", "inf"])
def test_a_time_out_that_is_none(text: str, tmp_path: Path) -> None:
    said = f"--hang-timeout: '{text}' is no time-out; write seconds, 2 or more, such as 600, or 0 for none"
    with pytest.raises(settings.SettingsError, match=re.escape(said)):
        settings.load({"hang_timeout": text}, {}, tmp_path)


def test_where_the_time_out_is_told(tmp_path: Path) -> None:
    assert settings.load({}, {}, tmp_path).hang_timeout == "600"
    (tmp_path / "pyproject.toml").write_text("[tool.dsprof]\nhang_timeout = 30\non_hang = 'abort'\n")
    chosen = settings.load({}, {}, tmp_path)
    assert (chosen.hang_timeout, chosen.on_hang) == ("30", "abort")
    environ = {"DSPROF_HANG_TIMEOUT": "0", "DSPROF_ON_HANG": "report"}
    chosen = settings.load({}, environ, tmp_path)
    assert (chosen.hang_timeout, chosen.on_hang) == ("0", "report")
    assert settings.load({"on_hang": "abort"}, environ, tmp_path).on_hang == "abort"
