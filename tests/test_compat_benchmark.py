"""`make compat`: a cell that is there is not run again, and one that cannot be had says why."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import compat


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["compat.py", *words])
    return compat.main()


def test_it_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, ran = tmp_path / "compat.json", []

    def run_cell(cell: compat.Cell, *_: Any) -> dict[str, Any]:
        ran.append(str(cell))
        if cell.torch == "2.12":
            raise compat.Unavailable("no Python 3.12 on this machine; name one with --python 3.12=PATH")
        return {"state": "right" if cell.torch == "2.11" else "wrong", "jobs": {}}

    monkeypatch.setattr(compat, "run_cell", run_cell)
    words = ["--output", str(result), "--cell", "2.11/3.11", "--cell", "2.12/3.12"]
    assert run(monkeypatch, *words) == 0
    cells = json.loads(result.read_text())["cells"]
    assert (cells["2.11/3.11"]["state"], cells["2.11/3.11"]["sources"]) == ("right", compat.sources())
    assert (cells["2.12/3.12"]["state"], cells["2.12/3.12"]["why"]) == (
        "not to be had", "no Python 3.12 on this machine; name one with --python 3.12=PATH"
    )  # fmt: skip
    assert run(monkeypatch, *words) == 0
    assert ran == ["2.11/3.11", "2.12/3.12", "2.12/3.12"]  # what could not be had may be had now
    assert "2.11/3.11: right, as it was (--again runs it anew)" in capsys.readouterr().out
    assert run(monkeypatch, *words, "--cell", "2.15/3.11") == 1
    monkeypatch.setattr(compat, "sources", lambda: "others")
    run(monkeypatch, *words)
    assert ran[-2:] == ["2.11/3.11", "2.12/3.12"]


def test_a_python_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(compat.Unavailable, match=r"no Python 3\.99 on this machine; name one with --python 3\.99=PATH"):
        compat.interpreter("3.99", {})
    assert compat.interpreter("3.99", {"3.99": tmp_path / "python"}) == tmp_path / "python"


def test_a_run_without_captures_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "error.1.txt").write_text("arming: RuntimeError: planted\n")
    wrong, rows = compat.judge("ddp", tmp_path, native=True)
    assert (wrong, rows) == (["error.1.txt: arming: RuntimeError: planted", "0 captures of 2 ranks"], {})
