"""Which part of a run is captured: the switch, the records, and the steps that are derived from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from captures import RECORDERS, build_helper, open_recorder, read_rows
from clocks import Clock
from jobs import profile
from records import Record, derive, derived, of, phase

from dsprof.analyzer.align.steps import captured_part, completed_steps, steps_taken
from dsprof.cli import main
from dsprof.collectors.capture.window import Switch, Window
from dsprof.collectors.recorder.record import Recorder
from dsprof.ranges import parse_steps
from dsprof.schema import CAPTURE_OFF, CAPTURE_ON, CONTROL_FILE, Kind


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", (0, None)), ("20:50", (20, 50)), ("20:", (20, None)), (":50", (0, 50)), (" 1:2 ", (1, 2))],
)
def test_steps_are_read_like_a_slice(text: str, expected: tuple[int, int | None]) -> None:
    assert parse_steps(text) == expected


@pytest.mark.parametrize("text", ["20", "50:20", "5:5", "a:b", "-3:", "1:2:3"])
def test_what_is_no_range_says_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match="such as 20:50"):
        parse_steps(text)


@pytest.mark.parametrize(
    ("window", "held"),
    [
        (Window(), range(8)),
        (Window(first=2, last=5), (2, 3, 4)),
        (Window(delay_s=3), range(3, 8)),
        (Window(delay_s=2, duration_s=3), (2, 3, 4)),
        (Window(first=1, delay_s=3, duration_s=2), (3, 4)),
        (Window(last=4, duration_s=2), (0, 1)),
    ],
)
def test_a_step_a_second(window: Window, held: tuple[int, ...]) -> None:
    assert [step for step in range(8) if window.holds(step, float(step))] == list(held)


def test_a_window_of_settings() -> None:
    given = {"DSPROF_STEPS": "3:9", "DSPROF_DELAY": "1.5"}
    assert Window.of_settings(lambda name: given.get(name, "")) == Window(3, 9, 1.5, None)
    assert Window.of_settings(lambda name: "") == Window()


@pytest.fixture(params=RECORDERS)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Recorder]:
    if request.param == "native":
        build_helper()
    recorder = open_recorder(request.param, tmp_path / "capture")
    yield recorder
    recorder.close()


def marks(folder: Path) -> list[tuple[str, float | None]]:
    return [(row.name, row.value) for row in read_rows(folder / "capture")]


def take_steps(recorder: Recorder, switch: Switch, clock: Clock, count: int, first: int) -> list[bool]:
    """Steps of a second, each with a record of its own before its end."""
    turned = []
    for number in range(first, first + count):
        recorder.mark(Kind.MARK, recorder.intern("step"), float(number))
        clock.now += 1
        turned.append(switch.after_step())
    return turned


def test_only_the_steps_of_the_window_are_written(opened: Recorder, tmp_path: Path) -> None:
    clock = Clock(now=100)
    switch = Switch(opened, Window(first=2, last=4), tmp_path, clock)
    assert take_steps(opened, switch, clock, 6, 0) == [False, True, False, False, False, False]
    assert marks(tmp_path) == [
        (CAPTURE_OFF, 0.0), (CAPTURE_ON, 2.0), ("step", 2.0), ("step", 3.0), (CAPTURE_OFF, 4.0),
    ]  # fmt: skip
    assert (opened.dropped, opened.errors) == (0, 0)


def test_the_control_file_outdoes_the_window(opened: Recorder, tmp_path: Path) -> None:
    clock = Clock(now=100)
    switch = Switch(opened, Window(), tmp_path, clock)
    take_steps(opened, switch, clock, 1, 0)
    (tmp_path / CONTROL_FILE).write_text('{"capture": "off"}')
    take_steps(opened, switch, clock, 2, 1)
    (tmp_path / "other").write_text('{"capture": "on"}')
    (tmp_path / "other").replace(tmp_path / CONTROL_FILE)
    assert take_steps(opened, switch, clock, 2, 3) == [True, False]
    assert marks(tmp_path) == [
        ("step", 0.0), ("step", 1.0), (CAPTURE_OFF, 2.0), (CAPTURE_ON, 4.0), ("step", 4.0),
    ]  # fmt: skip


def test_a_control_file_that_cannot_be_read_changes_nothing(opened: Recorder, tmp_path: Path) -> None:
    clock = Clock(now=100)
    switch = Switch(opened, Window(), tmp_path, clock)
    for content in ("", "[]", '{"capture": "maybe"}'):
        (tmp_path / CONTROL_FILE).write_text(content)
        take_steps(opened, switch, clock, 1, 0)
    assert switch.on


def test_communications_are_numbered_while_nothing_is_written(opened: Recorder) -> None:
    opened.mute(True)
    assert [opened.number("0") for _ in range(3)] == [0, 1, 2]
    assert opened.begin(Kind.PHASE, opened.intern("forward")) == 0
    opened.mute(False)
    assert opened.number("0") == 3


# --- the steps --------------------------------------------------------------------------------------


def step(at: float) -> list[Record]:
    return [phase("forward", at, at + 4), phase("backward", at + 5, at + 8), phase("optimizer", at + 8, at + 9)]


def turn(name: str, at: float, value: float) -> Record:
    return (Kind.MARK, name, at, at, {"value": value})


def test_steps_have_the_numbers_that_the_job_gives_them() -> None:
    rows = derive(
        turn(CAPTURE_OFF, 1, 0), turn(CAPTURE_ON, 1000, 20), *step(1001), *step(1011), turn(CAPTURE_OFF, 1021, 22),
        turn(CAPTURE_ON, 5000, 40), *step(5001), *step(5011),
    )  # fmt: skip
    assert derived(rows, "step") == [
        ("step", 1000, 1010), ("step", 1010, 1020), ("step", 5000, 5010), ("step", 5010, 5020),
    ]  # fmt: skip
    assert of(rows[rows["kind"] == "step"], "step") == [(20,), (21,), (40,), (41,)]
    assert sorted(set(rows.loc[(rows["kind"] == "phase"), "step"])) == [20, 21, 40, 41]
    assert steps_taken(rows) == 40
    assert captured_part(completed_steps(rows), 40) == "captured were steps 20 to 21, 40 to 41"


def test_of_several_optimizers_a_step_counts_once() -> None:
    turns = [phase("optimizer", 8, 9, value=1.0), phase("optimizer", 9, 10, value=2.0)]

    def both(at: float) -> list[Record]:
        moved = [(kind, name, a + at, (b or 0) + at, more) for kind, name, a, b, more in turns]
        return [*step(at)[:2], *moved]

    rows = derive(turn(CAPTURE_OFF, 1, 0), turn(CAPTURE_ON, 1000, 40), *both(1001), *both(1011), *both(1021))
    assert of(rows[rows["kind"] == "step"], "step") == [(20,), (21,), (22,)]


def test_what_the_rank_counted_as_one_step_is_one() -> None:
    """Many optimizers that are stepped in one backward."""

    def many(at: float) -> list[Record]:
        inner = [phase("optimizer", at + 6 + 0.1 * i, at + 6 + 0.1 * i + 0.05, value=i + 1.0) for i in range(5)]
        return [*step(at)[:2], *inner, (Kind.GAUGE, "cpu_seconds", at + 8.5, at + 8.5, {"value": at})]

    rows = derive(turn(CAPTURE_OFF, 1, 0), turn(CAPTURE_ON, 1000, 11), *many(1001), *many(1011), *many(1021))
    assert of(rows[rows["kind"] == "step"], "step") == [(11,), (12,), (13,)]


def test_a_capture_that_was_on_all_the_time_is_no_part() -> None:
    rows = derive(*step(0), *step(10))
    assert steps_taken(rows) is None


# --- a job --------------------------------------------------------------------------------------

TRAIN = """
import torch, time, sys
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
for step in range(30):
    model(torch.ones(2, 8)).sum().backward()
    time.sleep(0.005)
    optimizer.step()
"""


def test_a_job_of_which_some_steps_are_captured(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    done = profile(tmp_path, script, ranks=None, flags=("--steps", "10:20", "--no-report"))
    assert done.status == 0, done.stderr
    analysis = done.analysis()
    assert analysis.steps["step"].tolist() == list(range(10, 20))
    assert "captured were steps 10 to 19" in analysis.notes
    assert "captured were steps 10 to 19" in done.stderr


@pytest.mark.parametrize(("flag", "value"), [("--steps", "20"), ("--delay", "soon"), ("--duration", "-1")])
def test_a_window_that_is_none_is_refused(
    flag: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["run", flag, value, "train.py"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"[dsprof] error: {flag}: ")
    assert "such as" in error
    assert not (tmp_path / "dsprof-out").exists()


def run_folder(path: Path, **info: Any) -> Path:
    (path / "capture").mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"id": "x", "name": "x", "command": [], **info}))
    return path


def test_the_command_writes_the_control_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path / "run")
    assert main(["capture", str(folder), "off"]) == 0
    assert json.loads((folder / CONTROL_FILE).read_text()) == {"capture": "off"}
    assert "turns its capture off" in capsys.readouterr().out


def test_a_job_that_has_ended_has_nothing_to_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path / "run", ended="2026-11-22T10:00:00Z")
    assert main(["capture", str(folder), "on"]) == 3
    assert "ended at 2026-11-22T10:00:00Z" in capsys.readouterr().err
    assert not (folder / CONTROL_FILE).exists()
