"""Importing straggler tables: a tiny one written by hand, bad ones, and the real ones where they are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dsprof import cli, trace
from dsprof.analyzer import analyze
from dsprof.analyzer.align.match import match_collectives
from dsprof.importers import import_trace
from dsprof.run import RunError, RunFolder, open_run
from dsprof.schema import COLUMNS
from dsprof.trace import Trace

REAL = Path(os.environ.get("DSPROF_REAL_TRACES", Path(__file__).parents[2] / "shared" / "data" / "traces"))
TABLES = REAL / "straggler_analysis"
MS = 1_000_000

FIRST_STAGE = (
    ("params-all-gather", 0, -1, 0, 10),
    ("forward-compute", 0, 0, 10, 110),
    ("forward-send", 0, -1, 110, 120),
    ("backward-recv", 0, -1, 120, 420),
    ("backward-compute", 0, 0, 420, 620),
    ("gc", 0, -1, 620, 620),
    ("layernorm-grads-all-reduce", 0, -1, 625, 630),
    ("embedding-grads-all-reduce", 0, -1, 630, 640),
    ("grads-reduce-scatter", 0, -1, 650, 700),
    ("optimizer-clip-main-grad", 0, -1, 700, 720),
    ("optimizer", 0, -1, 720, 750),
)
"""optype, seq_id, mb_id, start and end in ms."""
LAST_STAGE = (
    ("params-all-gather", 0, -1, 4, 10),
    ("forward-recv", 0, -1, 10, 120),
    ("forward-compute", 0, 0, 120, 220),
    ("backward-compute", 0, 0, 220, 410),
    ("gc", 0, -1, 410, 410),
    ("backward-send", 0, -1, 410, 420),
    ("layernorm-grads-all-reduce", 0, -1, 425, 430),
    ("embedding-grads-all-reduce", 0, -1, 430, 640),
    ("grads-reduce-scatter", 0, -1, 650, 700),
    ("optimizer-clip-main-grad", 0, -1, 700, 720),
    ("optimizer", 0, -1, 720, 745),
)


def table_of(
    *ranks: tuple[tuple[str, int, int, float, float], ...], steps: tuple[int, ...] = (5, 9), replicas: int = 1
) -> pd.DataFrame:
    """The table of a job whose `ranks`, by stage and then by replica, do the same in every step."""
    rows: list[dict[str, Any]] = []
    for number, operations in enumerate(ranks):
        stage, dp = divmod(number, replicas)
        for step in steps:
            for optype, seq, mb, start, end in operations:
                rows.append(
                    {"dp_rank": dp, "stage": stage, "rank": 4 * number, "step": step, "optype": optype,
                     "start_ts": start / 1e3, "duration": (end - start) / 1e3, "seq_id": seq, "mc": 0, "mb_id": mb,
                     "gmc": stage}
                )  # fmt: skip
    return pd.DataFrame(rows)


def write(table: pd.DataFrame, folder: Path, name: str = "trace-tiny.parquet") -> Path:
    table.to_parquet(folder / name)
    return folder / name


def imported(table: pd.DataFrame, folder: Path) -> Trace:
    return import_trace(write(table, folder))


def of(rows: pd.DataFrame, rank: int, kind: str, *columns: str) -> list[tuple[Any, ...]]:
    chosen = rows[(rows["rank"] == rank) & (rows["kind"] == kind) & (rows["step"] == 5)]
    return list(chosen[list(columns)].astype(object).itertuples(index=False, name=None))


# --- rows -------------------------------------------------------------------------------------------


def test_every_operation_has_its_rows(tmp_path: Path) -> None:
    rows = imported(table_of(FIRST_STAGE, LAST_STAGE), tmp_path).rows
    assert {name: str(dtype) for name, dtype in rows.dtypes.items()} == COLUMNS
    assert of(rows, 0, "step", "start_ns", "dur_ns") == [(0, 750 * MS)]
    assert of(rows, 1, "step", "start_ns", "dur_ns") == [(0, 750 * MS)]  # the step of the job, not of the rank
    assert of(rows, 0, "pipe", "name", "lane", "stage", "microbatch", "start_ns", "dur_ns") == [
        ("F", "main", 0, 0, 10 * MS, 100 * MS),
        ("B", "main", 0, 0, 420 * MS, 200 * MS),
    ]
    assert of(rows, 0, "phase", "name", "start_ns", "dur_ns") == [
        ("clip", 700 * MS, 20 * MS),
        ("optimizer", 720 * MS, 30 * MS),
    ]
    assert of(rows, 0, "pause", "name", "start_ns", "dur_ns") == [("gc", 620 * MS, 0)]
    assert of(rows, 0, "comm", "name", "group", "seq", "purpose") == [
        ("all_gather", "data.stage0", 0, "parameter"),
        ("send", "pipeline.dp0", 0, "pipeline"),
        ("recv", "pipeline.dp0", 0, "pipeline"),
        ("all_reduce", "tensor.stage0.dp0", 0, "gradient"),
        ("all_reduce", "embedding.dp0", 0, "gradient"),
        ("reduce_scatter", "data.stage0", 1, "gradient"),
        ("all_reduce", "world", 0, "norm"),
    ]
    assert set(rows["source"]) == {"imported"}
    comm = rows[rows["kind"] == "comm"]
    assert (comm["issue_ns"] == comm["start_ns"]).all()
    assert (comm["lane"] == "comm." + comm["group"].astype(str)).all()


def test_steps_keep_their_numbers_and_follow_one_another(tmp_path: Path) -> None:
    rows = imported(table_of(FIRST_STAGE, LAST_STAGE), tmp_path).rows
    steps = rows[(rows["kind"] == "step") & (rows["rank"] == 0)]
    assert steps[["step", "start_ns", "dur_ns"]].to_numpy().tolist() == [[5, 0, 750 * MS], [9, 750 * MS, 750 * MS]]
    gathers = rows[(rows["name"] == "all_gather") & (rows["kind"] == "comm") & (rows["rank"] == 1)]
    assert gathers[["step", "start_ns", "seq"]].to_numpy().tolist() == [[5, 4 * MS, 0], [9, 754 * MS, 2]]


def test_messages_are_pairs(tmp_path: Path) -> None:
    done = imported(table_of(FIRST_STAGE, LAST_STAGE), tmp_path)
    messages = match_collectives(done.rows, done.run)
    messages = messages[(messages["name"] == "send_recv") & (messages["step"] == 5)].sort_values("last_ns")
    assert messages[["group", "ranks", "first_ns", "last_ns", "late_rank", "transfer_ns"]].to_numpy().tolist() == [
        ["pipeline.dp0 0>1", 2, 10 * MS, 110 * MS, 0, 10 * MS],
        ["pipeline.dp0 1>0", 2, 120 * MS, 410 * MS, 1, 10 * MS],
    ]
    sends = done.rows[(done.rows["kind"] == "comm") & done.rows["peer"].notna()]
    assert sends["microbatch"].eq(0).all()


def test_computation_waits_for_what_lies_between(tmp_path: Path) -> None:
    rows = imported(table_of(FIRST_STAGE, LAST_STAGE), tmp_path).rows
    assert of(rows, 1, "wait", "name", "purpose", "group", "seq", "start_ns", "dur_ns") == [
        ("all_gather", "parameter", "data.stage1", 0, 4 * MS, 6 * MS),
        ("recv", "pipeline", "pipeline.dp0", 0, 10 * MS, 110 * MS),
        ("send", "pipeline", "pipeline.dp0", 0, 410 * MS, 10 * MS),
        ("all_reduce", "gradient", "tensor.stage1.dp0", 0, 425 * MS, 5 * MS),
        ("all_reduce", "gradient", "embedding.dp0", 0, 430 * MS, 210 * MS),
        ("reduce_scatter", "gradient", "data.stage1", 1, 650 * MS, 50 * MS),
        ("all_reduce", "norm", "world", 0, 700 * MS, 20 * MS),
    ]


def test_of_a_batch_the_wait_is_for_who_came_last(tmp_path: Path) -> None:
    """One send and one receive start and end together; the message that was ready long ago is not waited for."""
    batch = tuple(
        ("forward-send", seq, mb, 120, 420) if name == "forward-send" else (name, seq, mb, start, end)
        for name, seq, mb, start, end in FIRST_STAGE
    )
    rows = imported(table_of(batch, LAST_STAGE), tmp_path).rows
    waits = rows[(rows["rank"] == 0) & (rows["kind"] == "wait") & (rows["step"] == 5) & rows["peer"].notna()]
    assert waits[["name", "peer", "start_ns", "dur_ns"]].to_numpy().tolist() == [["recv", 1, 120 * MS, 300 * MS]]


def test_what_overlaps_computation_is_waited_for_from_its_end(tmp_path: Path) -> None:
    early = tuple(
        (name, seq, mb, 500, 700) if name == "grads-reduce-scatter" else (name, seq, mb, start, end)
        for name, seq, mb, start, end in FIRST_STAGE
    )
    rows = imported(table_of(early, LAST_STAGE), tmp_path).rows
    waits = rows[(rows["rank"] == 0) & (rows["kind"] == "wait") & (rows["step"] == 5)]
    reduce = waits[waits["name"] == "reduce_scatter"]
    assert reduce["start_ns"].tolist()[0] >= 620 * MS
    assert reduce["start_ns"].add(reduce["dur_ns"]).tolist() == [700 * MS]
    ends = waits["start_ns"] + waits["dur_ns"]
    assert (waits["start_ns"].shift(-1).dropna() >= ends[:-1]).all()  # of one lane, they are disjoint


def test_computations_whose_clocks_differ_do_not_overlap(tmp_path: Path) -> None:
    table = table_of(FIRST_STAGE, LAST_STAGE)
    backward = (table["optype"] == "backward-compute") & (table["stage"] == 1)
    table.loc[backward, "start_ts"] -= 0.0001
    done = imported(table, tmp_path)
    assert of(done.rows, 1, "pipe", "name", "start_ns", "dur_ns") == [
        ("F", 120 * MS, 99_900_000), ("B", 219_900_000, 190 * MS),
    ]  # fmt: skip
    assert done.run.facts[0]["warnings"] == []


def test_unrecorded_synchronization_of_replicas(tmp_path: Path) -> None:
    """The last stage's replicas go on together after their last backward, though one was ready 200 ms earlier."""

    def late(by: float, reduced: float) -> tuple[tuple[str, int, int, float, float], ...]:
        return (
            ("forward-compute", 0, 0, 0, 100 + by),
            ("backward-compute", 0, 0, 100 + by, 300 + by),
            ("layernorm-grads-all-reduce", 0, -1, reduced, reduced + 1),
            ("grads-reduce-scatter", 0, -1, 520, 540),
            ("optimizer", 0, -1, 540, 550),
        )

    first = (late(0, 305), late(200, 505))
    done = imported(table_of(*first, late(0, 508), late(200, 509), steps=(5, 6, 7), replicas=2), tmp_path)
    found = done.rows[(done.rows["source"] == "derived") & (done.rows["step"] == 5)]
    assert found[["rank", "group", "seq", "start_ns", "dur_ns"]].to_numpy().tolist() == [
        [2, "data.stage1", 0, 300 * MS, 208 * MS],
        [3, "data.stage1", 0, 500 * MS, 8 * MS],
    ]
    assert [text[:8] for text in done.run.facts[0]["warnings"]] == ["stage 1:"]  # and none of stage 0


# --- the run --------------------------------------------------------------------------------------


def test_a_run_like_any_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(table_of(FIRST_STAGE, LAST_STAGE, steps=tuple(range(12))), tmp_path)
    (tmp_path / "meta-tiny.yaml").write_text("trial_name: tiny\nrun_id: 0\ndp_size: 1\npp_size: 2\ntp_size: 4\n")
    run = tmp_path / "run"
    assert cli.main(["import", str(tmp_path), "-o", str(run)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{run}\n"
    assert said.err.startswith("[dsprof] imported 2 ranks, 12 steps\n[dsprof] verdict: bottleneck")
    assert f"[dsprof] next: dsprof report {run}\n" in said.err
    loaded = trace.load(open_run(run))
    assert (loaded.run.name, loaded.run.world_size, len(loaded.run.ranks)) == ("tiny", 2, 2)
    assert loaded.run.groups["pipeline.dp0"]["ranks"] == [0, 1]
    assert [fact["file_rank"] for fact in loaded.run.facts if fact["fact"] == "place"] == [0, 4]
    pd.testing.assert_frame_equal(loaded.rows, import_trace(source).rows, check_categorical=False)
    assert trace.load(open_run(run)).run == loaded.run  # merging again changes nothing
    analysis = analyze(loaded)
    assert analysis.step_ms is not None
    assert analysis.step_ms.mean == 750
    assert sum(analysis.budget.values()) == pytest.approx(750)
    assert cli.main(["report", str(run)]) == 0
    assert (run / "report.html").exists()


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(table_of(FIRST_STAGE, LAST_STAGE), tmp_path)
    run = RunFolder(tmp_path / "run")
    words = ["import", str(source), "-o", str(run.path)]
    assert cli.main(words) == 0
    assert cli.main(words) == 2
    assert "exists; name another folder with -o, or --force" in capsys.readouterr().err
    write(table_of(FIRST_STAGE), tmp_path)
    (run.path / "report.html").write_text("of the old one")
    assert cli.main([*words, "--force"]) == 0
    assert len(list(run.trace.glob("*.parquet"))) == 1
    assert "of the old one" not in run.report_html.read_text()
    run.capture.mkdir()
    assert cli.main([*words, "--force"]) == 2
    assert "holds a capture, which is never replaced" in capsys.readouterr().err
    assert cli.main(["import", str(source), "-o", str(tmp_path), "--force"]) == 2
    assert "exists and is no run, which is never replaced" in capsys.readouterr().err


def test_the_run_folder_is_named_after_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(table_of(FIRST_STAGE, LAST_STAGE), tmp_path)
    assert cli.main(["import", "trace-tiny.parquet"]) == 0
    assert capsys.readouterr().out.startswith("dsprof-out/tiny-")


def test_a_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    table = table_of(FIRST_STAGE, FIRST_STAGE, LAST_STAGE, LAST_STAGE, replicas=2)
    done = imported(table[(table["stage"] == 0) | (table["dp_rank"] == 0)], tmp_path)
    folder = RunFolder(tmp_path / "run")
    trace.save(folder, done)
    loaded = trace.load(folder)
    assert sorted(loaded.rows["rank"].unique()) == [0, 1, 2]
    assert loaded.run.warnings == ["no capture of rank 3 (3 of 4 captured)"]
    messages = match_collectives(loaded.rows, loaded.run)
    assert set(messages.loc[messages["name"] == "send_recv", "group"]) == {"pipeline.dp0 0>2", "pipeline.dp0 2>0"}


def test_a_step_that_a_rank_lacks_is_named(tmp_path: Path) -> None:
    table = table_of(FIRST_STAGE, LAST_STAGE)
    done = imported(table[(table["stage"] == 0) | (table["step"] == 5)], tmp_path)
    assert done.run.facts[0]["warnings"] == ["ranks without operations in some of the 2 steps: 1 (1)"]
    assert (done.rows.loc[done.rows["rank"] == 1, "step"] == 5).all()


def test_unknown_operations_are_kept(tmp_path: Path) -> None:
    done = imported(table_of((*FIRST_STAGE, ("evaluate", 0, -1, 200, 300)), LAST_STAGE), tmp_path)
    assert of(done.rows, 0, "phase", "name", "lane", "start_ns") == [
        ("evaluate", "imported.evaluate", 200 * MS), ("clip", "main", 700 * MS), ("optimizer", "main", 720 * MS),
    ]  # fmt: skip
    assert done.run.facts[0]["warnings"] == ["unknown operations are kept as they are, and explain nothing: evaluate"]


def test_interleaved_stages_are_not_matched(tmp_path: Path) -> None:
    table = table_of(FIRST_STAGE, LAST_STAGE)
    table["mc"] = 1
    done = imported(table, tmp_path)
    assert done.rows.loc[done.rows["name"] == "send", ["peer", "seq"]].isna().all(axis=None)
    assert "2 model chunks a stage" in done.run.facts[0]["warnings"][0]


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("dp_size: many\n", "meta-tiny.yaml, line 1: dp_size is not a positive number, left out"),
        ("# sizes\n- 4\n", "meta-tiny.yaml, line 2: not `key: value`, left out: - 4"),
    ],
)
def test_sizes_that_cannot_be_read_are_those_of_the_table(tmp_path: Path, text: str, warning: str) -> None:
    (tmp_path / "meta-tiny.yaml").write_text(text)
    done = imported(table_of(FIRST_STAGE, LAST_STAGE), tmp_path)
    assert done.run.world_size == 2
    assert done.run.facts[0]["warnings"] == [warning]


# --- what cannot be imported ------------------------------------------------------------------------


def refused(table: pd.DataFrame, folder: Path) -> str:
    with pytest.raises(RunError) as error:
        imported(table, folder)
    return str(error.value).removeprefix(f"{folder / 'trace-tiny.parquet'}: ")


def test_bad_tables_say_what_where_and_what_instead(tmp_path: Path) -> None:
    good = table_of(FIRST_STAGE, LAST_STAGE)
    assert refused(good.drop(columns=["duration", "mb_id"]), tmp_path) == (
        "no column mb_id, duration; a straggler table has them (mb_id -1: no micro-batch)"
    )
    assert refused(good[:0], tmp_path) == "an empty table; name one with operations"
    place = "the first is row 1 (step=5, stage=0, dp_rank=0, optype=forward-compute, seq_id=0); mend or remove them"
    bad = good.copy()
    bad.loc[1, "duration"] = -0.1
    assert refused(bad, tmp_path) == f"1 rows with a negative duration, {place}"
    bad.loc[1, "duration"] = float("nan")
    assert refused(bad, tmp_path) == f"1 rows whose duration is no number, {place}"
    bad = good.copy()
    bad["start_ts"] = bad["start_ts"].astype(object)
    bad.loc[1, "start_ts"] = None
    assert refused(bad, tmp_path) == f"1 rows whose start_ts is no number, {place}"
    assert refused(pd.concat([good, good[1:3]]), tmp_path).startswith(
        "2 rows that are there twice (dp_rank, stage, step,"
    )
    bad = good.assign(stage=40_000)
    assert refused(bad, tmp_path).startswith(
        "44 rows whose stage is over 32767, the first is row 0 (step=5, stage=40000,"
    )


@pytest.mark.parametrize("verb", [["import"]])
def test_bad_files_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: list[str]) -> None:
    known = "what can be imported is a straggler table (Parquet with dp_rank, stage, step, optype, start_ts,"
    text, empty, folder = tmp_path / "a.txt", tmp_path / "b.parquet", tmp_path / "nothing"
    text.write_text("no table\n")
    empty.touch()
    folder.mkdir()
    for path, expected in (
        (tmp_path / "none", "no such file or folder; name a trace, or the folder that holds one"),
        (text, f"not a trace that dsprof knows; {known}"),
        (empty, f"an empty file; {known}"),
        (folder, f"an empty folder; {known}"),
        (tmp_path, f"none of its 2 files is a trace that dsprof knows; {known}"),
    ):
        assert cli.main([*verb, str(path), "-o", str(tmp_path / "run")]) == 3
        said = capsys.readouterr().err
        assert said.startswith(f"[dsprof] error: {path}: {expected}")
        assert said.count("\n") == 1
    write(table_of(FIRST_STAGE), tmp_path)
    write(table_of(FIRST_STAGE), tmp_path, "trace-other.parquet")
    assert cli.main([*verb, str(tmp_path)]) == 3
    assert "holds 2 traces (trace-other.parquet, trace-tiny.parquet); name one of them" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_table_that_is_cut_off(tmp_path: Path) -> None:
    path = write(table_of(FIRST_STAGE), tmp_path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(RunError, match="not a trace that dsprof knows"):
        import_trace(path)


# --- the real ones ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["AR", "ST"])
def real(request: pytest.FixtureRequest) -> tuple[str, Trace]:
    path = TABLES / f"trace-{request.param}.parquet"
    if not path.exists():
        pytest.skip(f"{path}: not here; DSPROF_REAL_TRACES names the folder of real traces")
    return request.param, import_trace(path)


def test_steps_take_what_the_authors_say(real: tuple[str, Trace]) -> None:
    name, done = real
    expected = json.loads((TABLES / f"result-{name}.json").read_text())["step_t_base"]
    steps = done.rows[done.rows["kind"] == "step"]
    assert {int(step) for step in expected} == set(steps["step"])
    for rank in done.run.ranks:
        mine = steps[steps["rank"] == rank.rank].set_index("step")["dur_ns"] / 1e9
        assert mine.to_dict() == pytest.approx({int(step): each for step, each in expected.items()}, abs=1e-5)


def test_everything_real_is_matched(real: tuple[str, Trace]) -> None:
    name, done = real
    ranks, replicas = {"AR": (16, 4), "ST": (8, 2)}[name]
    assert done.run.world_size == ranks == len(done.run.ranks)
    matched = match_collectives(done.rows, done.run)
    members = matched.groupby(["name", "purpose"])["ranks"].agg(["min", "max"]).apply(tuple, axis=1).to_dict()
    assert members == {
        ("all_gather", "parameter"): (replicas, replicas),
        ("reduce_scatter", "gradient"): (replicas, replicas),
        ("all_reduce", "norm"): (ranks, ranks),
        ("all_reduce", "gradient"): (1, 2),  # of a tensor-parallel group one is here; first and last stage
        ("all_reduce", "other"): (replicas, replicas),  # what the table does not have
        ("send_recv", "pipeline"): (2, 2),
    }
    messages = done.rows[(done.rows["kind"] == "comm") & done.rows["peer"].notna()]
    assert (matched["name"] == "send_recv").sum() == len(messages) / 2
    assert messages["microbatch"].notna().all()
    assert len(done.run.facts[0]["warnings"]) == 1


@pytest.mark.slow
def test_real_runs_can_be_reported(real: tuple[str, Trace], tmp_path: Path) -> None:
    name, done = real
    folder = RunFolder(tmp_path / "run")
    trace.save(folder, done)
    analysis = analyze(trace.load(folder))
    assert analysis.step_ms is not None
    assert analysis.budget["other"] < 0.05 * analysis.step_ms.mean
    codes = [finding.code for finding in analysis.findings]
    if name == "AR":
        assert codes[0] == "rank.straggler"
        assert analysis.findings[0].where.ranks == (0,)
    else:
        assert "pipeline.imbalance" in codes
        assert next(finding for finding in analysis.findings if finding.code == "pipeline.imbalance").where.stage == 3
