"""A forked program finds what one of its own interpreter does."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import forked_python
import pytest
from jobs import environment

SCRIPT = """
import os, sys, tempfile
def typed(x: int) -> None: ...
print(os.umask(0o77), typed.__annotations__, __name__, globals().get("__file__"), sys.argv, sys.path[:2], os.getcwd())
print(os.environ["MINE"], tempfile.gettempdir(), os.getsid(0) == os.getpid(), "torch" in sys.modules or "own")
"""
FORMS = {
    "script": ["train.py", "-u"],
    "code": ["-c", SCRIPT, "x"],
    "module": ["-m", "train", "x"],
    "unbuffered": ["-u", "train.py"],
}


@pytest.mark.parametrize("form", FORMS)
def test_it_finds_what_an_interpreter_has(form: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "tmp").mkdir()
    env = environment(MINE="set", PYTHONPATH=str(tmp_path / "tmp"), TMPDIR=str(tmp_path / "tmp"))
    before = os.umask(0o27)
    try:
        said = [
            forked_python.run(
                [sys.executable, *FORMS[form]],
                env=env,
                cwd=tmp_path,
                capture_output=True,
                start_new_session=True,
                fresh=fresh,
            )
            for fresh in (False, True)
        ]
    finally:
        os.umask(before)
    assert [(one.returncode, one.stderr) for one in said] == [(0, "")] * 2
    forked, own = (one.stdout.splitlines() for one in said)
    assert forked[0] == own[0]
    assert forked[0].startswith(f"{0o27} ")
    assert forked[1].rpartition(" ")[0] == own[1].rpartition(" ")[0]
    assert (forked[1].split()[-1], own[1].split()[-1]) == ("True", "own")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(3)", 3),
        ("1 / 0", 1),
        ("import os; os._exit(4)", 4),
        ("import os; os.kill(os.getpid(), 9)", -9),
    ],
)
def test_its_status_is_its_own(code: str, status: int) -> None:
    done = forked_python.run([sys.executable, "-c", code], env=environment(), capture_output=True)
    assert done.returncode == status


def test_where_it_stands_is_said_where_that_is_asked_for() -> None:
    code = "import time; print(1, flush=True); time.sleep(100)"
    with forked_python.start([sys.executable, "-c", code], env=environment(), stdout=-1, stderr=-1) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "1\n"
        forked_python.ask_for_stacks()
        assert "most recent call first" in process.stderr.readline()
        assert process.stderr.readline() == '  File "<string>", line 1 in <module>\n'
        process.kill()


def test_all_end_at_once() -> None:
    begun = "import time; print(1, flush=True); time.sleep(100)"
    with forked_python.start([sys.executable, "-c", begun], env=environment(), stdout=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        forked_python.end_all()
        assert process.wait(20) == -signal.SIGKILL


def test_the_first_program_leaves_nothing_of_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forked_python.end_all()
    with monkeypatch.context() as changed:
        changed.setenv("PYTHONPATH", str(tmp_path))
        forked_python.run([sys.executable, "-c", "pass"], env=environment(), check=True)
    code = "import sys; print(sys.path)"
    said = forked_python.run([sys.executable, "-c", code], env=environment(), capture_output=True, check=True)
    assert str(tmp_path) not in said.stdout


def test_what_a_file_of_tests_has_set_does_not_keep_programs_from_being_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As dask's workers do in the process that starts them."""
    command = [sys.executable, "train.py"]

    def words() -> list[str] | None:
        return forked_python.program(command, {**os.environ, forked_python.SOCKET: "somewhere"})

    monkeypatch.setitem(forked_python.STARTED_WITH, "PYTHONHASHSEED", "0")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    with forked_python.read_early_as_before():
        os.environ["PYTHONHASHSEED"], os.environ["MALLOC_TRIM_THRESHOLD_"] = "6640", "65536"
        os.environ["NOT_READ_EARLY"] = "kept"
        assert words() is None
    assert words() == ["train.py"]
    assert os.environ.pop("NOT_READ_EARLY") == "kept"
