"""What `dsprof import` takes: several files, patterns, folders, archives, also hostile ones; and what it ends with."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import shutil
import tarfile
from collections import namedtuple
from pathlib import Path

import kineto_traces as kt
import pandas as pd
import pytest
from damage import damaged

from dsprof import cli
from dsprof.importers import archive, import_trace
from dsprof.run import RunError
from dsprof.settings import SettingsError, load

MiB = 1 << 20


def ranks_in(folder: Path, names: str = "rank{}.json", count: int = 2) -> list[Path]:
    return [
        kt.write(folder / Path(names.format(rank)).parent, kt.as_kineto(kt.training()), Path(names.format(rank)).name)
        for rank in range(count)
    ]


def refusal(*paths: Path) -> str:
    with pytest.raises(RunError) as error:
        import_trace(list(paths))
    assert "\n" not in str(error.value)
    return str(error.value)


# --- files, patterns, folders -------------------------------------------------------------------


def test_several_files_are_ranks_of_one_job(tmp_path: Path) -> None:
    first, second = ranks_in(tmp_path)
    expected = import_trace(tmp_path).rows
    found = import_trace([second, first, first])
    pd.testing.assert_frame_equal(found.rows, expected)
    assert found.run.command == ["dsprof", "import", str(second), str(first), str(first)]
    assert found.run.name == import_trace(tmp_path).run.name


def test_a_pattern_that_the_shell_did_not_expand(tmp_path: Path) -> None:
    ranks_in(tmp_path / "job" / "steps", count=3)
    (tmp_path / "job" / "steps" / "rank9.txt").write_text("notes")
    assert import_trace(tmp_path / "job" / "*" / "rank[0-1].json").ranks == (0, 1)
    assert import_trace(tmp_path / "**" / "rank*").ranks == (0, 1, 2)
    assert "no file or folder fits this pattern" in refusal(tmp_path / "*.gz")


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    path = kt.write(tmp_path, kt.as_kineto(kt.training()), "trace[1]*.json")
    assert import_trace(path).ranks == (0,)


def test_a_folder_for_each_rank(tmp_path: Path) -> None:
    ranks_in(tmp_path, "rank_{}/trace.json", 3)
    assert import_trace(tmp_path).ranks == (0, 1, 2)
    assert import_trace([tmp_path / "rank_2", tmp_path / "rank_1"]).ranks == (1, 2)


def test_what_is_named_must_be_a_trace(tmp_path: Path) -> None:
    first, _ = ranks_in(tmp_path)
    notes = tmp_path / "notes.txt"
    notes.write_text("hello")
    assert f"{notes}: not a trace that dsprof knows; what can be imported is" in refusal(first, notes)
    assert "no such file or folder; name a trace" in refusal(first, tmp_path / "rank7.json")
    assert import_trace(tmp_path).ranks == (0, 1)  # in a folder it does not matter
    snapshot = tmp_path / "s.pickle"
    snapshot.write_bytes(b"\x80\x04segments")
    trace = import_trace([first, snapshot])
    assert any("left out: " in text and "s.pickle" in text for text in trace.run.facts[0]["warnings"])


def test_a_pipe_is_no_trace(tmp_path: Path) -> None:
    """Reading it would wait for ever, and reading it twice is not possible."""
    os.mkfifo(tmp_path / "rank0.json")
    assert "rank0.json: is no regular file; write the trace into one" in refusal(tmp_path / "rank0.json")
    ranks_in(tmp_path / "below")
    assert import_trace(tmp_path).ranks == (0, 1)


def test_no_place_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    assert "no folder for temporary files can be made (No such file or directory); set TMPDIR" in refusal(tmp_path)


# --- archives -----------------------------------------------------------------------------------


def packed(path: Path, mode: str, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def member(name: str, data: bytes = b"", **about: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    for key, value in about.items():
        setattr(info, key, value)
    return info, data


TRACE = kt.as_kineto(kt.training()).encode()


@pytest.mark.parametrize(("name", "mode"), [("job.tar", "w"), ("job.tar.gz", "w:gz"), ("job.tgz", "w:gz")])
def test_an_archive_of_ranks(tmp_path: Path, name: str, mode: str) -> None:
    members = member("job/rank_0/trace.json", TRACE), member("job/rank_1/trace.json.gz", gzip.compress(TRACE))
    path = packed(tmp_path / name, mode, *members, member("job/notes.txt", b"hello"))
    ranks_in(tmp_path / "plain")
    found = import_trace(path)
    pd.testing.assert_frame_equal(found.rows, import_trace(tmp_path / "plain").rows)
    assert found.run.name == "job"
    assert found.run.facts[0]["file"] == "trace.json"
    assert import_trace(tmp_path / "plain" / ".." / name).ranks == (0, 1)


def test_a_folder_may_hold_archives(tmp_path: Path) -> None:
    for rank in range(2):
        packed(tmp_path / f"part{rank}.tar", "w", member(f"rank{rank}.json", TRACE))
    assert import_trace(tmp_path).ranks == (0, 1)


def test_nothing_in_an_archive_gets_out_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that lead elsewhere are plain names; links and devices are left out and told."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "room"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "room").mkdir()
    secret = tmp_path / "secret.json"
    secret.write_bytes(TRACE)
    path = packed(
        tmp_path / "bad.tar", "w",
        member(str(tmp_path / "written" / "rank0.json"), TRACE), member("../../../rank1.json", TRACE),
        member("rank2.json", type=tarfile.SYMTYPE, linkname=str(secret)),
        member("dir", type=tarfile.SYMTYPE, linkname="/"),
        member("dir/rank3.json", TRACE), member("rank4.json", type=tarfile.LNKTYPE, linkname=str(secret)),
        member("rank5.json", type=tarfile.FIFOTYPE), member("rank6.json", type=tarfile.CHRTYPE),
        member("..\\rank7.json", TRACE), member("", b"x"), member("/", b"x"),
    )  # fmt: skip
    before = sorted(tmp_path.rglob("*"))
    found = import_trace(path)
    assert found.ranks == (0, 1, 3, 7)
    (note,) = [
        text for fact in found.run.facts if fact["fact"] == "import" for text in fact["warnings"] if "bad" in text
    ]
    assert note == "bad.tar: 5 of its entries are links or no files, left out (rank2.json, dir, rank4.json)"
    del found
    assert sorted(tmp_path.rglob("*")) == before


def test_an_archive_that_becomes_too_large_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "RATIO_FROM", 1 * MiB)
    path = packed(tmp_path / "bomb.tgz", "w:gz", member("rank0.json", b'{"traceEvents": [' + b" " * (40 * MiB)))
    assert "bomb.tgz: becomes more than 200 times as large as it is" in refusal(path)


def test_an_archive_that_the_disk_has_no_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100 * MiB, 30 * MiB, 70 * MiB))
    path = packed(tmp_path / "job.tar", "w", member("rank0.json", TRACE + b" " * (8 * MiB)))
    assert "to unpack it takes 8 MiB more" in refusal(path)
    assert "set TMPDIR to a larger disk" in refusal(path)


def test_a_header_that_claims_gigabytes_is_not_held(tmp_path: Path) -> None:
    about = tarfile.TarInfo("x")
    about.pax_headers = {"comment": "x" * (8 * MiB)}
    data = about.tobuf(tarfile.PAX_FORMAT) + bytes(2 * tarfile.BLOCKSIZE)
    path = tmp_path / "headers.tar"
    path.write_bytes(data)
    assert "the description of a file in it is too large" in refusal(path)


def test_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MOST_FILES", 3)
    path = packed(tmp_path / "many.tar", "w", *(member(f"{number}.txt", b"x") for number in range(4)))
    assert "holds more than 3 files; pack the traces alone" in refusal(path)


@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_an_archive_that_breaks_off(tmp_path: Path, kept: float) -> None:
    path = packed(tmp_path / "job.tar", "w", member("rank0.json", TRACE), member("rank1.json", TRACE * 3))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    if kept < 0.5:
        found = import_trace(path)
        assert found.ranks == (0,)
        assert "job.tar breaks off or is damaged" in str(found.run.facts)
    else:
        assert import_trace(path).ranks[0] == 0


@pytest.mark.parametrize("seed", range(4))
def test_damaged_archives_end_in_one_message_or_in_a_run(tmp_path: Path, seed: int) -> None:
    """Thirty a seed, half of them gzipped."""
    chance = random.Random(seed)
    link = member("link.json", type=tarfile.SYMTYPE, linkname="/etc/passwd")
    mode = "w:gz" if seed % 2 else "w"
    whole = packed(tmp_path / "whole.tar", mode, member("a/rank0.json", TRACE), link, member("a/rank1.json", TRACE))
    data = whole.read_bytes()
    room = tmp_path / "room"
    room.mkdir()
    said = []
    for _ in range(30):
        path = room / "job.tar"
        path.write_bytes(damaged(chance, data))
        try:
            import_trace(path)
        except RunError as error:
            said.append(str(error))
    assert not [text for text in said if "\n" in text or len(text) > 900]
    assert [one.name for one in room.iterdir()] == ["job.tar"]


def test_what_is_no_archive(tmp_path: Path) -> None:
    path = tmp_path / "job.tar"
    path.write_bytes(b"hello" * 1000)
    assert "no tar archive that can be read" in refusal(path)
    empty = packed(tmp_path / "empty.tar", "w", member("notes.txt", b"hello"))
    assert "empty.tar: holds no trace that dsprof knows; what can be imported is" in refusal(empty)


# --- the command --------------------------------------------------------------------------------


def test_it_ends_with_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = kt.two_ranks(tmp_path / "traces").iterdir()
    run = tmp_path / "run"
    assert cli.main(["import", str(first), str(second), "-o", str(run), "--no-report"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{run}\n"
    assert "imported 2 ranks, 1 step" in said.err
    assert "verdict: bottleneck" in said.err
    assert "next: dsprof report" in said.err
    assert json.loads((run / "findings.json").read_bytes())["verdict"]["status"] == "bottleneck"
    assert not (run / "report.html").exists()
    assert cli.main(["import", str(first), str(second), "-o", str(run), "--force", "-q", "--no-report"]) == 0
    assert "verdict" not in capsys.readouterr().err


OWN = [kt.note("ProfilerStep#1", 0, 100), kt.call(1, 5), kt.kernel("mine::ring_exchange", 1, 10, 20)]


@pytest.mark.parametrize("how", ["flag", "variable", "pyproject"])
def test_patterns_come_from_the_flag_the_environment_and_pyproject(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    trace, run = kt.write(tmp_path / "traces", kt.as_kineto(OWN)), tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    words = ["import", str(trace), "-o", str(run), "--no-report"]
    if how == "flag":
        words += ["--comm-kernels", "all_gather:mine::ring_"]
    elif how == "variable":
        monkeypatch.setenv("DSPROF_COMM_KERNELS", "other\nall_gather:mine::ring_")
    else:
        (tmp_path / "pyproject.toml").write_text('[tool.dsprof]\ncomm_kernels = ["other", "all_gather:mine::ring_"]\n')
    assert cli.main(words) == 0
    capsys.readouterr()
    rows = pd.read_parquet(run / "trace" / "rank00000.parquet")
    assert rows.loc[rows["kind"] == "comm", "name"].tolist() == ["all_gather"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('comm_kernels = "("', "comm_kernels: '(' is no regular expression"),
        ('comm_kernels = ["ok", ".*"]', "comm_kernels: '.*' fits every kernel; write part of the name"),
        ("comm_kernels = [1]", "comm_kernels: [1] is not a string"),
    ],
)
def test_wrong_patterns_in_pyproject_are_told(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.dsprof]\n{text}\n")
    with pytest.raises(SettingsError) as error:
        load({}, {}, tmp_path)
    assert why in str(error.value)


def test_the_windows_of_a_rank_in_folders_of_their_own_are_one_trace(tmp_path: Path) -> None:
    """As torchtitan and Megatron write them: profile_trace/iteration_10/rank0_trace.json."""
    for window in (10, 20):
        for rank in (0, 1):
            events = [
                {**event, "ts": event["ts"] + 1e6 * window, "name": event["name"].replace("Step#", f"Step#{window}")}
                for event in kt.training(steps=3)
            ]
            kt.write(tmp_path / f"iteration_{window}", kt.as_kineto(events), f"rank{rank}_trace.json")
    trace = import_trace(tmp_path)
    assert trace.ranks == (0, 1)
    steps = trace.read(1).query("kind == 'step'")["step"].tolist()
    assert len(steps) == 6
    assert steps == sorted(steps)
    assert len(trace.read(0)) == 2 * len(import_trace(tmp_path / "iteration_10").read(0))
