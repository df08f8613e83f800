"""`dsprof runs`: a line a run, whatever state it is in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsprof.cli import main


def make_run(parent: Path, name: str, findings: str | None = None, info: str | None = None, **more: Any) -> Path:
    folder = parent / name
    (folder / "capture").mkdir(parents=True)
    given = {"id": name, "name": name, "command": [], **more}
    (folder / "run.json").write_text(json.dumps(given) if info is None else info)
    if findings is not None:
        (folder / "findings.json").write_text(findings)
    return folder


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    parent = tmp_path / "dsprof-out"
    verdict = json.dumps({"verdict": {"status": "bottleneck", "headline": "rank 1 arrives late"}})
    make_run(parent, "b-20261122T100000Z-aaaaaa", verdict, world_size=2, status=0, ended="2026-11-22T10:05:00Z")
    make_run(parent, "a-20261122T110000Z-bbbbbb", world_size=1, status=137)
    make_run(parent, "c-20261122T120000Z-cccccc", world_size=8)
    make_run(parent, "d-20261122T130000Z-dddddd", info="{")
    return parent


def test_a_line_a_run_the_newest_last(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    first, second, third, fourth = capsys.readouterr().out.splitlines()
    assert first == "dsprof-out/b-20261122T100000Z-aaaaaa   2 ranks  status 0    bottleneck    rank 1 arrives late"
    assert second.split("  ", 1)[1].split() == [
        "1", "rank", "status", "137", "dsprof", "analyze", "dsprof-out/a-20261122T110000Z-bbbbbb",
    ]  # fmt: skip
    assert third == "dsprof-out/c-20261122T120000Z-cccccc   8 ranks  no status"
    assert "unreadable" in fourth


def test_as_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--json", str(runs)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [Path(run["run"]).name[0] for run in found] == ["b", "a", "c", "d"]
    assert {key: found[0][key] for key in ("ranks", "status", "verdict", "headline", "ended")} == {
        "ranks": 2, "status": 0, "verdict": "bottleneck", "headline": "rank 1 arrives late",
        "ended": "2026-11-22T10:05:00Z",
    }  # fmt: skip


def test_no_runs_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path)]) == 3
    assert capsys.readouterr().err.startswith("[dsprof] error: ")
