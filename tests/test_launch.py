"""The launcher around a script as plain Python starts it, or around any command: folder, environment, signals, status,
and failures of its own."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import launcher
import pytest

from dsprof.launch import Job, LaunchError
from dsprof.launch.claim import claim, is_run
from dsprof.launch.launch import build_native_helper, environment
from dsprof.launch.talk import Talk
from dsprof.names import CaptureName, host_name
from dsprof.run import RunError, RunFolder, RunInfo
from dsprof.settings import Settings

PYTHON = sys.executable
COUNTS_SIGINT = """
import signal, sys, time
caught = []
signal.signal(signal.SIGINT, lambda *_: caught.append(1))
print("up", flush=True)
deadline = time.monotonic() + 30
while not caught and time.monotonic() < deadline:
    time.sleep(0.01)
time.sleep(0.5)
print("caught", len(caught), flush=True)
sys.exit(5)
"""


SAYS_ALL = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "name": __name__, "file": __file__,
    "cwd": os.getcwd(), "flags": list(sys.flags), "modules": sorted(sys.modules), "stdin": sys.stdin.read(),
    "environ": {name: value for name, value in os.environ.items() if not name.startswith("DSPROF")},
}))
"""
BECOMES_A_RANK = """
import os, socket
name = f"rank{{:05d}}.{{}}.{socket.gethostname()}.{os.getpid()}"
os.mkdir(os.path.join(os.environ["DSPROF_RUN"], "capture", name.format(3, 1)))
"""
"""What the collectors do in a process that joins a process group, here as rank 3."""


def info() -> RunInfo:
    return RunInfo(id="a", name="a", command=[])


def only_run(parent: Path) -> RunFolder:
    (path,) = (parent / "dsprof-out").iterdir()
    return RunFolder(path)


def command(*words: str) -> list[str]:
    return ["run", "--native", "off", "--", *words]


def test_a_command_runs_armed_and_otherwise_unchanged(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['DSPROF'], os.environ['DSPROF_RUN'], sys.argv[1:], os.getcwd())"
    done = launcher.run(command(PYTHON, "-c", code, "-o", "foo", "--help", "--", "-x"), tmp_path)
    folder = only_run(tmp_path)
    assert done.returncode == 0
    assert done.stdout == f"1 {folder.path} ['-o', 'foo', '--help', '--', '-x'] {tmp_path}\n"
    assert all(line.startswith("[dsprof] ") for line in done.stderr.splitlines() if line != "THE VERDICT")
    name = f"dsprof-out/{folder.path.name}"
    assert done.stderr.splitlines()[-5:] == [
        "THE VERDICT",
        f"[dsprof] report: {name}/report.html",
        f"[dsprof] next: dsprof report {name}",
        f"[dsprof]       dsprof tensorboard {name}",
        f"[dsprof]       dsprof fix {name}    # the change as a diff",
    ]
    written = folder.read_info()
    assert (written.status, written.name, written.level) == (0, Path(PYTHON).name, "light")
    assert written.command[:6] == ["dsprof", *command(PYTHON)]
    assert written.started < (written.ended or "")
    assert set(written.versions) == {"dsprof", "python", "torch"}


@pytest.mark.parametrize("words", [("train.py", "-o", "a b", "--", "-x"), ("-m", "pkg.train", "--nproc-per-node", "2")])
def test_a_script_is_started_as_python_starts_it(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "pkg").mkdir()
    for name in ("train.py", "pkg/train.py"):
        (tmp_path / name).write_text(SAYS_ALL)
    env = {"PYTHONPATH": "mine:", "MASTER_PORT": "1", "OMP_NUM_THREADS": "3", "PET_NPROC_PER_NODE": "2"}
    plain = subprocess.run(
        [PYTHON, *words],
        cwd=tmp_path, env=launcher.clean_environment(env), input="", capture_output=True, text=True, check=True,
    )  # fmt: skip
    done = launcher.run(["run", "--native", "off", *words], tmp_path, env)
    assert done.returncode == 0
    assert json.loads(done.stdout) == json.loads(plain.stdout)
    written = only_run(tmp_path).read_info()
    assert (written.world_size, written.exits, written.status) == (None, [], 0)


@pytest.mark.parametrize("started_by", [["train.py"], ["--", PYTHON, "train.py"]])
@pytest.mark.parametrize(
    ("code", "status", "exit_code", "number", "says"),
    [
        ("", 0, 0, None, None),
        ("raise SystemExit(7)", 7, 7, None, "7"),
        ("os.kill(os.getpid(), 9)", 137, None, 9, "137 (SIGKILL)"),
    ],
)
def test_how_a_process_that_is_a_rank_ended(
    tmp_path: Path, started_by: list[str], code: str, status: int, exit_code: int | None, number: int | None, says: str
) -> None:
    before = time.monotonic_ns()
    (tmp_path / "train.py").write_text(BECOMES_A_RANK + code)
    done = launcher.run(["run", "--native", "off", *started_by], tmp_path)
    assert done.returncode == status
    assert (f"[dsprof] the job ended with status {says}\n" in done.stderr) == (status != 0)
    written = only_run(tmp_path).read_info()
    (end,) = written.exits
    (capture,) = only_run(tmp_path).capture.iterdir()
    assert capture.name == f"rank00003.1.{end.host}.{end.pid}"
    assert (end.rank, end.restart, end.code, end.signal, end.stopped) == (3, 1, exit_code, number, False)
    assert written.host == end.host
    assert written.started_ns is not None
    assert end.ended_ns is not None
    assert before < written.started_ns < end.ended_ns == written.ended_ns < time.monotonic_ns()


def test_a_script_that_failed_before_there_was_a_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise KeyError('batch')")
    done = launcher.run(["run", "--native", "off", "train.py"], tmp_path)
    assert done.returncode == 1
    (end,) = only_run(tmp_path).read_info().exits
    assert (end.rank, end.restart, end.code, end.signal) == (0, 0, 1, None)


def test_a_process_that_only_starts_ranks_is_none_itself(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(BECOMES_A_RANK)
    code = "import subprocess, sys; subprocess.run([sys.executable, 'rank.py'], check=True); sys.exit(7)"
    (tmp_path / "train.py").write_text(code)
    done = launcher.run(["run", "--native", "off", "train.py"], tmp_path)
    assert done.returncode == 7
    assert "[dsprof] the job ended with status 7\n" in done.stderr
    written = only_run(tmp_path).read_info()
    assert (written.exits, written.status) == ([], 7)
    assert len(list(only_run(tmp_path).capture.iterdir())) == 1


def test_a_rank_that_is_interrupted_did_not_fail(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BECOMES_A_RANK + "import time\nprint('up', flush=True)\ntime.sleep(60)")
    process = launcher.start(["run", "--native", "off", "train.py"], tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "[dsprof] the job ended with status 130\n" in err
    (end,) = only_run(tmp_path).read_info().exits
    assert (end.signal, end.stopped) == (signal.SIGINT, True)


def test_a_killed_launcher_leaves_no_script_behind(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, time\nprint('up', flush=True)\ntime.sleep(600)")
    process = launcher.start(["run", "--native", "off", "train.py"], tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.communicate(timeout=60)  # which returns when nobody has its stdout open any more


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("sys.exit(7)", 7),
        ("raise ValueError", 1),
        ("os._exit(3)", 3),
        ("os.kill(os.getpid(), 9)", 137),
        ("os.kill(os.getpid(), 15)", 143),
        ("os.kill(os.getpid(), 2)", 130),
    ],
)
def test_the_status_is_the_commands_own(tmp_path: Path, code: str, status: int) -> None:
    done = launcher.run(command(PYTHON, "-c", f"import os, sys; {code}"), tmp_path)
    assert done.returncode == status
    assert f"[dsprof] the job ended with status {status}\n" in done.stderr
    assert "THE VERDICT" in done.stderr
    assert only_run(tmp_path).read_info().status == status


def test_a_command_that_is_no_program_is_status_126_and_leaves_no_run(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"\x00\x01")
    (tmp_path / "data").chmod(0o755)
    done = launcher.run(command("./data"), tmp_path)
    assert done.returncode == 126
    assert "[dsprof] error: ./data: cannot be started" in done.stderr
    assert list((tmp_path / "dsprof-out").iterdir()) == []


def test_quiet_says_nothing_and_json_is_the_last_line(tmp_path: Path) -> None:
    assert launcher.run(["run", "-q", "--native", "off", "--", "true"], tmp_path).stderr == ""
    done = launcher.run(["run", "--json", "--no-report", "--native", "off", "-o", "a", "--", "true"], tmp_path)
    assert json.loads(done.stderr.splitlines()[-1]) == {"schema": 1}
    assert not (tmp_path / "a" / "report.html").exists()


def test_a_failing_analysis_is_one_warning_and_the_status_stays(tmp_path: Path) -> None:
    done = launcher.run(["run", "-o", "broken", *command(PYTHON, "-c", "raise SystemExit(7)")[1:]], tmp_path)
    assert done.returncode == 7
    warnings = [line for line in done.stderr.splitlines() if "warning" in line]
    assert warnings == [
        "[dsprof] warning: the analysis failed (ValueError: cannot divide); the capture is kept in broken"
    ]
    assert "Traceback" in (tmp_path / "broken" / "dsprof-error.log").read_text()


def test_an_existing_run_needs_force(tmp_path: Path) -> None:
    line = ["run", "--native", "off", "-o", "a", "--", "true"]
    assert launcher.run(line, tmp_path).returncode == 0
    (tmp_path / "a" / "trace").mkdir()
    refused = launcher.run(line, tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == "[dsprof] error: a: exists; replace it with --force, or give another folder with -o\n"
    assert launcher.run(["run", "--force", *line[1:]], tmp_path).returncode == 0
    assert not (tmp_path / "a" / "trace").exists()


def test_force_removes_a_run_and_nothing_else(tmp_path: Path) -> None:
    folder = claim(tmp_path / "a", info())
    (folder.path / "notes.txt").write_text("mine")
    claim(folder.path, info(), force=True)
    assert sorted(item.name for item in folder.path.iterdir()) == ["capture", "notes.txt", "run.json"]


def test_force_leaves_a_run_alone_whose_ranks_are_alive(tmp_path: Path) -> None:
    """Once it has ended, or where the process is gone, it makes way."""
    folder = claim(tmp_path / "a", info())
    mine, gone = os.getpid(), 2**22 + 1  # more than a process's number can be
    (folder.capture / str(CaptureName(0, 0, host_name(), mine))).mkdir()
    refused = f"a job is still running there \\(process {mine} is one of its ranks\\)"
    with pytest.raises(RunError, match=refused):
        claim(folder.path, info(), force=True)
    assert len(list(folder.capture.iterdir())) == 1
    folder.write_info(replace(info(), ended="2026-11-20T10:15:00+00:00"))
    claim(folder.path, info(), force=True)
    for host, process in ((host_name(), gone), ("another-host", mine)):
        (folder.capture / str(CaptureName(0, 0, host, process))).mkdir()
        claim(folder.path, info(), force=True)


@pytest.mark.parametrize("content", [{}, {"capture/frame.png": "", "run.json": "[]"}, {"run.json": '{"lr": 1}'}])
def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path, content: dict[str, str]) -> None:
    for name, text in {"thesis.tex": "", **content}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(RunError, match="holds something other than a run"):
        claim(tmp_path, info(), force=True)
    assert (tmp_path / "thesis.tex").exists()


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert claim(tmp_path, info()).read_info().id == "a"


def test_two_launchers_cannot_take_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = claim(tmp_path / "a", info())
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(()))  # the second looked before the first wrote
    with pytest.raises(RunError, match="another run has just begun there"):
        claim(tmp_path / "a", info())
    assert first.run_json.exists()


def test_force_takes_the_old_runs_errors_away_and_nobody_elses(tmp_path: Path) -> None:
    folder = claim(tmp_path / "a", info())
    for name in ("error.4711.txt", "hint.4711.json", "error.log.txt", "hint.mine.json", "notes.txt"):
        (folder.path / name).touch()
    claim(folder.path, info(), force=True)
    kept = ["capture", "error.log.txt", "hint.mine.json", "notes.txt", "run.json"]
    assert sorted(path.name for path in folder.path.iterdir()) == kept


def test_a_symbolic_link_inside_a_run_is_not_followed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "precious").touch()
    folder = claim(tmp_path / "a", info())
    (folder.path / "trace").symlink_to(data)
    assert is_run(folder)
    folder.remove()
    assert (data / "precious").exists()
    assert not folder.path.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB."""
    path = tmp_path / "small"
    path.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", path]).returncode:
        pytest.skip("needs the right to mount")
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_full_disk_at_the_start_is_an_error_before_the_job(tmp_path: Path, small_disk: Path) -> None:
    subprocess.run(["sh", "-c", "cat /dev/zero > small/filler"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    line = ["run", "--native", "off", "-o", "small/a", "--", "touch", "started"]
    done = launcher.run(line, tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("[dsprof] error: small/a: cannot be written (No space left on device); give another")
    assert not (tmp_path / "started").exists()


def test_a_disk_that_fills_during_the_job_costs_a_warning(tmp_path: Path, small_disk: Path) -> None:
    fill = "cat /dev/zero > small/filler; exit 7"
    done = launcher.run(["run", "--native", "off", "-o", "small/a", "--", "sh", "-c", fill], tmp_path)
    assert done.returncode == 7
    assert "[dsprof] warning: 0.1 MiB free for small/a; what does not fit is not captured\n" in done.stderr
    assert "[dsprof] warning: the disk of small/a is full; the capture may be incomplete\n" in done.stderr
    assert (small_disk / "a" / "run.json").exists()


@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_ctrl_c_reaches_a_command(tmp_path: Path, send: Callable[[int, int], None]) -> None:
    process = launcher.start(command(PYTHON, "-c", "import time; print('up', flush=True); time.sleep(60)"), tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    send(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted: waiting for the job to end" in err
    assert "THE VERDICT" in err


def test_a_signal_to_the_launcher_alone_is_passed_on_once(tmp_path: Path) -> None:
    process = launcher.start(command(PYTHON, "-c", COUNTS_SIGINT), tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == ("caught 1\n", 5)


def test_ctrl_c_on_a_terminal_reaches_the_command_once(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = launcher.start(
        command(PYTHON, "-c", COUNTS_SIGINT),
        tmp_path,
        stdin=theirs,
        preexec_fn=lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0),
    )
    assert process.stdout is not None
    process.stdout.readline()
    os.write(ours, b"\x03")
    out, err = process.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert (out, process.returncode) == ("caught 1\n", 5)
    assert "THE VERDICT" in err


def test_sigterm_is_passed_on_and_the_verdict_still_comes(tmp_path: Path) -> None:
    process = launcher.start(command("sh", "-c", "echo up; exec sleep 60"), tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "THE VERDICT" in err


def test_the_third_ctrl_c_kills_a_command_that_ignores_it(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(2, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    process = launcher.start(command(PYTHON, "-c", code), tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(1.5)  # sooner, it counts as the same one
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted again: killing the job" in err
    assert "THE VERDICT" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_analysis_can_be_given_up(tmp_path: Path, number: int) -> None:
    process = launcher.start(["run", "-q", "-o", "slow", *command("sh", "-c", "exit 7")[1:]], tmp_path)
    assert process.stderr is not None
    assert process.stderr.readline() == "analyzing\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 7
    assert err == "[dsprof] analysis stopped; the capture is kept, for dsprof report slow\n"


def test_what_was_ignored_stays_ignored(tmp_path: Path) -> None:
    done = subprocess.run(
        ["nohup", PYTHON, "-c", launcher.PROGRAM, *command("sh", "-c", "kill -HUP $PPID; sleep 0.3; exit 4")],
        cwd=tmp_path,
        env=launcher.clean_environment(),
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 4


def test_the_environment_of_the_job() -> None:
    folder = RunFolder(Path("/runs/a"))
    plain = environment({"PYTHONPATH": "mine"}, folder, Settings(ranks="0"), bootstrap=False)
    assert plain == {
        "PYTHONPATH": "mine",
        "DSPROF": "1",
        "DSPROF_RUN": "/runs/a",
        "DSPROF_LEVEL": "light",
        "DSPROF_RANKS": "0",
        "DSPROF_STEPS": "",
        "DSPROF_DELAY": "",
        "DSPROF_DURATION": "",
        "DSPROF_DEEP": "",
        "DSPROF_LIMIT": "2GiB",
        "DSPROF_SCRATCH": "",
        "DSPROF_EXIT_WAIT": "5",
        "DSPROF_WITHOUT": "",
        "DSPROF_NATIVE": "auto",
        "DSPROF_HANG_TIMEOUT": "600",
    }
    off = Settings(native="off", scratch="fast")
    armed = environment({"PYTHONPATH": "mine"}, folder, off, bootstrap=True)
    assert armed["PYTHONPATH"].split(":")[0].endswith("dsprof/collectors/bootstrap")
    assert armed["PYTHONPATH"].split(":")[1:] == ["mine"]
    assert (armed["DSPROF_NATIVE"], armed["DSPROF_SCRATCH"]) == ("off", os.path.abspath("fast"))


def test_the_agent_is_safe_from_the_working_directory() -> None:
    job = Job(("train.py", "--", "-x"), torchrun_flags=("--standalone",))
    words = job.command(RunFolder(Path("/a")), installed=True)
    assert words[:4] == [PYTHON, "-P", "-m", "dsprof.launch.torchrun"]
    assert words[6:] == ["--", "--standalone", "--", "train.py", "--", "-x"]


def test_a_native_helper_that_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dsprof.collectors.native import build

    def ensure(python: Path, progress: Callable[[str], None]) -> Path:
        raise build.NoHelper("g++ failed: no such thing")

    monkeypatch.setattr(build, "ensure", ensure)
    build_native_helper(Settings(native="auto"), Talk())
    assert capsys.readouterr().err == (
        "[dsprof] warning: no native helper: g++ failed: no such thing; a job on the CPU is recorded in Python, which"
        " is slower, and of one on GPUs only phases and steps\n"
    )
    build_native_helper(Settings(native="off"), Talk())
    with pytest.raises(LaunchError, match="no such thing; --native auto records in Python instead"):
        build_native_helper(Settings(native="on"), Talk())
    assert capsys.readouterr().err == ""


def test_a_closed_stderr_does_not_matter(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", PYTHON, "-c", launcher.PROGRAM, *command("sh", "-c", "exit 6")],
        cwd=tmp_path,
        env=launcher.clean_environment(),
        timeout=60,
    )
    assert done.returncode == 6


def test_dsprof_need_not_be_installed_to_start_ranks() -> None:
    words = Job(("train.py",), torchrun_flags=()).command(RunFolder(Path("/a")), installed=False)
    assert words[1:3] == ["-P", "-c"]
    assert "from dsprof.launch.torchrun import main" in words[3]
