"""Captures become the trace: merging, what is derived, and what damaged captures cost."""

from __future__ import annotations

import json
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from records import capture_of
from synthetic import MS, Job, write_capture

from dsprof import ondisk, schema
from dsprof.analyzer import analyze
from dsprof.run import RankExit, RunError, RunFolder, open_run
from dsprof.trace import load, merge
from dsprof.trace.capture import Capture, read_capture
from dsprof.trace.derive import trace_rows
from dsprof.trace.load import concat_arrays, drain_columns


def run_of(job: Job, path: Path) -> RunFolder:
    for capture in job.captures().values():
        write_capture(capture, path / "capture")
    return RunFolder(path)


def phases(*rows: tuple[str, float, float]) -> Capture:
    """A rank that was in these phases, from and to in ms."""
    return capture_of(*((schema.Kind.PHASE, name, start, end, {}) for name, start, end in rows))


def steps_of(rows: pd.DataFrame) -> list[tuple[float, float]]:
    steps = rows[rows["kind"] == "step"]
    return [(row.start_ns / MS, (row.start_ns + row.dur_ns) / MS) for row in steps.itertuples()]


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    (original,) = Job(ranks=1, steps=3).captures().values()
    read = read_capture(write_capture(original, tmp_path))
    assert read.records.tobytes() == original.records.tobytes()
    assert (read.names, read.damaged, read.problems) == (original.names, 0, [])


def test_a_capture_of_several_chunks(tmp_path: Path) -> None:
    (original,) = Job(ranks=1, steps=3000).captures().values()
    assert len(original.records) > ondisk.CHUNK_RECORDS
    assert len(read_capture(write_capture(original, tmp_path)).records) == len(original.records)


def test_a_lost_chunk_is_told(tmp_path: Path) -> None:
    (original,) = Job(ranks=1, steps=6000).captures().values()
    original.records = original.records[: 5 * ondisk.CHUNK_RECORDS // 2]
    folder = write_capture(original, tmp_path / "capture")
    assert len(list(folder.glob("chunk-*.bin"))) == 3
    (folder / "chunk-00001.bin").unlink()
    read = read_capture(folder)
    assert len(read.records) == len(original.records) - ondisk.CHUNK_RECORDS
    lost = (
        "chunk-00001.bin: missing, and its records with it: something else removed it; keep cleaners of temporary "
        "files away from the run folder and from where captures are written (--scratch DIR)"
    )
    assert read.problems == [lost]
    assert f"rank 0: {lost}" in merge(RunFolder(tmp_path)).warnings


def test_a_chunk_that_is_a_copy_of_another_does_not_count_twice(tmp_path: Path) -> None:
    (original,) = Job(ranks=1, steps=3000).captures().values()
    folder = write_capture(original, tmp_path)
    (folder / "chunk-00001.bin").write_bytes((folder / "chunk-00000.bin").read_bytes())
    read = read_capture(folder)
    assert len(read.records) == ondisk.CHUNK_RECORDS
    assert read.problems == ["chunk-00001.bin: its header says that it is chunk-00000.bin"]


def test_the_captures_of_a_run_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert list(folder.captures()) == []
    for name in ("rank00003.1.node.a.77", "rank00000.0.node.a.5", "rank7", "elsewhere"):
        (folder.capture / name).mkdir(parents=True)
    (folder.capture / "rank00001.0.node.a.6").write_text("no folder")
    assert [one.name for one in folder.captures()] == [(0, 0, "node.a", 5), (3, 1, "node.a", 77)]
    assert [one.path.name for one in folder.captures()] == ["rank00000.0.node.a.5", "rank00003.1.node.a.77"]
    assert folder.rank_of("node.a", 77) == (3, 1)
    assert folder.rank_of("node.a", 6) is None


def test_a_host_name_with_dots_is_kept_whole(tmp_path: Path) -> None:
    (capture,) = Job(ranks=1, steps=2).captures().values()
    capture.path = Path("rank00000.0.node7.cluster.example.41")
    write_capture(capture, tmp_path / "capture")
    (info,) = merge(RunFolder(tmp_path)).ranks
    assert (info.host, info.pid) == ("node7.cluster.example", 41)


def test_what_a_newer_dsprof_wrote_into_run_json_is_skipped(tmp_path: Path) -> None:
    folder = run_of(Job(), tmp_path)
    folder.write_info(replace(merge(folder), exits=[RankExit(0, "host", 100, 0, None, None)]))
    content = json.loads(folder.run_json.read_text())
    for item in (content, content["ranks"][0], content["exits"][0]):
        item["later"] = 1
    folder.run_json.write_text(json.dumps(content))
    info = folder.read_info()
    assert [item.rank for item in info.ranks] == [0, 1]
    assert [item.pid for item in info.exits] == [100]
    folder.run_json.write_text('{"id": "a", "ranks": [7]}')
    with pytest.raises(RunError, match=r"run\.json: cannot be read"):
        folder.read_info()


def test_merging_again_changes_nothing(tmp_path: Path) -> None:
    folder = run_of(Job(), tmp_path)
    first = merge(folder)
    files = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.is_file()}
    assert merge(folder) == first
    assert {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.is_file()
    } == files


def test_what_was_stored_through_a_mapping_is_merged(tmp_path: Path) -> None:
    """Which changes neither the size nor, on tmpfs, the time of a file."""
    folder = run_of(Job(), tmp_path)
    before = len(load(folder).rows)
    chunk = next(folder.capture.glob("*/chunk-00000.bin"))
    status = chunk.stat()
    content = bytearray(chunk.read_bytes())
    last = ondisk.CHUNK_HEADER_BYTES + ondisk.RECORD_BYTES * (ondisk.CHUNK_RECORDS - 1)
    content[last:] = content[ondisk.CHUNK_HEADER_BYTES : ondisk.CHUNK_HEADER_BYTES + ondisk.RECORD_BYTES]
    chunk.write_bytes(content)
    os.utime(chunk, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert len(load(folder).rows) != before


def test_the_table_has_the_columns_of_the_schema(tmp_path: Path) -> None:
    rows = load(run_of(Job(), tmp_path)).rows
    assert {name: str(dtype) for name, dtype in rows.dtypes.items()} == schema.COLUMNS
    assert (rows.loc[rows["kind"] == "comm", "lane"] == "comm.0").all()


def test_a_step_ends_with_its_optimizer() -> None:
    rows = trace_rows(
        phases(
            ("data", 10, 12), ("forward", 12, 20), ("backward", 25, 40), ("optimizer", 42, 50),
            ("data", 51, 52), ("forward", 52, 60), ("backward", 60, 80), ("optimizer", 80, 85), ("optimizer", 85, 90),
        ),
        0, 0,
    )  # fmt: skip
    assert steps_of(rows) == [(10, 50), (50, 90)]
    derived = rows[(rows["kind"] == "phase") & (rows["source"] == "derived")]
    found = [
        (row.name_, row.start_ns / MS, row.dur_ns / MS)
        for row in derived.rename(columns={"name": "name_"}).itertuples()
    ]
    assert found == [("loss", 20, 5), ("clip", 40, 2)]


def test_micro_batches_belong_to_one_step() -> None:
    micro = [("forward", 0, 5), ("backward", 5, 10)]
    rows = trace_rows(phases(*micro, ("forward", 10, 15), ("backward", 15, 20), ("optimizer", 20, 22)), 0, 0)
    assert steps_of(rows) == [(0, 22)]


def test_without_a_dataloader_the_gap_before_forward_is_not_called_data() -> None:
    turn = [("forward", 0, 10), ("backward", 10, 30), ("optimizer", 30, 35)]
    later = [(name, a + 100, b + 100) for name, a, b in turn]
    rows = trace_rows(phases(*turn, *later), 0, 0)
    between = rows[rows["name"] == "between"]
    assert [(row.start_ns / MS, row.dur_ns / MS, row.source) for row in between.itertuples()] == [(35, 65, "derived")]
    assert not (rows["name"] == "data").any()


def test_ddp_waits_from_its_last_issue_to_its_last_completion() -> None:
    job = Job(steps=1, jitter=0, buckets=(10 << 20,), latency_ms=0, ms_per_mib=1)
    rows = trace_rows(job.captures()[0], 0, 0)
    (wait,) = rows[rows["kind"] == "wait"].itertuples()
    comm = rows[rows["kind"] == "comm"].iloc[0]
    assert (wait.start_ns, wait.dur_ns, wait.source) == (comm["issue_ns"], 10 * MS, "derived")
    assert comm["purpose"] == "gradient"


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "overwritten", "no names", "no meta", "noise"])
def test_one_damaged_rank_costs_only_itself(damage: str, tmp_path: Path) -> None:
    folder = run_of(Job(ranks=3), tmp_path)
    victim = next(folder.capture.glob("rank00002.*"))
    chunk = victim / "chunk-00000.bin"
    content = chunk.read_bytes()
    if damage == "missing":
        for path in victim.iterdir():
            path.unlink()
        victim.rmdir()
    elif damage == "empty":
        chunk.write_bytes(b"")
    elif damage == "truncated":
        chunk.write_bytes(content[: ondisk.CHUNK_HEADER_BYTES + 100 * ondisk.RECORD_BYTES + 7])
    elif damage == "overwritten":
        chunk.write_bytes(random.Random(0).randbytes(len(content)))
    elif damage == "no names":
        (victim / "names.txt").unlink()
    elif damage == "no meta":
        (victim / "meta.json").write_text('{"rank": 2,')
    else:
        body = bytearray(content)
        body[ondisk.CHUNK_HEADER_BYTES :: 97] = random.Random(0).randbytes(len(body[ondisk.CHUNK_HEADER_BYTES :: 97]))
        chunk.write_bytes(body)
    trace = load(folder)
    assert set(trace.rows["rank"]) >= {0, 1}
    assert any("rank 2" in warning or "rank 2 " in warning for warning in trace.run.warnings), trace.run.warnings
    analysis = analyze(trace)
    assert analysis.ranks_expected == 3
    if damage in ("missing", "empty", "overwritten", "no names"):
        assert analysis.step_count == 40


def test_a_torn_record_is_left_out_and_counted(tmp_path: Path) -> None:
    (original,) = Job(ranks=1, steps=3).captures().values()
    original.records["end_ns"][4] = original.records["start_ns"][4] - 1
    original.records["kind"][5] = 99
    read = read_capture(write_capture(original, tmp_path))
    assert (len(read.records), read.damaged) == (len(original.records) - 2, 2)


def test_what_never_ended_is_kept_as_evidence(tmp_path: Path) -> None:
    (capture,) = Job(ranks=1, steps=3).captures().values()
    capture.records["end_ns"][-3] = 0
    capture.records["state"][-3] = ondisk.State.BEGUN
    rows = trace_rows(capture, 0, 0)
    unended = rows[~rows["ended"].astype(bool)]
    assert len(unended) == 1
    assert unended["dur_ns"].isna().all()


def test_the_longer_of_two_captures_of_a_rank_is_used(tmp_path: Path) -> None:
    folder = run_of(Job(ranks=1), tmp_path)
    (short,) = Job(ranks=1, steps=2).captures().values()
    short.path = Path("rank00000.0.host.999")
    write_capture(short, folder.capture)
    info = merge(folder)
    assert [(item.pid, item.last_step) for item in info.ranks] == [(100, 39)]
    assert info.warnings == [
        "rank 0: 2 processes captured as this rank (100 on host, 999 on host); "
        "the longest capture, of 100 on host, is used"
    ]


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run folder"):
        open_run(tmp_path)
    with pytest.raises(RunError, match="no such run folder"):
        open_run(tmp_path / "nowhere")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunError, match=r"run\.json: cannot be read"):
        merge(open_run(tmp_path))


def test_a_run_that_cannot_be_written_is_still_analyzed(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    folder = run_of(Job(), tmp_path)
    folder.path.chmod(0o500)
    try:
        assert analyze(load(folder)).step_count == 40
    finally:
        folder.path.chmod(0o700)


def test_an_interrupted_merge_goes_on_from_the_ranks_that_are_done(tmp_path: Path) -> None:
    folder = run_of(Job(ranks=4), tmp_path / "run")

    def interrupt(what: str, done: int, of: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(folder, observer=interrupt)
    left = [path for path in folder.path.rglob("*") if path.is_file() and folder.capture not in path.parents]
    assert sorted(path.name for path in left) == ["rank00000.parquet", "rank00001.parquet"]
    first = folder.trace / "rank00000.parquet"
    before = first.read_bytes(), first.stat().st_mtime_ns
    assert load(folder).ranks == (0, 1, 2, 3)
    assert (first.read_bytes(), first.stat().st_mtime_ns) == before


def test_an_executor_merges_as_this_process_does(tmp_path: Path) -> None:
    alone, together = (run_of(Job(ranks=4), tmp_path / name / "run") for name in ("alone", "together"))
    for folder in (alone, together):
        next(folder.capture.glob("rank00003.*/chunk-00000.bin")).write_bytes(b"torn")
    one = load(alone)
    with ThreadPoolExecutor(2) as pool:
        other = load(together, pool)
    assert any("rank 3" in text for text in one.run.warnings)
    assert one.run == other.run
    assert one.ranks == other.ranks
    for rank in one.ranks:
        pd.testing.assert_frame_equal(one.read(rank), other.read(rank), check_exact=True)


def test_run_json_says_who_was_captured(tmp_path: Path) -> None:
    folder = run_of(Job(), tmp_path)
    merge(folder)
    content = json.loads(folder.run_json.read_text())
    assert [item["rank"] for item in content["ranks"]] == [0, 1]
    assert content["world_size"] == 2


def test_a_trace_without_its_captures_stands_by_itself(tmp_path: Path) -> None:
    folder = run_of(Job(), tmp_path)
    before = merge(folder)
    shutil.rmtree(folder.capture)
    assert merge(folder) == before
    assert analyze(load(folder)).step_count == 40


def test_a_corrupt_trace_is_made_again_from_the_capture(tmp_path: Path) -> None:
    folder = run_of(Job(), tmp_path)
    merge(folder)
    parquet = folder.trace / "rank00001.parquet"
    content = bytearray(parquet.read_bytes())
    content[100:4000] = bytes(3900)
    parquet.write_bytes(content)
    assert analyze(load(folder)).step_count == 40
    parquet.write_bytes(b"")
    assert analyze(load(folder)).step_count == 40


def test_a_corrupt_trace_whose_capture_is_gone_is_told_in_words(tmp_path: Path) -> None:
    folder = run_of(Job(), tmp_path)
    merge(folder)
    shutil.rmtree(folder.capture)
    (folder.trace / "rank00001.parquet").write_bytes(b"PAR1 and no more")
    assert [one for one in load(folder).run.warnings if "could not be merged" in one] == [
        "rank 1: its capture could not be merged (trace/rank00001.parquet is damaged, or not dsprof's, and the capture "
        "it was made of is gone)"
    ]


def test_a_trace_that_cannot_be_written_is_analyzed_all_the_same(tmp_path: Path) -> None:
    folder = run_of(Job(), tmp_path)
    folder.trace.write_text("a file where the folder should be")
    trace = load(folder)
    assert analyze(trace).step_count == 40
    assert any("not written" in warning for warning in trace.run.warnings)


def test_a_column_without_a_value_of_thousands_of_ranks_takes_no_room() -> None:
    def part(count: int) -> dict[str, Any]:
        return {"bytes": pd.array([None] * count, "Int64"), "dur_ns": pd.array([1] * count, "Int64")}

    columns = drain_columns([part(3), part(2)])
    assert columns["bytes"].dtype == "Int64"
    assert columns["bytes"].isna().tolist() == [True] * 5
    assert columns["dur_ns"].tolist() == [1] * 5
    assert columns["bytes"].to_numpy(float, na_value=np.nan).strides != (0,)  # a copy is like any other
    table = pd.DataFrame(columns, copy=False)
    assert table["bytes"].fillna(7).tolist() == [7] * 5
    assert table.sort_values("bytes")["dur_ns"].sum() == 5
    assert concat_arrays([part(3), part(2)]).assign(bytes=1)["bytes"].tolist() == [1] * 5
