"""Importing traces of torch.profiler: tiny ones with literal numbers, damaged and hostile ones, and the real ones where
they are."""

from __future__ import annotations

import gzip
import json
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import kineto_traces as kt
import numpy as np
import pandas as pd
import pytest
from damage import damaged

from dsprof import cli, trace
from dsprof.analyzer import analyze
from dsprof.analyzer.study import study
from dsprof.importers import import_trace, kineto
from dsprof.importers.rank_names import rank_in
from dsprof.run import RunError, open_run
from dsprof.schema import COLUMNS
from dsprof.trace.kineto import around, arrays, stream

REAL = Path(os.environ.get("DSPROF_REAL_TRACES", Path(__file__).parents[2] / "shared" / "data" / "traces"))
MiB = 1 << 20


def rows_of(events: list[kt.Event], tmp_path: Path, **about: Any) -> pd.DataFrame:
    rows = import_trace(kt.write(tmp_path, kt.as_kineto(events, **about))).rows
    assert dict(rows.dtypes.astype(str)) == COLUMNS
    return rows


def shown(rows: pd.DataFrame, kind: str, *columns: str) -> list[list[Any]]:
    chosen = rows.loc[rows["kind"] == kind, list(columns)].astype(object)
    return chosen.where(chosen.notna(), None).to_numpy().tolist()


def refusal(path: Path, folder: Path) -> str:
    """The one line that importing it ends with."""
    with pytest.raises(RunError) as error:
        import_trace(path)
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 600
    return text.replace(str(folder), "")


# --- what is read -------------------------------------------------------------------------------


def test_kernels_launches_and_steps(tmp_path: Path) -> None:
    rows = rows_of(kt.training(), tmp_path)
    assert shown(rows, "step", "name", "step", "lane", "start_ns", "dur_ns", "source") == [
        ["step", 3, "main", 1_000_000, 1_000_000, "imported"]
    ]
    assert shown(rows, "kernel", "name", "lane", "step", "start_ns", "dur_ns", "issue_ns", "corr") == [
        ["gemm", "cuda.7", 3, 1_050_000, 100_000, 1_020_000, 31],
        ["gemm", "cuda.7", 3, 1_200_000, 100_000, 1_160_000, 32],
        ["gemm", "cuda.7", 3, 1_400_000, 100_000, 1_350_000, 33],
        ["adam", "cuda.7", 3, 1_800_000, 50_000, 1_790_000, 35],
    ]
    assert shown(rows, "launch", "name", "lane", "thread", "start_ns", "corr") == [
        ["cudaLaunchKernel", "main", 1, 1_020_000, 31],
        ["cudaLaunchKernel", "main", 1, 1_160_000, 32],
        ["cudaLaunchKernel", "autograd", 2, 1_350_000, 33],
        ["cudaLaunchKernel", "autograd", 2, 1_400_000, 34],
        ["cudaLaunchKernel", "main", 1, 1_790_000, 35],
    ]


def test_phases_are_told_and_derived(tmp_path: Path) -> None:
    more = [kt.note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 1001, 5),
            kt.op("aten::norm", 1620, 30)]  # fmt: skip
    assert shown(rows_of(kt.training() + more, tmp_path), "phase", "name", "start_ns", "dur_ns", "source") == [
        ["data", 1_001_000, 5_000, "imported"],
        ["forward", 1_010_000, 190_000, "derived"],
        ["backward", 1_300_000, 300_000, "derived"],
        ["clip", 1_620_000, 30_000, "derived"],
        ["optimizer", 1_700_000, 200_000, "imported"],
    ]


def test_a_collective_by_its_arguments(tmp_path: Path) -> None:
    trace_of = import_trace(kt.write(tmp_path, kt.as_kineto(kt.training(args=kt.COLLECTIVE))))
    assert shown(trace_of.rows, "comm", "name", "lane", "group", "seq", "bytes", "dtype") == [
        ["all_reduce", "cuda.20", "0", 3, 4000, "float32"]
    ]
    assert trace_of.run.groups["0"] == {"ranks": [0, 1], "size": 2, "desc": "default_pg", "backend": "kernels"}


def test_a_collective_is_issued_by_its_launch_and_arrives_with_its_kernel(tmp_path: Path) -> None:
    unseen = kt.kernel("ncclDevKernel_AllGather_RING_LL(ncclDevComm*)", 77, 1950, 5, 20)  # launched before the trace
    assert shown(rows_of([*kt.training(), unseen], tmp_path), "comm", "start_ns", "issue_ns", "arrival_ns") == [
        [1_410_000, 1_400_000, 1_410_000],
        [1_950_000, None, 1_950_000],
    ]


def test_a_collective_by_the_annotation_around_its_launch(tmp_path: Path) -> None:
    rows = rows_of(kt.training(), tmp_path)
    assert shown(rows, "comm", "name", "group", "seq", "bytes") == [
        ["all_reduce", "all_reduce (group not told)", None, 4000]
    ]


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "all_reduce"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "send_recv"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "broadcast"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("void deep_ep::internode::dispatch<false, 8>(int4*)", "all_to_all"),
        ("void vllm::cross_device_reduce_1stage<c10::BFloat16, 8>(...)", "all_reduce"),
    ],
)
def test_kernels_that_communicate(tmp_path: Path, name: str, collective: str) -> None:
    rows = rows_of([kt.note("ProfilerStep#1", 0, 100), kt.call(1, 5), kt.kernel(name, 1, 10, 20)], tmp_path)
    assert shown(rows, "comm", "name") == [[collective]]
    assert not shown(rows, "kernel", "name")


def test_kernels_that_the_user_names(tmp_path: Path) -> None:
    path = kt.write(tmp_path, kt.as_kineto([kt.call(1, 5), kt.kernel("void mine::ring_exchange<4>()", 1, 10, 20)]))
    assert not shown(import_trace(path).rows, "comm", "name")
    assert shown(import_trace(path, ["mine::ring_"]).rows, "comm", "name") == [["collective"]]
    with pytest.raises(RunError, match="no regular expression"):
        import_trace(path, ["("])


def test_copies_to_the_host_are_copies_and_others_kernels(tmp_path: Path) -> None:
    events = [kt.copy("Memcpy HtoD (Pinned -> Device)", 1, 10, 4, size=256),
              kt.copy("Memcpy DtoD (Device -> Device)", 2, 20, 4), kt.call(1, 5), kt.call(2, 8)]  # fmt: skip
    rows = rows_of(events, tmp_path)
    assert shown(rows, "copy", "name", "bytes") == [["Memcpy HtoD (Pinned -> Device)", 256]]
    assert shown(rows, "kernel", "name", "bytes") == [["Memcpy DtoD (Device -> Device)", 64]]


def test_a_thread_that_waits_for_the_device_waits_for_what_ended_last(tmp_path: Path) -> None:
    events = [*kt.training(), kt.call(0, 1500, 110, name="cudaStreamSynchronize")]
    assert shown(rows_of(events, tmp_path), "wait", "name", "lane", "start_ns", "dur_ns", "corr") == [
        ["cudaStreamSynchronize", "main", 1_500_000, 110_000, 34]
    ]


def test_memory_is_sampled_where_it_changes(tmp_path: Path) -> None:
    events = [kt.op("aten::x", 0, 50), kt.memory(10, 512, 2 * MiB), kt.memory(20, 1024, 2 * MiB), kt.memory(30, 512, 0)]
    assert shown(rows_of(events, tmp_path), "mem", "name", "lane", "start_ns", "bytes") == [
        ["allocated", "cuda.0", 10_000, 512], ["reserved", "cuda.0", 10_000, 2 * MiB],
        ["allocated", "cuda.0", 20_000, 1024],
        ["allocated", "cuda.0", 30_000, 512], ["reserved", "cuda.0", 30_000, 0],
    ]  # fmt: skip


def test_annotations_of_the_user_are_marks(tmp_path: Path) -> None:
    rows = rows_of([*kt.training(), kt.note("## embed ##", 1020, 30)], tmp_path)
    assert shown(rows, "mark", "name", "lane", "start_ns", "dur_ns") == [["## embed ##", "main", 1_020_000, 30_000]]


def test_times_with_a_fraction_and_a_base(tmp_path: Path) -> None:
    events = [kt.call(1, 5.25), kt.kernel("k", 1, 10.375, 2.125)]
    rows = rows_of(events, tmp_path, baseTimeNanoseconds=1_711_964_646_000_000_000)
    assert shown(rows, "kernel", "start_ns", "dur_ns", "issue_ns") == [
        [1_711_964_646_000_010_375, 2_125, 1_711_964_646_000_005_250]
    ]


def test_without_steps_all_is_one_step_and_that_is_said(tmp_path: Path) -> None:
    trace_of = import_trace(kt.write(tmp_path, kt.as_kineto([kt.op("aten::x", 5, 10), kt.op("aten::y", 30, 5)])))
    assert shown(trace_of.rows, "step", "step", "start_ns", "dur_ns", "source") == [[0, 5_000, 30_000, "derived"]]
    assert "no ProfilerStep in it" in trace_of.run.facts[0]["warnings"][0]


def test_of_a_cpu_its_operators_and_gloos_collectives(tmp_path: Path) -> None:
    events = [
        kt.note("ProfilerStep#1", 0, 100), kt.op("aten::linear", 1, 20), kt.op("aten::addmm", 2, 10),
        kt.note("gloo:all_reduce", 15, 40, 3), kt.op("aten::mul", 60, 10),
    ]  # fmt: skip
    trace_of = import_trace(kt.write(tmp_path, kt.as_kineto(events, distributedInfo={"backend": "gloo", "rank": 0})))
    rows = trace_of.rows
    assert shown(rows, "kernel", "name", "lane") == [["aten::linear", "main"], ["aten::mul", "main"]]
    assert shown(rows, "comm", "name", "start_ns", "dur_ns") == [["all_reduce", 15_000, 40_000]]
    assert shown(rows, "wait", "name", "lane", "start_ns", "dur_ns") == [["all_reduce", "main", 21_000, 34_000]]
    assert trace_of.run.groups["all_reduce (group not told)"]["backend"] == "gloo"


LAYOUTS = {
    "kineto": kt.as_kineto,
    "minified": lambda events, **about: json.dumps({**about, "traceEvents": events}, separators=(",", ":")),
    "indented": lambda events, **about: json.dumps({"traceEvents": events, **about}, indent=4),
    "list": lambda events, **about: json.dumps(events),
    "wrapped": lambda events, **about: json.dumps(
        {"meta": [{"a": "[{"}], "of": {"b": [], "traceEvents": events}, **about}
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", [300, stream.BLOCK])
def test_any_layout_and_any_cut_into_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, block: int
) -> None:
    """Also with names that look like the layout."""
    monkeypatch.setattr(stream, "BLOCK", block)
    odd = kt.op('"},{"ph": "X"}], {[\\', 1005, 1)
    events = [odd, *kt.training(steps=3, args=kt.COLLECTIVE), {**odd, "args": {"a": [{"b": [1, {}]}]}}]
    expected = rows_of(events, tmp_path)
    path = kt.write(tmp_path / "other", LAYOUTS[layout](events, distributedInfo={"rank": 0}), "rank0.json.gz")
    pd.testing.assert_frame_equal(import_trace(path).rows, expected)


def wrapped(events: list[kt.Event], where: str) -> str:
    """What other programs make of a trace: their own metadata before it, in it, or around it."""
    # Texts that look like the trace's own, as long as a block, with quotes, brackets and backslashes.
    odd = '"traceEvents": [{]\\"' * 30 + "\\" * 3
    metadata = {"note": odd, "traceEvents": "none", "deep": {"er": {"distributedInfo": {"rank": 9}}}, "n": [1, [2, {}]]}
    inner = json.loads(kt.as_kineto(events, distributedInfo={"rank": 2, "world_size": 4}))
    whole: dict[str, Any] = {
        "late": {"metadata": metadata, **inner},
        "one level down": {"metadata": metadata, "trace": {"metadata": metadata, **inner}, "more": [metadata]},
        "told behind": {"trace": {"traceEvents": events, "metadata": metadata}, "distributedInfo": {"rank": 2}},
    }[where]
    return json.dumps(whole, indent=1)


@pytest.mark.parametrize("where", ["late", "one level down", "told behind"])
@pytest.mark.parametrize("block", [5, 64, 333, stream.BLOCK])
def test_wrappers_put_their_metadata_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, block: int
) -> None:
    monkeypatch.setattr(stream, "BLOCK", block)
    expected = rows_of(kt.training(args=kt.COLLECTIVE), tmp_path, distributedInfo={"rank": 2})
    path = kt.write(tmp_path / "wrapped", wrapped(kt.training(args=kt.COLLECTIVE), where), "trace.json")
    found = import_trace(path)
    assert found.run.facts[0]["warnings"] == []
    pd.testing.assert_frame_equal(found.rows, expected)


def test_metadata_of_any_size_is_walked_through_and_not_held(tmp_path: Path) -> None:
    """80 MiB of text, lists and one string before the events."""
    text = kt.as_kineto(kt.training())
    before = '{"blob": "' + "ab\\n" * (8 * MiB) + '", "lists": [' + "[1, 2], " * (6 * MiB) + "[]], "
    path = kt.write(tmp_path, before + text[1:])
    del before
    tracemalloc.start()
    found = import_trace(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert shown(found.rows, "step", "step") == [[3]]
    assert peak < 60 * MiB


# --- ranks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3.json", 3), ("trace_8_rank_1.json.gz", 1), ("worker5_step_12.1694.pt.trace.json", 5),
        ("host_1234.rank-12.pt.trace.json", 12), ("7.json", 7), ("run.gpu2.json", 2), ("trace.json", None),
    ],
)  # fmt: skip
def test_ranks_in_names(name: str, rank: int | None) -> None:
    assert rank_in(name) == rank


def test_what_the_file_says_of_its_rank_counts_before_its_name(tmp_path: Path) -> None:
    path = kt.write(tmp_path, kt.as_kineto(kt.training(), distributedInfo={"rank": 2, "world_size": 4}), "rank0.json")
    trace_of = import_trace(path)
    assert (trace_of.ranks, trace_of.run.world_size) == ((2,), 4)


def test_a_rank_that_nobody_tells_is_asked_for(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        kt.write(tmp_path, kt.as_kineto(kt.training()), name)
    assert "which rank is a.json, b.json of?" in refusal(tmp_path, tmp_path)


def test_two_files_of_one_rank_are_named(tmp_path: Path) -> None:
    for name in ("rank0.json", "rank0.again.json"):
        kt.write(tmp_path, kt.as_kineto(kt.training()), name)
    assert "rank 0 is there 2 times (rank0.again.json, rank0.json)" in refusal(tmp_path, tmp_path)


def test_several_processes_read_what_one_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = import_trace(kt.two_ranks(tmp_path)).rows
    monkeypatch.setattr(kineto, "IN_PROCESSES_FROM", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    pd.testing.assert_frame_equal(import_trace(tmp_path).rows, expected)


def test_ranks_whose_collectives_end_apart_have_clocks_of_their_own(tmp_path: Path) -> None:
    for rank, ahead in enumerate((0, 0, 50_000)):
        events = [{**event, "ts": event["ts"] + ahead} for event in kt.training()]
        kt.write(tmp_path, kt.as_kineto(events), f"rank{rank}.json")
    trace_of = import_trace(tmp_path)
    assert [item.clock for item in trace_of.run.ranks] == ["epoch 0", "epoch 0", "epoch 1"]
    collectives = analyze(trace_of).collectives
    assert (collectives["last_ns"] - collectives["first_ns"]).tolist() == [0]


# --- as a run -----------------------------------------------------------------------------------


def test_the_command_makes_a_run_that_other_commands_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces, run = kt.two_ranks(tmp_path / "traces"), tmp_path / "run"
    assert cli.main(["import", str(traces), "-o", str(run)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{run}\n"
    assert "imported 2 ranks, 1 step" in said.err
    assert "next: dsprof report" in said.err
    assert "matched in the order of their launch" in said.err
    pd.testing.assert_frame_equal(trace.load(open_run(run)).rows, import_trace(traces).rows)
    assert cli.main(["analyze", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"]["collectives_matched"] == 1
    assert cli.main(["analyze", str(run)]) == 0
    assert "last to come: rank 1" in capsys.readouterr().out


def test_names_in_the_file_are_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [*kt.training(), kt.note("<script>alert(1)</script>\x1b[2J\u202e", 1020, 30),
              kt.kernel("../../../etc/passwd\x1b[2J", 77, 1900, 5)]  # fmt: skip
    run = tmp_path / "run"
    assert cli.main(["import", str(kt.write(tmp_path, kt.as_kineto(events))), "-o", str(run)]) == 0
    assert cli.main(["analyze", str(run)]) == 0
    assert cli.main(["report", str(run)]) == 0
    said = capsys.readouterr()
    assert "\x1b[2J" not in said.out + said.err
    assert "<script>alert(1)" not in (run / "report.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.json", "run"]


def test_what_a_trace_does_not_tell_of_its_capture_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No overhead was measured, no level was chosen, and nothing says that all ranks read one clock."""
    traces, run = tmp_path / "traces", tmp_path / "run"
    traces.mkdir()
    kt.two_ranks(traces)
    analysis = analyze(import_trace(traces))
    capture = analysis.to_dict()["capture"]
    assert (capture["overhead_percent"], capture["clock_error_us"]) == (None, None)
    assert cli.main(["import", str(traces), "-o", str(run)]) == 0
    assert cli.main(["report", str(run)]) == 0
    capsys.readouterr()
    assert cli.main(["analyze", str(run)]) == 0
    words = (
        "2/2 ranks, imported from torch.profiler, of unknown overhead, clocks taken for one, as the trace does not name"
    )
    assert words in " ".join(capsys.readouterr().out.split())
    page = (run / "report.html").read_text()
    assert words in page
    assert "<dt>imported from</dt><dd>torch.profiler</dd>" in page
    assert "<dt>level</dt>" not in page


# --- damaged and hostile ------------------------------------------------------------------------


def test_a_truncated_rank_costs_its_tail_only(tmp_path: Path) -> None:
    whole = kt.as_kineto(kt.training(steps=2))
    for rank, text in enumerate((whole, whole[: whole.index("ProfilerStep#4") - 60])):
        kt.write(tmp_path, text, f"rank{rank}.json")
    trace_of = import_trace(tmp_path)
    assert [len(shown(trace_of.read(rank), "step", "step")) for rank in trace_of.ranks] == [2, 1]
    assert [
        "breaks off" in text for fact in trace_of.run.facts if fact["fact"] == "import" for text in fact["warnings"][:1]
    ] == [False, True]
    assert analyze(trace_of).ranks_captured == (0, 1)


def test_a_truncated_gzip_costs_its_tail_only(tmp_path: Path) -> None:
    chance = random.Random(0)
    events = [kt.op(f"aten::{chance.random()}", index, 1) for index in range(5000)]
    data = gzip.compress(kt.as_kineto(events).encode())
    trace_of = import_trace(kt.write(tmp_path, data[: len(data) // 2], "rank0.json"))
    assert 1000 < len(shown(trace_of.rows, "kernel", "name")) < 4000
    assert "its last events are missing" in str(trace_of.run.facts)


def test_a_corrupt_rank_is_named_and_the_good_ones_are_read(tmp_path: Path) -> None:
    kt.two_ranks(tmp_path)
    text = kt.as_kineto(kt.training()).replace('"dur": 100', '"dur": 1;0')
    kt.write(tmp_path, text, "rank2.json")
    trace_of = import_trace(tmp_path)
    assert trace_of.ranks == (0, 1)
    assert "rank2.json was left out: an event is no JSON" in str(trace_of.run.facts)


def test_an_event_that_is_no_json_costs_only_itself(tmp_path: Path) -> None:
    text = kt.as_kineto(kt.training()).replace('"corr": 31', "").replace('"dur": 50', '"dur": 5;0')
    trace_of = import_trace(kt.write(tmp_path, text))
    assert [name for (name,) in shown(trace_of.rows, "kernel", "name")] == ["gemm", "gemm", "gemm"]
    assert "1 event was left out" in str(trace_of.run.facts)


@pytest.mark.parametrize("layout", ["kineto", "minified"])
def test_what_kineto_writes_against_json_is_mended(tmp_path: Path, layout: str) -> None:
    events = [*kt.training(), kt.copy("Memcpy DtoD \\ff (Device -> Device)", 9, 1900, 1)]
    text = LAYOUTS[layout](events).replace('"bytes": 64', '"bytes": 64, "memory bandwidth (GB/s)": nan')
    text = text.replace('"bytes":64', '"bytes":64,"memory bandwidth (GB/s)":-inf')
    rows = import_trace(kt.write(tmp_path, text.encode().replace(b"\\\\ff", b"\xff"))).rows
    (copied,) = (row for row in shown(rows, "kernel", "name", "bytes") if "Memcpy" in row[0])
    assert copied == ["Memcpy DtoD \ufffd (Device -> Device)", 64]


def test_events_without_a_time_are_left_out_and_told(tmp_path: Path) -> None:
    odd = [{"ts": -5}, {"ts": "now"}, {"dur": 1e300}, {"ts": True}, {"name": 7}, {"tid": [1]}, {"ts": 10**30}]
    events = [*kt.training(), *({**kt.op("aten::odd", 1100, 5), **wrong} for wrong in odd)]
    trace_of = import_trace(kt.write(tmp_path, json.dumps(events)))
    assert "7 events were left out" in str(trace_of.run.facts)
    assert shown(trace_of.rows, "phase", "name") == [["forward"], ["backward"], ["optimizer"]]


def test_kernels_with_impossible_arguments_are_left_out(tmp_path: Path) -> None:
    good = kt.kernel("k", 1, 10, 5)
    odd = [{"stream": "seven"}, {"device": -9}, {"correlation": 1 << 80}, {"bytes": -7}, {"stream": None}]
    events = [good, *({**good, "args": {**good["args"], **wrong}} for wrong in odd), {**good, "args": 3}]
    rows = import_trace(kt.write(tmp_path, kt.as_kineto(events))).rows
    assert len(shown(rows, "kernel", "name")) == 1


def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    bomb = b'{"traceEvents": [' + b" " * (80 * MiB)
    path = kt.write(tmp_path, bomb, "rank0.json.gz")
    del bomb
    tracemalloc.start()
    assert "becomes more than 200 times as large" in refusal(path, tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 100 * MiB
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"schemaVersion": 1}', "holds no traceEvents, neither at the top nor one level down"),
        ('{"a": {"traceEvents": 1, "b": {"traceEvents": [{"ph": "X"}]}}}', "holds its traceEvents 2 levels down"),
        ('[{"rank": 0, "host": "a", "traceEvents": [{"ph": "X"}]}]', "write each into a file of its own"),
        ('{"schemaVersion": 1, "traceEvents": []}', "holds no events"),
        ('{"traceEvents": [' + "[" * 100_000, "breaks off before its first event ends"),
        ('{"traceEvents": [{"name":', "breaks off before its first event ends"),
        ('{"traceEvents": [' + "[" * 5000 + "]" * 5000 + "]}", "an event is no JSON"),
        ('{"traceEvents": [{"ph": "X"}}', "brackets that do not match"),
        ('{"distributedInfo": [;], "traceEvents": []}', "its distributedInfo is no JSON"),
        ('{"traceEvents": [1, 2, null, "x"]}', "none of its 4 events"),
        ('{"traceEvents": [{"ph": "X", "name": "\ud800"}]}', ""),
    ],
)
def test_what_is_no_trace_is_refused_with_the_reason(tmp_path: Path, text: str, why: str) -> None:
    path = kt.write(tmp_path, text.encode("utf-8", "surrogatepass"))
    assert why in refusal(path, tmp_path)


def test_an_event_without_end_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MOST_EVENT", 2 * MiB)
    path = kt.write(tmp_path, '{"traceEvents": [{"name": "' + "x" * (9 * MiB))
    assert "an event of more than 2 MiB" in refusal(path, tmp_path)


def test_an_event_of_many_brackets_is_not_parsed(tmp_path: Path) -> None:
    """Of 15 MB; without the bound it took 600."""
    event = '{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1, "dur": 5, "args": {"x": [%s1]}}'
    path = kt.write(tmp_path, '{"traceEvents": [' + event % ("[]," * (5 * MiB)) + "]}")
    tracemalloc.start()
    assert "an event of more than 4 MiB, before byte" in refusal(path, tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 250 * MiB


@pytest.mark.parametrize("where", ["its beginning", "its end"])
def test_what_stands_around_the_events_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """What is used of it; all else is passed over and never held."""
    monkeypatch.setattr(around, "MOST_TAKEN", 8 * MiB)
    lists, events = '"schemaVersion": 1, "%s": [' + "[]," * MiB + "[]]", '"traceEvents": [{"ph": "X"}]'
    whole = "{" + ", ".join([lists, events] if where == "its beginning" else [events, lists]) + "}"
    told = refusal(kt.write(tmp_path, whole % "distributedInfo"), tmp_path)
    assert "its distributedInfo would take more than 8 MiB of memory" in told
    path = kt.write(tmp_path, whole % "x")
    tracemalloc.start()
    assert "none of its 1 events" in refusal(path, tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60 * MiB


def test_lists_in_the_arguments_of_communications_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "MOST_TAKEN", 1 * MiB)
    events = kt.training(args={**kt.COLLECTIVE, "Process Group Ranks": [[]] * 20_000})
    told = refusal(kt.write(tmp_path, kt.as_kineto(events)), tmp_path)
    assert "the arguments of its communications would take more than 1 MiB of memory" in told


def imported_unless_refused(path: Path) -> trace.Trace | None:
    try:
        return import_trace(path)
    except RunError as error:
        if "\n" in str(error) or len(str(error)) > 600:
            raise
        return None


@pytest.mark.parametrize("seed", range(10))
def test_damaged_files_end_in_one_message_or_in_a_run(tmp_path: Path, seed: int) -> None:
    """Thirty a seed."""
    chance = random.Random(seed)
    layout = list(LAYOUTS)[seed % len(LAYOUTS)]
    events = [*kt.training(args=kt.COLLECTIVE if seed % 2 else None), kt.memory(1500, 512, 1024)]
    whole = LAYOUTS[layout](events, distributedInfo={"rank": 0}).encode()
    for number in range(30):
        data = damaged(chance, gzip.compress(whole) if seed % 3 == 0 else whole)
        path = kt.write(tmp_path, data)
        found = imported_unless_refused(path)
        if found is not None and number % 6 == 0:
            analysis = analyze(found)
            assert analysis.verdict.status != "healthy"
            assert not [why for why in analysis.not_judged.values() if "the rule failed" in why]


# --- the real ones ------------------------------------------------------------------------------


def real(name: str) -> Path:
    path = REAL / name
    if not path.exists():
        pytest.skip(f"{path}: not here; DSPROF_REAL_TRACES names the folder of real traces")
    return path


def reference(name: str) -> dict[str, Any]:
    """HTA's numbers over all of the trace."""
    found: dict[str, Any] = json.loads(real(name).read_text())["include_last=True"]
    return found


def test_the_eight_ranks_of_dlrm_equal_hta_and_get_what_it_lacks() -> None:
    expected, analysis = reference("dlrm_8rank/hta_reference.json"), analyze(import_trace(real("dlrm_8rank")))
    assert analysis.device is not None
    of_rank = {one["rank"]: one for one in analysis.device.to_dict()["ranks"]}
    check_against_hta(expected, of_rank)
    # What the reference lacks: five all-to-alls and three all-reduces, each matched on eight ranks.
    collectives = analysis.collectives
    assert collectives.groupby("name").size().to_dict() == {"all_reduce": 3, "all_to_all": 5}
    assert set(collectives["ranks"]) == {8}
    waits = analysis.device.waits
    assert len(waits) == 64
    assert ((waits["peer_ms"] >= 0) & (waits["transfer_ms"] >= 0)).all()
    assert waits["peer_ms"].sum() > 10 * waits["transfer_ms"].sum()
    assert analysis.verdict.status == "bottleneck"
    ranked = [finding.code for finding in analysis.findings if finding.is_problem]
    assert ranked[0] == "compute.launch-bound"
    assert "in the one step traced" in analysis.verdict.headline
    # Rank 7's step began 0.63 ms after any other's: that is not counted, and what is left is one number everywhere.
    straggler = next(finding for finding in analysis.findings if finding.code == "rank.straggler")
    assert analysis.delays is not None
    assert straggler.where.ranks == (int(analysis.delays[10].idxmax()),) == (7,)
    assert straggler.gain.ms == pytest.approx(float(analysis.delays.loc[7, 10]))
    assert straggler.gain.ms == pytest.approx(0.67, abs=0.01)
    assert sum(analysis.budget.values()) == pytest.approx(analysis.step_ms.mean if analysis.step_ms else 0)


def test_the_eight_ranks_of_dlrm_replay_as_they_ran_and_each_finding_has_a_gain() -> None:
    of_ranks = import_trace(real("dlrm_8rank"))
    check = study(of_ranks).checked
    assert check is not None
    assert check.error < 0.01
    assert check.contradicted <= 0.01
    found = analyze(of_ranks).findings
    assert {"compute.launch-bound", "rank.straggler"} <= {one.code for one in found}
    assert all(one.gain.ms is not None for one in found)


@pytest.mark.parametrize(
    ("trace_name", "reference_name"),
    [
        ("nccl_args/nccl_data.json.gz", "nccl_args/hta_reference.nccl_data.json"),
        ("ddp_memory/df_index_resolver.json.gz", "ddp_memory/hta_reference.df_index_resolver.json"),
    ],
)
def test_single_ranks_equal_hta(trace_name: str, reference_name: str) -> None:
    analysis = analyze(rounded(import_trace(real(trace_name))))
    assert analysis.device is not None
    of_rank = {one["rank"]: one for one in analysis.device.to_dict()["ranks"]}
    check_against_hta(reference(reference_name), of_rank)
    assert analysis.verdict.status in ("bottleneck", "inconclusive")


def test_what_rounding_as_hta_does_would_cost() -> None:
    """HTA gives 506,512, 113,012 and 41,026 us, and 15.14 %."""
    device = analyze(import_trace(real("nccl_args/nccl_data.json.gz"))).device
    assert device is not None
    (rank,) = device.to_dict()["ranks"]
    times = [rank[f"{name}_time_us"] for name in ("idle", "compute", "non_compute")]
    assert times == pytest.approx([503_050.991, 115_655.847, 41_844.167], abs=1e-6)
    assert rank["comp_comm_overlap_pctg"] == 15.61


def rounded(whole: trace.Trace) -> trace.Trace:
    """As HTA rounds: what has a fraction of a microsecond begins later and ends earlier."""
    rows = whole.rows
    start = rows["start_ns"].to_numpy(np.int64)
    end = (start + rows["dur_ns"].fillna(0).to_numpy(np.int64)) // 1000 * 1000
    start = -(-start // 1000) * 1000
    length = pd.array(np.maximum(end - start, 0), "Int64")
    return trace.Trace.of(whole.run, rows.assign(start_ns=start, dur_ns=length))


def check_against_hta(expected: dict[str, Any], of_rank: dict[int, Any]) -> None:
    """Breakdown, overlap, idle and kernel types: to the microsecond, as the reference has them."""
    for row in expected["temporal_breakdown"]:
        mine = of_rank[row["rank"]]
        for name in ("idle_time", "compute_time", "non_compute_time", "kernel_time"):
            assert mine[f"{name}_us"] == pytest.approx(row[f"{name}(us)"], abs=1e-6)
        for name in ("idle_time_pctg", "compute_time_pctg", "non_compute_time_pctg"):
            assert mine[name] == pytest.approx(row[name], abs=1e-6)
    for row in expected["comm_comp_overlap"]:
        assert of_rank[row["rank"]]["comp_comm_overlap_pctg"] == pytest.approx(row["comp_comm_overlap_pctg"], abs=1e-6)
    for row in expected["idle_time_breakdown"]:
        streams = {one["stream"]: one for one in of_rank[row["rank"]]["idle_time_breakdown"]}
        mine = streams[str(row["stream"])][f"{row['idle_category']}_us"]
        assert mine == pytest.approx(row["idle_time"], abs=1e-6)
    total: dict[str, float] = {}
    for one in of_rank.values():
        for name, us in one["kernel_types_us"].items():
            total[name] = total.get(name, 0.0) + us
    for row in expected["kernel_type_breakdown"]:
        if "overlapping MEMORY" not in row["kernel_type"] or row["sum"]:
            assert total.get(row["kernel_type"], 0.0) == pytest.approx(row["sum"], abs=1e-6)


def test_bandwidths_of_collectives_with_arguments() -> None:
    """algbw = bytes / time, busbw = algbw * 2 (n - 1) / n of an all-reduce (nccl-tests); the other rank is missing."""
    analysis = analyze(import_trace(real("nccl_args/nccl_data.json.gz")))
    assert analysis.device is not None
    found = {one.name: one for one in analysis.device.bandwidths}
    reduced = found["all_reduce"]
    assert (reduced.ranks, reduced.count, reduced.group, reduced.at_least) == (2, 15, "0", True)
    assert reduced.busbw_gbps == pytest.approx(reduced.algbw_gbps)  # 2 (2 - 1) / 2
    rows = analysis.trace.rows
    comm = rows[(rows["kind"] == "comm") & (rows["bytes"] == 6637568 * 4)]
    assert len(comm) == 3
    rate = comm["bytes"].to_numpy(np.int64) / comm["dur_ns"].to_numpy(np.int64)
    assert rate.min() > 5


def test_memory_events_of_a_real_trace() -> None:
    rows = import_trace(real("ddp_memory/df_index_resolver.json.gz")).rows
    memory = rows[rows["kind"] == "mem"]
    assert set(memory["lane"]) == {"cpu", "cuda.1"}
    of_device = memory[memory["lane"] == "cuda.1"]
    allocated = of_device[of_device["name"] == "allocated"]["bytes"]
    assert len(allocated) > 20_000
    assert allocated.max() <= of_device[of_device["name"] == "reserved"]["bytes"].max()
    assert len(rows[rows["kind"] == "comm"]) == 2020
    assert rows[rows["kind"] == "step"]["step"].tolist() == [2, 3, 4, 5, 6]
