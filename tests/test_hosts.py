"""One run of several hosts: joining it, agreeing on it, concluding it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import forked_python
import launcher
import pytest
import torch.distributed as dist
from clocks import SleepingClock
from jobs import ABORTED, environment

from dsprof.cli import main
from dsprof.launch import Launch, hosts
from dsprof.launch.hosts import Agreed, Meeting, Participation, take_part
from dsprof.launch.talk import Talk
from dsprof.run import HostPart, RankExit, RunError, RunFolder, RunInfo, failures
from dsprof.trace.merge import merge

As = Callable[[str], None]


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Files of launchers that are killed, or never end, are left in a folder of the test's."""
    folder = str(tmp_path_factory.mktemp("temporary"))
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> As:
    """Has this process be on that host."""
    return lambda host: monkeypatch.setenv("DSPROF_HOST", host)


def info(nnodes: str = "2", world_size: int = 2) -> RunInfo:
    return RunInfo(id="run", name="train", command=["dsprof"], nnodes=nnodes, world_size=world_size)


def take(path: Path, *, force: bool = False, elastic: bool = False, nnodes: str = "2") -> Agreed:
    return take_part(path, info(nnodes), force=force, elastic=elastic)


# --- joining ------------------------------------------------------------------------------------


def test_the_first_makes_the_run_and_the_second_leaves_no_trace_until_they_have_met(tmp_path: Path, on: As) -> None:
    on("a")
    first = take(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    on("b")
    second = take(tmp_path / "run")
    assert (first.known, second.known) == (True, False)
    assert first.token == second.token == RunFolder(tmp_path / "run").read_info().token
    assert sorted(tmp_path.rglob("*")) == before
    assert [part.host for part in RunFolder(tmp_path / "run").read_hosts()] == ["a"]


def end_run(path: Path) -> None:
    folder = RunFolder(path)
    ended = folder.read_info()
    ended.ended, ended.status = "2026-11-22T00:00:00+00:00", 0
    folder.write_info(ended)


@pytest.mark.parametrize("host", ["a", "b"])
def test_a_run_that_has_ended_is_not_joined(tmp_path: Path, on: As, host: str) -> None:
    on("a")
    token = take(tmp_path / "run").token
    end_run(tmp_path / "run")
    on(host)
    for elastic in (False, True):
        with pytest.raises(RunError, match="exists; replace it with --force"):
            take(tmp_path / "run", elastic=elastic)
    assert RunFolder(tmp_path / "run").read_info().token == token
    assert take(tmp_path / "run", force=True).token != token


def test_of_two_hosts_that_replace_a_run_the_second_joins_the_firsts(tmp_path: Path, on: As) -> None:
    on("a")
    take(tmp_path / "run")
    end_run(tmp_path / "run")
    first = take(tmp_path / "run", force=True)
    on("b")
    second = take(tmp_path / "run", force=True)
    assert (second.token, second.known) == (first.token, False)


def test_a_host_that_took_part_comes_back_only_where_hosts_may(tmp_path: Path, on: As) -> None:
    on("a")
    first = take(tmp_path / "run")
    with pytest.raises(RunError, match="exists"):
        take(tmp_path / "run")
    again = take(tmp_path / "run", elastic=True)
    assert (again.token, again.known) == (first.token, False)


def test_a_run_of_another_number_of_hosts_or_of_one_is_not_joined(tmp_path: Path, on: As) -> None:
    on("a")
    take(tmp_path / "run")
    on("b")
    with pytest.raises(RunError, match="exists"):
        take(tmp_path / "run", nnodes="3")
    (tmp_path / "other" / "capture").mkdir(parents=True)
    RunFolder(tmp_path / "other").write_info(RunInfo(id="other", name="train", command=[]))
    with pytest.raises(RunError, match="exists"):
        take(tmp_path / "other")


def test_a_folder_that_another_host_is_making_is_waited_for_a_while(
    tmp_path: Path, on: As, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "LOCK_S", 0.0)
    (tmp_path / ".run.lock").mkdir()
    with pytest.raises(RunError, match=r"\.run\.lock: another host is making the run folder; if none is, remove it"):
        take(tmp_path / "run")
    (tmp_path / ".run.lock").rmdir()
    take(tmp_path / "run")
    assert not (tmp_path / ".run.lock").exists()


# --- agreeing -----------------------------------------------------------------------------------


def meeting(tmp_path: Path, agreed: Agreed, time: SleepingClock) -> Meeting:
    part = Participation(agreed, Talk())
    return Meeting(part.file, time.clock, time.sleep)


def test_hosts_of_one_job_are_in_one_run(tmp_path: Path, on: As) -> None:
    store, time = dist.HashStore(), SleepingClock()
    on("a")
    a = meeting(tmp_path, take(tmp_path / "run"), time)
    on("b")
    b = meeting(tmp_path, take(tmp_path / "run"), time)
    time.at[3.0] = lambda: (on("a"), a.meet(store, 0), on("b"))  # the first comes from the rendezvous later
    b.meet(store, 1)
    assert 3 <= time.now < 3.2
    assert (a.agreed, b.agreed) == (True, True)
    assert a.folder.path == b.folder.path == tmp_path / "run"
    assert [(part.host, part.node) for part in b.folder.read_hosts()] == [("a", 0), ("b", 1)]


def test_a_run_that_nobody_in_the_job_knows_is_left_alone(
    tmp_path: Path, on: As, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was killed, so has no end, and its host is none of this job's: both find it and take it for their own."""
    on("dead")
    take(tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    store, time = dist.HashStore(), SleepingClock()
    met = []
    for host in "ab":
        on(host)
        met.append(meeting(tmp_path, take(tmp_path / "run"), time))
    for node, host in enumerate("ab"):
        on(host)
        met[node].meet(store, node)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert met[0].folder.path == met[1].folder.path
    assert re.fullmatch(r"run-[0-9a-f]{6}", met[0].folder.path.name)
    assert [(part.host, part.node) for part in met[0].folder.read_hosts()] == [("a", 0), ("b", 1)]
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[0] == said[1]
    assert said[0] == (
        f"[dsprof] warning: the run in {tmp_path}/run is not of this job, none of whose hosts knows it; it is left as "
        f"it is, and the run folder is {met[0].folder.path}"
    )


def test_a_run_that_was_replaced_after_it_was_found_is_found_again(tmp_path: Path, on: As) -> None:
    on("a")
    take(tmp_path / "run")
    on("b")
    time, store = SleepingClock(), dist.HashStore()
    b = meeting(tmp_path, take(tmp_path / "run"), time)
    on("a")
    a = meeting(tmp_path, take(tmp_path / "run", force=True), time)
    a.meet(store, 0)
    on("b")
    b.meet(store, 1)
    assert b.folder.path == tmp_path / "run"
    assert [part.host for part in b.folder.read_hosts()] == ["a", "b"]


def test_a_folder_that_the_hosts_do_not_share_is_told(
    tmp_path: Path, on: As, capfd: pytest.CaptureFixture[str]
) -> None:
    store, time = dist.HashStore(), SleepingClock()
    for node, host in enumerate("ab"):
        on(host)
        meeting(tmp_path, take(tmp_path / host / "run"), time).meet(store, node)
    assert capfd.readouterr().err == (
        f"[dsprof] warning: another host of the job is in a run of its own ({tmp_path}/a/run), so this one is not of "
        "all hosts; give -o the same folder on each, in a file system that all of them see\n"
    )
    assert time.now == 0


# --- concluding ---------------------------------------------------------------------------------

ENDED = "2026-11-22T00:00:00+00:00"


def part_of(
    folder: RunFolder, on: As, host: str, node: int | None, time: SleepingClock, known: bool = True
) -> Participation:
    on(host)
    return Participation(Agreed(str(folder.path), "token", known, node), Talk(), time.clock, time.sleep)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.capture.mkdir(parents=True)
    folder.write_info(info())
    for node, host in enumerate("ab"):
        folder.write_host(HostPart(host, node))
    return folder


def test_the_host_of_rank_0_waits_for_the_others_and_concludes(folder: RunFolder, on: As) -> None:
    time = SleepingClock()
    a, b = part_of(folder, on, "a", 0, time), part_of(folder, on, "b", 1, time)
    told: list[bool] = []
    time.at[7.0] = lambda: (on("b"), told.append(b.end(3, ENDED)), on("a"))
    on("a")
    assert a.end(0, ENDED)
    assert 7 <= time.now < 7.2
    assert told == [False]
    assert [(part.host, part.ended, part.status) for part in folder.read_hosts()] == [("a", ENDED, 0), ("b", ENDED, 3)]


def test_what_a_host_has_measured_stays_when_it_draws_the_verdict(folder: RunFolder, on: As) -> None:
    on("a")
    folder.write_host(HostPart("b", 1, ended=ENDED, status=0))
    a = part_of(folder, on, "a", 0, SleepingClock())
    peaks = [{"host": "a", "ranks": [0], "threads": 1, "flops": {"float32": 1e9}}]
    a.end(0, ENDED, peaks)
    a.concluded(0, ENDED)
    assert [(part.cpu_peaks, part.concluded) for part in folder.read_hosts()] == [(peaks, True), ([], False)]


def test_a_host_that_does_not_end_is_waited_for_a_minute_and_named(
    folder: RunFolder, on: As, capfd: pytest.CaptureFixture[str]
) -> None:
    time = SleepingClock()
    a, b = part_of(folder, on, "a", 0, time), part_of(folder, on, "b", 1, time)
    on("a")
    assert a.end(0, ENDED)
    assert 60 <= time.now < 61
    assert capfd.readouterr().err == (
        "[dsprof] waiting for the end of b, at most 60 s (Ctrl-C: no longer)\n"
        "[dsprof] warning: b: no end 60 s after that of a; going on without\n"
    )
    ended = folder.read_info()
    ended.ended = ENDED
    folder.write_info(ended)
    wanted = "host b: had not ended when the verdict was drawn; what is there of its ranks counts"
    assert wanted in merge(folder).warnings
    a.concluded(0, ENDED)
    on("b")
    assert not b.end(0, ENDED)
    assert f"a drew the verdict before this host ended; anew: dsprof report {folder.path}" in capfd.readouterr().err
    assert wanted not in merge(folder).warnings


def test_ctrl_c_ends_the_waiting(folder: RunFolder, on: As) -> None:
    def press() -> None:
        raise KeyboardInterrupt

    time = SleepingClock()
    time.at[2.0] = press
    assert part_of(folder, on, "a", 0, time).end(0, ENDED)
    assert time.now < 3


def test_a_host_that_came_and_never_met_the_others_takes_no_part(
    folder: RunFolder, on: As, capfd: pytest.CaptureFixture[str]
) -> None:
    assert not part_of(folder, on, "c", None, SleepingClock(), known=False).end(1, ENDED)
    assert capfd.readouterr().err == (
        f"[dsprof] warning: this host took no part in the run in {folder.path}: the hosts never met, or did not agree\n"
    )
    assert [part.host for part in folder.read_hosts()] == ["a", "b"]


def test_where_hosts_came_and_went_the_last_of_rank_0_concludes(folder: RunFolder, on: As) -> None:
    """a was of rank 0 and left; the job went on with b as such."""
    time = SleepingClock()
    folder.write_host(HostPart("b", 0))
    assert not part_of(folder, on, "a", 0, time).end(1, ENDED)
    assert part_of(folder, on, "b", 0, time).end(0, ENDED)
    assert time.now == 0


def test_hosts_that_took_no_part_are_told(folder: RunFolder) -> None:
    (folder.hosts / "b.json").unlink()
    assert "1 of 2 hosts took part: a" in merge(folder).warnings
    folder.write_host(HostPart("a"))
    assert "the 2 hosts of the job never met; came: a" in merge(folder).warnings


def test_who_failed_first_on_which_host_is_told_by_the_wall_clock() -> None:
    """By the monotonic clocks, each since its host's start, it would be rank 1."""
    exits = [
        RankExit(0, "a", 1, 7, None, 9_000, ended_epoch_ns=100),
        RankExit(1, "b", 2, 1, None, 50, ended_epoch_ns=200),
    ]
    assert [item.rank for item in failures(exits)] == [0, 1]


# --- the command line ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "nnodes", "elastic"),
    [
        ("--nproc-per-node 2", "", False),
        ("--nnodes 1 --nproc-per-node 2", "", False),
        ("--nnodes 1:1", "", False),
        ("--nnodes 2 --node-rank 1 --master-addr h", "2", False),
        ("--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint h:1", "1:4", True),
        ("--nnodes 2 --rdzv-endpoint h:1", "2", False),
    ],
)
def test_which_flags_mean_several_hosts(launched: list[Launch], flags: str, nnodes: str, elastic: bool) -> None:
    assert main(["run", *flags.split(), "train.py"]) == 0
    assert (launched[0].job.nnodes, launched[0].job.elastic) == (nnodes, elastic)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def line(node: int, port: int, *flags: str, elastic: bool = False) -> list[str]:
    """What is typed on a host."""
    if elastic:
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "1"]
    else:
        where = ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return ["run", "--native", "off", "-o", "../run", "--nnodes", "2", "--nproc-per-node", "1", *where, *flags,
            "../train.py"]  # fmt: skip


def start(tmp_path: Path, host: str, words: list[str], *, forked: bool = True) -> subprocess.Popen[str]:
    (tmp_path / host).mkdir(exist_ok=True)
    return launcher.start(words, tmp_path / host, {"DSPROF_HOST": host}, forked=forked)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


RANK = """
import os, sys, time
from pathlib import Path
rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
host, run = os.environ["DSPROF_HOST"], Path(os.environ["DSPROF_RUN"])
(run / "capture" / f"rank{rank:05d}.{restart}.{host}.{os.getpid()}").mkdir()
def until(path):
    while not path.exists():
        time.sleep(0.01)
"""


@pytest.mark.parametrize("elastic", [False, True])
def test_two_hosts_are_one_run_with_one_verdict(tmp_path: Path, elastic: bool) -> None:
    (tmp_path / "train.py").write_text(RANK + "print(rank, host)")
    port = free_port()
    processes = [start(tmp_path, host, line(node, port, elastic=elastic)) for node, host in enumerate("ab")]
    ends = [finish(process) for process in processes]
    assert [status for status, _, _ in ends] == [0, 0], ends
    folder = RunFolder(tmp_path / "run")
    (zero,) = [part.host for part in folder.read_hosts() if part.node == 0]
    if not elastic:
        assert zero == "a"
    told = {host: err for host, (_, _, err) in zip("ab", ends, strict=True)}
    other = "b" if zero == "a" else "a"
    assert "THE VERDICT" in told[zero]
    assert "THE VERDICT" not in told[other]
    assert f"the verdict will be drawn on {zero}, the host of rank 0, and lie in {folder.path}" in told[other]
    assert sum("one run of 2 hosts, made here" in err for err in told.values()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "run", "train.py"]
    assert {(item.rank, item.status) for item in folder.read_exits()[0]} == {(0, 0), (1, 0)}
    assert {item.host for item in folder.read_exits()[0]} == {"a", "b"}
    written = folder.read_info()
    assert (written.host, written.world_size, written.status, written.nnodes) == (zero, 2, 0, "2")
    assert [(part.ended is not None, part.concluded) for part in sorted(folder.read_hosts(), key=lambda p: p.node)] == [
        (True, True), (True, False),
    ]  # fmt: skip
    # What lies there is not written into by the same line typed again.
    before = sorted(folder.path.rglob("*"))
    status, _, err = finish(start(tmp_path, "a", line(0, port, elastic=elastic)))
    assert status == 2
    assert "exists; replace it with --force, or give another folder with -o" in err
    assert sorted(folder.path.rglob("*")) == before


def test_a_failure_on_the_other_host_is_in_the_verdict(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        RANK
        + """
if rank == 1:
    sys.exit(7)
until(run / "exits" / "b.json")  # b's agent has ended
sys.exit(1)  # as one whose peer is gone
"""
    )
    port = free_port()
    a, b = (start(tmp_path, host, line(node, port)) for node, host in enumerate("ab"))
    (status, _, err), (status_b, _, err_b) = finish(a), finish(b)
    assert (status, status_b) == (1, 7)
    assert "the job ended with status 1: rank 1 on b failed first (exit status 7)" in err
    assert "THE VERDICT" in err
    assert "[dsprof] the job ended with status 7 on this host\n" in err_b
    assert [item.rank for item in failures(RunFolder(tmp_path / "run").read_info().exits)] == [1, 0]


def test_an_elastic_restart_stays_in_the_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        RANK
        + """
if len(list((run / "capture").iterdir())) <= 2:  # of the first start
    if rank == 1:
        sys.exit(9)
    time.sleep(60)  # until the agent stops it
"""
    )
    port = free_port()
    flags = ("--max-restarts", "2", "--monitor-interval", "0.1")
    processes = [start(tmp_path, host, line(node, port, *flags, elastic=True)) for node, host in enumerate("ab")]
    ends = [finish(process) for process in processes]
    assert [status for status, _, _ in ends] == [0, 0], ends
    folder = RunFolder(tmp_path / "run")
    assert sum("THE VERDICT" in err for _, _, err in ends) == 1
    assert (folder.read_info().status, failures(folder.read_info().exits)) == (0, [])
    assert len(list(folder.capture.iterdir())) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "run", "train.py"]


def test_a_host_that_never_comes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('never')")
    (tmp_path / "a").mkdir()
    words = line(0, free_port(), "--rdzv-conf", "timeout=2")
    done = forked_python.run(
        [sys.executable, "-m", "dsprof", *words],
        cwd=tmp_path / "a", env=environment(DSPROF_HOST="a"), capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    assert "the 2 hosts of the job never met; came: a" in done.stderr
    assert "waiting for the end" not in done.stderr


def test_several_hosts_without_a_folder_are_told_of_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    words = ["run", "--native", "off", "--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d",
             "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-conf", "last_call_timeout=1", "train.py"]  # fmt: skip
    done = launcher.run(words, tmp_path, forked=True)
    assert done.returncode == 0, done.stderr
    assert (
        "[dsprof] warning: --nnodes 1:2 without -o: this run will be of this host's ranks only; for one " in done.stderr
    )
    assert "THE VERDICT" in done.stderr


@pytest.mark.slow
def test_a_killed_runs_folder_is_left_alone_by_a_job_that_is_given_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANK + "print('up', flush=True)\ntime.sleep(600)")
    port = free_port()
    # Not forked: the agent of a forked launcher is no child of it, and does not end when it is killed.
    first = [start(tmp_path, host, line(node, port), forked=False) for node, host in enumerate("cd")]
    for process in first:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
    for process in first:
        process.kill()
    for process in first:
        process.communicate(timeout=60)
    before = sorted(path for path in (tmp_path / "run").rglob("*") if path.parent.name != "exits")
    (tmp_path / "train.py").write_text(RANK + "print(run)")
    port = free_port()
    ends = [finish(p) for p in [start(tmp_path, host, line(node, port)) for node, host in enumerate("ab")]]
    assert [status for status, _, _ in ends] == [0, 0], ends
    (instead,) = {out for _, out, _ in ends}
    assert re.fullmatch(rf"{tmp_path}/run-[0-9a-f]{{6}}\n", instead)
    assert sorted(path for path in (tmp_path / "run").rglob("*") if path.parent.name != "exits") == before
    assert "THE VERDICT" in ends[0][2]
    assert RunFolder(Path(instead.strip())).read_info().status == 0


TRAIN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


def test_a_real_job_of_two_hosts(tmp_path: Path) -> None:
    """With the captures of the second on a disk of its own first."""
    (tmp_path / "train.py").write_text(TRAIN)
    scratch: Mapping[str, tuple[str, ...]] = {"a": (), "b": ("--scratch", str(tmp_path / "disk"))}
    for _ in range(3):
        port, processes = free_port(), []
        for node, host in enumerate("ab"):
            (tmp_path / host).mkdir(exist_ok=True)
            processes.append(
                forked_python.start(
                    [sys.executable, "-m", "dsprof", *line(node, port, *scratch[host])],
                    cwd=tmp_path / host,
                    env=environment(DSPROF_HOST=host, OMP_NUM_THREADS="1"),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            )
        # torchrun would wait five minutes for the agent of a rank that gloo aborted on its way out.
        while any(process.poll() is None for process in processes) and not any(p.poll() for p in processes):
            time.sleep(0.05)
        if any(process.poll() for process in processes):
            for process in processes:
                process.terminate()
        ends = [finish(process) for process in processes]
        if not any(ABORTED in err for _, _, err in ends):
            break
        shutil.rmtree(tmp_path / "run")
    assert [status for status, _, _ in ends] == [0, 0], ends
    folder = RunFolder(tmp_path / "run")
    found = json.loads(folder.findings_json.read_text())
    assert found["capture"]["warnings"] == []
    assert re.search("capture   .*2/2 ranks, ", ends[0][2])
    assert {(item.rank, item.host, item.last_step, item.closed) for item in folder.read_info().ranks} == {
        (0, "a", 19, True), (1, "b", 19, True),
    }  # fmt: skip
    assert "captures are written to " in ends[1][2]
    assert not list((tmp_path / "disk").glob("dsprof-*/*"))
