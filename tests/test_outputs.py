"""What a job wrote is found, so that a comparison does not write it again without being told to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsprof.launch import outputs
from dsprof.launch.outputs import folders_of, written_between

BEGAN, ENDED = 1_000_000.0, 1_000_100.0


def write(path: Path, at: float = BEGAN + 5) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    os.utime(path, (at, at))
    return path


def found(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in written_between([folder], BEGAN, ENDED))


def test_files_that_were_written_while_it_ran(tmp_path: Path) -> None:
    write(tmp_path / "model" / "weights.bin")
    write(tmp_path / "runs" / "events.out.tfevents.1")
    write(tmp_path / "metrics.csv", ENDED)
    write(tmp_path / "data.bin", BEGAN - 1)
    write(tmp_path / "later.bin", ENDED + 1)
    assert found(tmp_path) == ["metrics.csv", "model/weights.bin", "runs/events.out.tfevents.1"]


def test_what_is_no_output_does_not_count(tmp_path: Path) -> None:
    for name in ("train.py", "nohup.out", "train.log", ".git/index", "__pycache__/a.pyc", ".cache/x.bin"):
        write(tmp_path / name)
    write(tmp_path / "dsprof-out" / "a run" / "run.json")
    write(tmp_path / "dsprof-out" / "a run" / "report.html")
    assert found(tmp_path) == []


def test_a_folder_without_end_is_looked_at_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "MOST_ENTRIES", 3)
    for number in range(5):
        write(tmp_path / f"{number}.bin")
    assert len(found(tmp_path)) == 3


def test_folders_are_those_that_the_command_names(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "data").mkdir()
    words = ["--output_dir=out", "--data", "data", "train.py", "--lr", "0.1", "x" * 5000]
    assert folders_of(words, tmp_path) == [tmp_path, tmp_path / "out", tmp_path / "data"]
