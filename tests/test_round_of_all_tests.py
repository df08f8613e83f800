"""`benchmarks/test_all.py`: a round of all tests goes on over sittings and commits, and says what it is of."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import test_all as rounds

FILES = {
    "tests/conftest.py": "import plans\n",
    "tests/plans.py": "",
    "tests/jobs.py": "",
    "tests/test_a.py": "from jobs import start\n",
    "tests/engine/conftest.py": "",
    "tests/engine/test_b.py": "import torch\n",
    "dsprof/verb.py": "",
    "README.md": "",
    "CHANGELOG.md": "",
}
A, B = "tests/test_a.py", "tests/engine/test_b.py"


@pytest.fixture
def change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Adds a line to a file of a small project, and commits it."""

    def git(*words: str) -> None:
        who = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    def edit(path: str) -> None:
        with open(tmp_path / path, "a") as file:
            file.write("#\n")
        git("commit", "--quiet", "--all", "--message", f"change {path}")
        rounds.changed_since.cache_clear()
        rounds.sources.cache_clear()

    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "begin")
    monkeypatch.setattr(rounds, "ROOT", tmp_path)
    return edit


@pytest.fixture
def sit(change: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """One sitting: which files were run. `fails`: those whose tests fail."""

    def sitting(*words: str, fails: tuple[str, ...] = ()) -> list[str]:
        ran: list[str] = []

        def run(name: str, *, slow: bool) -> dict[str, Any]:
            ran.append(name)
            return {"failed" if name in fails else "passed": 2, "slow_alone": slow, "cpu_s": 1.5, "clock_s": 1.0}

        monkeypatch.setattr(rounds, "run", run)
        monkeypatch.setattr(rounds, "with_slow_tests", lambda: {A})
        rounds.main(["--output", str(tmp_path / "all.json"), *words])
        return ran

    return sitting


def told(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "all.json").read_text())
    return found


def test_a_round_goes_on_when_what_is_tested_has_changed_and_says_so(
    change: Callable[[str], None], sit: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sit("--minutes", "-1") == []
    assert sit(fails=(A,)) == [B, A]
    change("dsprof/verb.py")
    assert sit() == [A]
    one = {"slow_alone": False, "files": 2, "done": 2, "commits": 2}
    assert told(tmp_path)["round"] == {**one, "of_this_state": 1}
    assert told(tmp_path)["totals"] == {
        "passed": 4, "failed": 0, "skipped": 0, "errors": 0, "deselected": 0, "cpu_s": 3.0
    }  # fmt: skip
    change("CHANGELOG.md")
    assert sit() == []
    said = "2 of 2 files are done, of 2 commits; for 1 of them nothing has changed since; failed: none"
    assert capsys.readouterr().out.splitlines()[-1] == said
    assert sit("--again") == [B, A]
    assert told(tmp_path)["round"] == {**one, "commits": 1, "of_this_state": 2}


def test_a_page_of_the_documentation_is_something_that_tests_read(
    change: Callable[[str], None], sit: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Of this state is what has run since the page has changed."""
    assert sit(fails=(A,)) == [B, A]
    change("README.md")
    assert sit() == [A]
    assert told(tmp_path)["round"]["of_this_state"] == 1


@pytest.mark.parametrize(
    ("path", "again"),
    [(A, [A]), ("tests/jobs.py", [A]), ("tests/engine/conftest.py", [B]), ("tests/plans.py", [B, A]),
     ("dsprof/verb.py", [])],
)  # fmt: skip
def test_a_file_runs_again_when_its_tests_have_changed(
    change: Callable[[str], None], sit: Callable[..., list[str]], path: str, again: list[str]
) -> None:
    assert sit() == [B, A]
    change(path)
    assert sit() == again


def test_the_slow_tests_alone_are_not_all(sit: Callable[..., list[str]], tmp_path: Path) -> None:
    assert sit("--slow") == [A]
    assert told(tmp_path)["round"]["files"] == 1
    assert sit("--slow") == []
    assert sit() == [B, A]
    assert sit("--slow") == []


def test_a_commit_that_is_gone_is_no_reason_to_believe_a_result(sit: Callable[..., list[str]], tmp_path: Path) -> None:
    assert sit() == [B, A]
    found = told(tmp_path)
    found["files"][A]["commit"] = "0000000"
    (tmp_path / "all.json").write_text(json.dumps(found))
    assert sit() == [A]


def test_what_is_not_committed_is_refused(sit: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("changed")
    with pytest.raises(SystemExit, match="commit it first"):
        sit()
