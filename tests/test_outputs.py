"""What a job wrote is found, so that a comparison does not write it again without being told to."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dsprof.cli.trials import refuse_to_save
from dsprof.launch import LaunchError, outputs
from dsprof.launch.outputs import places_of, printed_to, written_between
from dsprof.run import RunFolder, RunInfo

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


def test_what_the_job_printed_is_told_from_what_it_wrote(tmp_path: Path) -> None:
    printed = write(tmp_path / "out" / "today.txt")
    for name in ("metrics.txt", "train.log", "logs/0/stdout.log"):
        write(tmp_path / name)
    told = written_between([tmp_path], BEGAN, ENDED, [str(printed)])
    assert sorted(path.name for path in told) == ["metrics.txt", "train.log"]
    assert written_between([tmp_path], BEGAN, ENDED, None) == []


def test_where_what_is_printed_goes(tmp_path: Path) -> None:
    """To a file, which has a name, to nobody, or to a process that may write it anywhere."""
    pipe = os.pipe()
    with open(tmp_path / "printed.txt", "w") as file, open(os.devnull, "w") as nowhere:
        assert printed_to((file.fileno(), nowhere.fileno())) == [str(tmp_path / "printed.txt")]
        assert printed_to((nowhere.fileno(), nowhere.fileno())) == []
        assert printed_to((file.fileno(), pipe[1])) is None
    for end in pipe:
        os.close(end)


def test_a_folder_without_end_is_looked_at_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "MOST_ENTRIES", 3)
    for number in range(5):
        write(tmp_path / f"{number}.bin")
    assert len(found(tmp_path)) == 3


def test_folders_are_those_that_the_command_names(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "data").mkdir()
    words = ["--output_dir=out", "--data", "data", "train.py", "--lr", "0.1", "x" * 5000]
    assert places_of(words, tmp_path) == [tmp_path, tmp_path / "out", tmp_path / "data"]


def test_files_and_settings_that_the_command_names_are_places_too(tmp_path: Path) -> None:
    elsewhere, cwd = tmp_path / "elsewhere", tmp_path / "cwd"
    weights = write(elsewhere / "weights.pt")
    write(elsewhere / "beside.pt")
    (cwd / "runs").mkdir(parents=True)
    places = places_of(["train.py", "--save", str(weights), "hydra.run.dir=runs"], cwd)
    assert places == [cwd, weights, cwd / "runs"]
    assert written_between(places, BEGAN, ENDED) == [weights]


def test_a_linked_folder_is_one_of_the_jobs_and_a_link_to_itself_does_no_harm(tmp_path: Path) -> None:
    write(tmp_path / "large disk" / "weights.bin")
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    (cwd / "out").symlink_to(tmp_path / "large disk")
    (cwd / "again").symlink_to(cwd)
    (cwd / "loop").symlink_to(cwd / "loop")
    assert found(cwd) == ["out/weights.bin"]


def test_what_is_temporary_or_a_cache_may_be_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    for folder in ("tmp", "cache", "hf_cache", "torchinductor_root", "tmpa1b2_9xy", "compiled", "tagged"):
        write(tmp_path / folder / "below" / "x.bin")
    write(tmp_path / "tagged" / "CACHEDIR.TAG")
    write(tmp_path / "cached" / "weights.bin")
    assert found(tmp_path) == ["cached/weights.bin"]
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a job that runs in there writes what it writes
    assert found(tmp_path) == ["cached/weights.bin"]


def test_a_run_file_of_the_users_hides_nothing(tmp_path: Path) -> None:
    write(tmp_path / "run.json", BEGAN - 1)
    write(tmp_path / "weights.bin")
    assert found(tmp_path) == ["weights.bin"]


@pytest.mark.parametrize("content", ["[]", "null", '{"printed": 3}', "{"])
def test_a_run_that_does_not_say_where_the_job_printed(tmp_path: Path, content: str) -> None:
    """Texts are passed over, whatever became of the file that says it."""
    folder = RunFolder(tmp_path)
    folder.rerun_json.write_text(content)
    began, ended = (datetime.fromtimestamp(at, UTC).isoformat() for at in (BEGAN, ENDED))
    write(tmp_path / "job" / "train.log")
    write(tmp_path / "job" / "model.pt")
    folder.write_info(RunInfo("id", "run", ["train.py"], str(tmp_path / "job"), began, ended))
    with pytest.raises(LaunchError, match=r"wrote files \(\S+model\.pt\)"):
        refuse_to_save(folder, yes=False)
