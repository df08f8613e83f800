"""What several tools recorded of one job comes into one trace: by (group, number), with the clocks fitted."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import kineto_traces as kt
import numpy as np
import pandas as pd
import pytest
from synthetic import Job
from test_import_snapshot import tiny

from dsprof import cli
from dsprof.analyzer import analyze
from dsprof.importers import import_trace
from dsprof.importers.join import fit_clocks, join_traces
from dsprof.run import RunError, RunFolder, RunInfo
from dsprof.schema import COLUMNS
from dsprof.trace import Trace, save

EPOCH = 1_790_000_000_000_000_000
MS = 1_000_000


def captured() -> Trace:
    """What dsprof saw: rank 1 of two takes longer to compute."""
    return Job(ranks=2, steps=20, forward=lambda rank, step: 55 if rank == 1 else 40).trace()


def profiled(trace: Trace, folder: Path, steps: range, numbered: bool = True) -> Path:
    """The same ranks by torch.profiler in some of the steps: its clock is the epoch's, it counts collectives from one
    and steps from zero. Kernels end 50 us after what gloo's worker saw."""
    for rank in trace.ranks:
        rows = trace.read(rank)
        rows = rows[rows["step"].isin(steps)]
        events = []
        for corr, row in enumerate(rows.itertuples()):
            start, length = row.start_ns / 1e3, (row.dur_ns if row.dur_ns == row.dur_ns else 0) / 1e3
            if row.kind == "step":
                events.append(kt.note(f"ProfilerStep#{row.step - steps[0]}", start, length))
            elif row.kind == "comm":
                args = {"Collective name": "allreduce", "Process Group Name": "0", "dtype": "Byte",
                        "In msg nelems": int(row.bytes), **({"Seq": int(row.seq) + 1} if numbered else {})}  # fmt: skip
                events += [kt.call(corr, row.issue_ns / 1e3 + 3, tid=2),
                           kt.kernel("ncclDevKernel_AllReduce", corr, start + 50, length, 20, **args)]  # fmt: skip
            elif row.kind == "phase" and row.name in ("forward", "backward"):
                events += [kt.call(corr, start + 10), kt.kernel("gemm", corr, start + 30, length - 40)]
        about = {"rank": rank, "world_size": 2, "backend": "nccl"}
        text = kt.as_kineto(events, baseTimeNanoseconds=EPOCH, distributedInfo=about)
        kt.write(folder, text, f"rank{rank}.pt.trace.json")
    return folder


def run_of(trace: Trace, folder: Path) -> Path:
    save(RunFolder(folder), trace)
    return folder


def test_a_capture_and_a_profilers_trace_are_one(tmp_path: Path) -> None:
    trace = captured()
    run = run_of(trace, tmp_path / "run")
    joined = import_trace([run, profiled(trace, tmp_path / "kineto", range(8, 12))])
    for rank in (0, 1):
        before, rows = trace.read(rank), joined.read(rank)
        gemm = rows[(rows["kind"] == "kernel") & (rows["name"] == "gemm")]
        assert sorted(gemm["step"].unique()) == [8, 9, 10, 11]
        assert len(gemm) == 8
        forward = before[(before["kind"] == "phase") & (before["name"] == "forward") & (before["step"] == 9)]
        began = gemm.loc[gemm["step"] == 9, "start_ns"].iloc[0] - int(forward["start_ns"].iloc[0])
        assert abs(began - 30_000) < 5_000  # 3 us lie between issue and launch
        collectives = rows[rows["kind"] == "comm"]
        assert len(collectives) == len(before[before["kind"] == "comm"])  # none is there twice
        assert collectives.loc[collectives["lane"] == "cuda.20", "step"].value_counts().to_dict() == dict.fromkeys(
            range(8, 12), 2
        )
    first = analyze(joined).findings[0]
    assert (first.code, first.where.ranks) == ("rank.straggler", (1,))
    assert joined.run.imported == ""
    (fact,) = (fact for fact in joined.run.facts if fact["fact"] == "joined")
    assert "joined by 16 collectives of 2 ranks" in fact["warnings"][-1]


def test_where_no_number_is_shared_the_steps_tell_the_clock(tmp_path: Path) -> None:
    trace = captured()
    kineto = import_trace(profiled(trace, tmp_path, range(8, 12), numbered=False))
    fit = fit_clocks(trace.read(0), kineto.read(0))
    assert fit is not None
    assert (fit.pairs, abs(fit.offset_ns - EPOCH) < 1000) == ([], True)


def test_the_shift_of_numbers_that_fits_is_found(tmp_path: Path) -> None:
    """Alike collectives, a step of two: by two numbers more they would fit, too, but for their times."""
    trace = captured()
    other = import_trace(profiled(trace, tmp_path, range(8, 12))).read(1)
    for shift in (-3, 0, 5):
        fit = fit_clocks(trace.read(1), other.assign(seq=other["seq"] + shift))
        assert fit is not None
        assert len(fit.pairs) == 8
        assert abs(fit.offset_ns - EPOCH - 3_000) < 1_000


def alike(times_ms: Sequence[float], group: str = "0", first: int = 0) -> pd.DataFrame:
    """Collectives of one kind and size, issued at these times."""
    issued = [round(MS * when) for when in times_ms]
    rows = {"kind": "comm", "name": "all_reduce", "group": group, "bytes": 4096, "rank": 0, "restart": 0, "step": 0,
            "issue_ns": issued, "start_ns": issued,
            "seq": range(first, first + len(issued))}  # fmt: skip
    return pd.DataFrame(rows, index=range(len(issued))).reindex(columns=list(COLUMNS)).astype(COLUMNS)


def seen_by_another(rows: pd.DataFrame, part: slice, ahead_ns: int = EPOCH, counts_from: int = 3) -> pd.DataFrame:
    """A part of them by a tool whose clock is ahead and that counts from another number."""
    moved = rows.assign(seq=rows["seq"] + counts_from)
    return moved.assign(**{name: moved[name] + ahead_ns for name in ("start_ns", "issue_ns")}).iloc[part]


REGULAR = [50.0 * step for step in range(40)]
UNEQUAL = [50.0 * step + 7 * (step % 5) * (step % 3) for step in range(40)]


def test_steps_that_are_all_alike_do_not_tell_one_shift_from_another() -> None:
    rows = alike(REGULAR)
    fit = fit_clocks(rows, seen_by_another(rows, slice(10, 20)))
    assert fit is not None
    assert fit.also_ns == pytest.approx(8 * 50 * MS, abs=10)
    unequal = alike(UNEQUAL)
    fit = fit_clocks(unequal, seen_by_another(unequal, slice(10, 20)))
    assert fit is not None
    assert (fit.also_ns, dict(fit.shifts), fit.offset_ns) == (None, {"0": -3}, EPOCH)


def test_a_group_that_is_sure_decides_for_one_that_is_not() -> None:
    rows = pd.concat([alike(REGULAR), alike(UNEQUAL[::4], "1")], ignore_index=True)
    fit = fit_clocks(rows, seen_by_another(rows, slice(10, 50)))
    assert fit is not None
    assert (fit.also_ns, dict(fit.shifts), fit.offset_ns) == (None, {"0": -3, "1": -3}, EPOCH)


@pytest.mark.parametrize(("other_rank", "said"), [(REGULAR, True), (UNEQUAL, False)])
def test_a_join_that_is_not_sure_says_so(other_rank: list[float], said: bool) -> None:
    """Unless another rank tells: a tool counts a group's collectives alike on all of them."""
    ranks = [alike(REGULAR).assign(rank=0), alike(other_rank).assign(rank=1)]
    run = RunInfo("a", "a", [], world_size=2)
    other = replace(run, facts=[{"fact": "import", "format": "flight_recorder", "rank": 0, "file": "dump"}])
    ground = Trace.of(run, pd.concat(ranks, ignore_index=True))
    joined = join_traces([ground, Trace.of(other, pd.concat([seen_by_another(one, slice(10, 20)) for one in ranks]))])
    (fact,) = (fact for fact in joined.run.facts if fact["fact"] == "joined")
    warnings = [text for text in fact["warnings"] if "the join is not sure" in text]
    assert bool(warnings) == said
    if said:
        assert warnings[0].startswith("rank 0, 1: collectives of other numbers fit about as well, so the join is not")


def recorded(folder: Path, late_ns: int, last: str = "completed") -> Path:
    """Flight Recorder's of the two ranks of `kt.two_ranks`, whose clocks are `late_ns` ahead."""
    folder.mkdir(exist_ok=True)
    for rank in (0, 1):
        entries = []
        for number in range(7):
            at = late_ns + number * 1_000_000 + 380_000
            state = last if number == 6 else "completed"
            ended = at + 1000 if state == "completed" else None
            entries.append(
                {"record_id": number, "process_group": ("0", "default_pg"), "collective_seq_id": number + 4,
                 "profiling_name": "nccl:all_reduce", "time_created_ns": at, "input_sizes": [[1000]],
                 "input_dtypes": ["Float"], "output_sizes": [[1000]], "output_dtypes": ["Float"], "state": state,
                 "time_discovered_started_ns": at, "time_discovered_completed_ns": ended,
                 "is_p2p": False, "frames": [{"name": "train", "filename": "/home/me/train.py", "line": 12}]}
            )  # fmt: skip
        content = {"entries": entries, "pg_config": {"0": {"desc": "default_pg", "ranks": "[0, 1]"}}, "rank": rank}
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content))
    return folder


def test_a_profilers_trace_flight_recorder_and_snapshots_in_one_folder(tmp_path: Path) -> None:
    args = {"Collective name": "allreduce", "Process Group Name": "0", "In msg nelems": 1000, "dtype": "Float"}
    kt.two_ranks(tmp_path, steps=6, args=args)
    recorded(tmp_path, late_ns=50 * MS, last="started")
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.pickle").write_bytes(pickle.dumps(tiny()))
    trace = import_trace(tmp_path)
    assert (trace.run.imported, sorted(trace.memory)) == ("kineto", [0, 1])
    comm = trace.read(1).query("kind == 'comm'")
    assert comm["site"].tolist() == ["/home/me/train.py:12"] * 7
    assert comm["ended"].tolist() == [True] * 6 + [False]
    assert comm["seq"].tolist() == [3, 4, 5, 6, 7, 8, 9]  # as the profiler counts
    assert np.diff(comm["start_ns"].to_numpy(np.int64)).max() < 2 * MS  # on the profiler's clock
    assert trace.run.groups["0"]["ranks"] == [0, 1]
    assert {fact["format"] for fact in trace.run.facts if fact["fact"] == "joined"} == {
        "flight_recorder", "memory_snapshot"
    }  # fmt: skip


def test_what_is_not_of_one_job_is_a_sentence(tmp_path: Path) -> None:
    trace = captured()
    run = run_of(trace, tmp_path / "run")
    kt.write(tmp_path / "other", kt.as_kineto(kt.training()), "rank7.json")
    with pytest.raises(RunError, match=r"ranks 7 of kineto are none of the capture \(0, 1\): they are not of one job"):
        import_trace([run, tmp_path / "other"])
    with pytest.raises(RunError, match="a run of dsprof's already; name beside it what other tools recorded"):
        import_trace([run])
    kt.write(tmp_path / "strange", kt.as_kineto(kt.training()), "rank0.json")
    facts = import_trace([run, tmp_path / "strange"]).run.facts
    warning = next(fact["warnings"][-1] for fact in facts if fact["fact"] == "joined")
    assert warning == (
        "rank 0: neither collectives nor steps tell how the clocks of both traces are apart, so its rows are left out"
    )


def test_the_command_joins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = captured()
    run, kineto = run_of(trace, tmp_path / "run"), profiled(trace, tmp_path / "kineto", range(8, 12))
    target = tmp_path / "joined"
    assert cli.main(["import", str(run), str(kineto), "-o", str(target), "--no-report"]) == 0
    said = capsys.readouterr().err
    assert "imported 2 ranks, 20 steps" in said
    assert "joined by 16 collectives of 2 ranks" in said
    told: dict[str, Any] = json.loads((target / "findings.json").read_text())
    assert told["findings"][0]["code"] == "rank.straggler"
