"""What killed processes left in memory or on a local disk: nobody holds it, so the next `dsprof run` or `dsprof doctor`
moves it into its run folder."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from clocks import SleepingClock
from jobs import ROOT, environment

from dsprof import cli
from dsprof.collectors.capture import copier, scratch
from dsprof.collectors.capture.copier import Copier, hold
from dsprof.launch import left_behind
from dsprof.launch.left_behind import LeftBehind
from dsprof.machine import Machine
from dsprof.schema import COPYING_FILE

NAME = "rank00003.0.host.7"


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shared memory, and nothing else that is looked into."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(scratch, "SHARED_MEMORY", folder)
    monkeypatch.setattr(scratch, "parents", lambda given: [])
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "a"


@pytest.fixture
def local(memory: Path, run: Path) -> Path:
    """The folder of a capture, with what its copier told before it was killed."""
    folder = scratch.stand_in(run, memory) / "capture" / NAME
    scratch.make_private(folder)
    Copier(folder, run, "host")
    for name in ("chunk-00000.bin", "names.txt"):
        (folder / name).write_text(name)
    return folder


def arrives(run: Path, local: Path) -> None:
    """A copier of its own brings it: all of it is in the run folder, and nothing is left."""
    memory = local.parents[3]
    while [*memory.glob("*/*")]:
        time.sleep(0.01)
    assert {path.name: path.read_text() for path in (run / "capture" / local.name).iterdir()} == {
        name: name for name in ("chunk-00000.bin", "names.txt")
    }


# --- who holds a capture --------------------------------------------------------------------------


def test_what_nobody_holds_is_left_behind(local: Path, run: Path) -> None:
    assert left_behind.find() == [LeftBehind(local, run)]
    for alone in (False, True):
        held = hold(local, alone=alone)
        assert left_behind.find() == []
        os.close(held)
    assert left_behind.find() == [LeftBehind(local, run)]


def test_two_who_move_it_do_not_meet(local: Path, run: Path) -> None:
    held = hold(local, alone=True)
    with pytest.raises(BlockingIOError):
        hold(local, alone=True)
    with pytest.raises(BlockingIOError):  # a copier that comes too late
        hold(local)
    scratch.start_copier(local, run, "host", rank=0)  # another, which finds it held
    assert (local / "names.txt").exists()
    os.close(held)


RANK = """
import os, signal, sys
from pathlib import Path
from dsprof.collectors.capture import scratch
local, run = map(Path, sys.argv[1:3])
scratch.make_private(local)
scratch.hold(local)
scratch.start_copier(local, run, "host")
for name in ("chunk-00000.bin", "names.txt"):
    (local / name).write_text(name)
if not os.fork():  # such as a worker of a data loader: it lives on
    sys.stdin.readline()
    os._exit(0)
print("written", flush=True)
signal.pause()
"""


@pytest.fixture
def rank(memory: Path, run: Path) -> Iterator[subprocess.Popen[str]]:
    local = scratch.stand_in(run, memory) / "capture" / NAME
    with subprocess.Popen(
        [sys.executable, "-c", RANK, local, run],
        cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        yield process
        process.kill()


def kill_copier(local: Path) -> None:
    state = scratch.state_of(local / COPYING_FILE)
    assert state is not None
    os.kill(state.copier, signal.SIGKILL)
    while copier.began(state.copier) is not None:
        time.sleep(0.01)


def test_a_rank_without_its_copier_holds_it(rank: subprocess.Popen[str], memory: Path, run: Path) -> None:
    (local,) = memory.glob(f"*/*/capture/{NAME}")
    kill_copier(local)
    assert left_behind.find() == []
    rank.kill()
    rank.wait()
    assert left_behind.find() == [LeftBehind(local, run)]  # whatever it has forked
    assert [*left_behind.move_all()] == [f"{local}, left by processes that were killed, is moved to {run}"]
    arrives(run, local)


def test_a_copier_without_its_rank_goes_on(rank: subprocess.Popen[str], memory: Path, run: Path) -> None:
    (local,) = memory.glob(f"*/*/capture/{NAME}")
    rank.kill()
    rank.wait()
    arrives(run, local)


# --- what is done about it ------------------------------------------------------------------------


@pytest.mark.parametrize("there", [True, False], ids=["run folder", "run folder that was removed"])
def test_it_is_moved_into_its_run_folder(local: Path, run: Path, there: bool) -> None:
    if there:
        run.mkdir(parents=True)
    assert [*left_behind.tidy(run.parent / "b")] == [f"{local}, left by processes that were killed, is moved to {run}"]
    arrives(run, local)
    assert [*left_behind.tidy(run.parent / "b")] == []


def test_what_is_left_of_an_older_run_gets_into_no_newer_one(local: Path, run: Path, memory: Path) -> None:
    assert [*left_behind.tidy(run, "off")] == []
    assert local.exists()
    assert [*left_behind.tidy(run)] == []
    assert [*memory.glob("*/*")] == []
    assert not run.exists()


def test_it_stays_where_no_copier_can_be_started(local: Path, run: Path) -> None:
    def fails(*_: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    assert [*left_behind.move_all("", fails)] == [
        f"{local}, left by processes that were killed, cannot be moved to {run} ([Errno 11] Resource temporarily "
        "unavailable)"
    ]
    assert left_behind.find() == [LeftBehind(local, run)]


def test_doctor_says_what_it_moves(
    local: Path, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsprof.cli.doctor.inspect", lambda environ: Machine({}))
    assert cli.main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["moved"] == [f"{local}, left by processes that were killed, is moved to {run}"]
    arrives(run, local)
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["moved"] == []


def test_a_place_of_ones_own_is_looked_into(tmp_path: Path, run: Path) -> None:
    local = scratch.stand_in(run, tmp_path / "disk") / "capture" / NAME
    scratch.make_private(local)
    Copier(local, run, "host")
    assert left_behind.find() == []
    assert left_behind.find(str(tmp_path / "disk")) == [LeftBehind(local, run)]


# --- what is left alone ---------------------------------------------------------------------------


def test_an_empty_folder_is_removed_when_it_is_old(memory: Path, run: Path) -> None:
    local = scratch.stand_in(run, memory) / "capture" / NAME
    scratch.make_private(local)
    assert left_behind.find() == []
    assert local.exists()  # a rank is about to begin
    os.utime(local, (1, 1))
    assert left_behind.find() == []
    assert [*memory.glob("*/*")] == []


def of_another_run(local: Path) -> None:
    Copier(local, local.parents[3].parent / "runs" / "a", "host")
    text = (local / COPYING_FILE).read_text()
    (local / COPYING_FILE).write_text(text.replace("/runs/a", "/runs/b"))


def a_link(local: Path) -> None:
    elsewhere = local.parents[3].parent / "elsewhere"
    local.rename(elsewhere)
    local.symlink_to(elsewhere)


def for_everybody(local: Path) -> None:
    local.parents[2].chmod(0o777)


def without_a_state(local: Path) -> None:
    (local / COPYING_FILE).unlink()
    os.utime(local, (1, 1))


@pytest.mark.parametrize("change", [of_another_run, a_link, for_everybody, without_a_state])
def test_what_is_not_certainly_ours_is_left_alone(local: Path, run: Path, change: Callable[[Path], None]) -> None:
    change(local)
    assert left_behind.find() == []
    assert (local / "names.txt").read_text() == "names.txt"
    assert not run.exists()


def test_who_is_killed_while_it_is_removed_leaves_what_says_whose_it_is(
    local: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(copier.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        Copier(local, run, "host").finish()
    assert [path.name for path in local.iterdir()] == [COPYING_FILE]
    monkeypatch.undo()
    monkeypatch.setattr(scratch, "SHARED_MEMORY", local.parents[3])
    assert LeftBehind(local, run) in left_behind.find()


def test_who_only_looks_holds_up_no_rank(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SleepingClock()
    looks = hold(local, alone=True)
    clock.at[0.05] = lambda: os.close(looks)
    monkeypatch.setattr(copier.time, "sleep", clock.sleep)
    os.close(hold(local))
    assert 0.05 <= clock.now < 0.1


def test_a_launcher_waits_until_a_killed_rank_has_let_go(
    local: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SleepingClock()
    rank = hold(local)
    clock.at[1.5] = lambda: os.close(rank)
    monkeypatch.setattr(copier.time, "sleep", clock.sleep)
    (item,) = scratch.waiting(run, scratch.places(run))
    assert scratch.bring(item, run, scratch.places(run))
    assert 1.5 <= clock.now < 1.6
    assert not local.exists()
    scratch.make_private(local)
    lives_on = hold(local)
    assert not scratch.bring(item, run, scratch.places(run))
    assert local.exists()
    os.close(lives_on)


def test_what_is_made_is_for_its_user_alone(local: Path) -> None:
    for folder in (local, *local.parents[:3]):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((local / COPYING_FILE).stat().st_mode) == 0o600
