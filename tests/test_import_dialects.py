"""Dialects of torch.profiler's traces, each written by hand in literal numbers: of 2020 to 2022, of 2026, other
libraries' kernels that communicate, and what a device waits for its host in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kineto_traces as kt
import pandas as pd
import pytest

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.work.stacks import Line
from dsprof.importers import import_trace
from dsprof.run import RunError
from dsprof.trace.kineto import CommNames, is_computation

NEXT = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
MS = 1000.0


def shown(rows: pd.DataFrame, kind: str, *columns: str) -> list[list[Any]]:
    chosen = rows.loc[rows["kind"] == kind, list(columns)].astype(object)
    return chosen.where(chosen.notna(), None).to_numpy().tolist()


def imported(folder: Path, events: list[kt.Event], comm_kernels: tuple[str, ...] = (), **about: Any) -> Any:
    return import_trace(kt.write(folder, kt.as_kineto(events, **about)), comm_kernels)


# --- of 2020 to 2022 ----------------------------------------------------------------------------


def waits_for_its_loader(cat: str, steps: int = 6, capital: bool = True) -> list[kt.Event]:
    """Steps of 100 ms: 70 in the loader, then four launches, whose kernels take 5 ms each. Annotations have the
    category of operators."""
    runtime, kernel = ("Runtime", "Kernel") if capital else ("cuda_runtime", "kernel")
    events = []
    for number in range(steps):
        base, corr = number * 100 * MS, 10 * number
        events += [
            kt.complete(cat, f"ProfilerStep#{number}", base, 99.9 * MS),
            kt.complete(cat, NEXT, base + 1 * MS, 70 * MS),
            kt.complete(cat, "aten::stack", base + 2 * MS, 20 * MS),
            kt.complete(cat, "aten::linear", base + 72 * MS, 0.5 * MS),
            kt.complete(cat, "AddmmBackward", base + 74 * MS, 0.5 * MS, 2),
            kt.complete(cat, "Optimizer.step#SGD.step", base + 75 * MS, 1 * MS),
        ]
        for at, tid in ((72.1, 1), (72.3, 1), (74.1, 2), (75.1, 1)):
            corr += 1
            begin = base + at * MS + 20
            queued = base + 72.2 * MS + (corr - 10 * number - 1) * 5 * MS
            events += [
                kt.complete(runtime, "cudaLaunchKernel", base + at * MS, 10, tid, correlation=corr),
                kt.complete(kernel, "gemm", max(begin, queued), 5 * MS, 7, device=0, stream=7, correlation=corr),
            ]
    return events


@pytest.mark.parametrize(("cat", "capital"), [("Operator", True), ("cpu_op", False)])
def test_annotations_among_operators(tmp_path: Path, cat: str, capital: bool) -> None:
    """Six steps counted as one, and a job that waits for its loader was told to use torch.compile."""
    trace = imported(tmp_path, waits_for_its_loader(cat, capital=capital))
    assert [step for (step,) in shown(trace.rows, "step", "step")] == [0, 1, 2, 3, 4, 5]
    first = [row for row in shown(trace.rows, "phase", "name", "start_ns", "dur_ns") if row[1] < 100_000_000]
    assert first == [
        ["data", 1_000_000, 70_000_000], ["forward", 72_000_000, 500_000], ["backward", 74_000_000, 500_000],
        ["optimizer", 75_000_000, 1_000_000],
    ]  # fmt: skip
    analysis = analyze(trace)
    stall = analysis.findings[0]
    assert (stall.code, stall.severity) == ("data.stall", "high")
    assert not [finding for finding in analysis.findings if finding.code == "compute.launch-bound"]
    assert "the loop waits 70.0 ms of each step for input" in analysis.verdict.headline
    assert "torch.compile" not in str(stall.fixes)
    assert "num_workers" in stall.fixes[0].title


def test_a_job_on_cpus_that_waits_for_its_loader(tmp_path: Path) -> None:
    """In an old trace, twelve steps of 100 ms, of which 60 to 62 are in the loader."""
    events = []
    for number in range(12):
        base = 100 * MS * number
        events += [
            kt.complete("Operator", f"ProfilerStep#{number}", base, 99.9 * MS),
            kt.complete("Operator", NEXT, base + 1 * MS, (60 + number % 3) * MS),
            kt.complete("Operator", "aten::linear", base + 65 * MS, 15 * MS),
            kt.complete("Operator", "AddmmBackward", base + 81 * MS, 14 * MS),
            kt.complete("Operator", "Optimizer.step#SGD.step", base + 96 * MS, 3 * MS),
        ]
    analysis = analyze(imported(tmp_path, events))
    assert [finding.code for finding in analysis.findings if finding.is_problem] == ["data.stall"]
    assert analysis.budget["data"] == pytest.approx(61)
    assert "the trace does not tell how many workers there are" in analysis.findings[0].fixes[0].title


def test_collectives_and_the_users_spans_among_old_operators(tmp_path: Path) -> None:
    args = {"Input Dims": [[1000]], "Input type": ["float"]}
    events = [
        kt.complete("Operator", "ProfilerStep#1", 0, 1000),
        kt.complete("Operator", "## my forward ##", 5, 300), kt.complete("Operator", "aten::add", 10, 20),
        kt.complete("Operator", "nccl:all_reduce", 400, 50, 1, **args),
        kt.complete("Runtime", "cudaLaunchKernel", 420, 5, correlation=1),
        kt.complete("Kernel", "ncclAllReduceRingLLKernel_sum_f32(ncclColl)", 430, 80, 20, device=0, stream=20,
                    correlation=1),
        kt.complete("Kernel", "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", 520, 80, 20, device=0, stream=20,
                    correlation=1),
    ]  # fmt: skip
    rows = imported(tmp_path, events).rows
    assert shown(rows, "mark", "name", "dur_ns") == [["## my forward ##", 300_000]]
    assert shown(rows, "comm", "name", "bytes") == [["all_reduce", 4000], ["all_reduce", 4000]]
    assert shown(rows, "phase", "name", "start_ns") == [["forward", 10_000]]


def test_a_compiled_region_is_an_operator_today(tmp_path: Path) -> None:
    """Its name has a colon and a slash, as no old operator's has."""
    rows = imported(tmp_path, [*kt.training(), kt.op("Torch-Compiled Region: 0/0", 1250, 20)]).rows
    assert not shown(rows, "mark", "name")


def test_data_pipes_within_each_other_are_one_wait_for_data(tmp_path: Path) -> None:
    events = [*kt.training(), kt.note("enumerate(DataPipe)#Batcher", 1001, 8), kt.note(NEXT, 1001, 9)]
    rows = imported(tmp_path, events).rows
    assert [row for row in shown(rows, "phase", "name", "dur_ns") if row[0] == "data"] == [["data", 9_000]]


def test_events_without_a_category(tmp_path: Path) -> None:
    """As torch.autograd.profiler wrote them before torch 1.8: a list, and no launches."""

    def legacy(name: str, pid: str, ts: float, dur: float, tid: int = 0) -> kt.Event:
        return {"name": name, "ph": "X", "ts": ts, "dur": dur, "tid": tid, "pid": pid, "args": {}}

    events = [
        legacy("mm", "CPU functions", 10, 30),
        legacy("volta_sgemm_128x64_nn", "CUDA functions", 30, 50),
        legacy("MmBackward", "CPU functions", 60, 30, 1),
        legacy("volta_sgemm_128x64_nt", "CUDA functions", 90, 50),
        {"name": "mm", "ph": "s", "ts": 10, "tid": 0, "pid": "CPU functions", "id": 1, "cat": "cpu_to_cuda"},
    ]
    rows = import_trace(kt.write(tmp_path, json.dumps(events))).rows
    assert shown(rows, "kernel", "name", "lane", "start_ns") == [
        ["volta_sgemm_128x64_nn", "cuda.0", 30_000], ["volta_sgemm_128x64_nt", "cuda.0", 90_000]
    ]  # fmt: skip
    assert shown(rows, "phase", "name", "start_ns") == [["forward", 10_000], ["backward", 60_000]]


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([{"ph": "X", "cat": "gpu_work", "name": "k", "ts": 1, "dur": 2, "pid": 0, "tid": 1}], "'gpu_work'"),
        ([{"ph": "B", "cat": "step", "name": "k", "ts": 1, "pid": 0}, {"ph": "X", "ts": 1}], "'step', 'phase X'"),
    ],
)
def test_an_unknown_dialect_is_refused_with_what_to_do(tmp_path: Path, events: list[kt.Event], said: str) -> None:
    with pytest.raises(RunError) as error:
        import_trace(kt.write(tmp_path, json.dumps({"traceEvents": events})))
    text = str(error.value)
    assert f"their categories ({said}) are none of torch.profiler's; record one with torch.profiler.profile(" in text
    assert "write it by export_chrome_trace" in text


# --- of 2026 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [7, "7"])
def test_nccls_own_number_comes_first(tmp_path: Path, number: Any) -> None:
    rows = imported(tmp_path, kt.training(args={**kt.COLLECTIVE, "seq_num": number})).rows
    assert shown(rows, "comm", "group", "seq") == [["0", 7]]


def test_a_kernels_number_and_the_annotations_group_are_taken_together(tmp_path: Path) -> None:
    events = kt.training()
    for event in events:
        if event["name"].startswith("nccl:"):
            event["args"] |= {"Process Group Name": "dp", "Seq": 3}
        if event["name"].startswith("ncclDev"):
            event["args"] |= {"seq_num": 12}
    assert shown(imported(tmp_path, events).rows, "comm", "group", "seq", "bytes") == [["dp", 12, 4000]]


# --- kernels that communicate -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "collective"),
    [
        ("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_bf16(ncclSymkDevWorkArgs4K)", ""),
        ("mscclKernel_Sum_half_Simple(ncclDevComm*, mscclAlgo*)", ""),
        ("void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(...)", "all_to_all"),
        ("void nvshmemi_transfer::barrier_on_stream_kernel<(threadgroup_t)2>()", ""),
        ("void sglang::cross_device_reduce_2stage<half, 8>(...)", "all_reduce"),
        ("void quickreduce::allreduce_prototype_twoshot<...>(...)", "all_reduce"),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<...>(...)", "all_reduce"),
        ("void tensorrt_llm::kernels::oneShotAllReduceKernel<half, 8, ...>(...)", "all_reduce"),
        ("void tensorrt_llm::kernels::moeA2ADispatchKernel<...>(...)", "all_to_all"),
        ("multimem_all_reduce_kernel<c10::BFloat16>", ""),
        ("void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<...>", "all_reduce"),
        ("oneccl_allreduce_pcie", ""),
        ("gemm", None),
        ("void at::native::reduce_kernel<512, 1>(...)", None),
        ("mine::ring_exchange", None),
    ],
)
def test_the_table_of_kernels_that_communicate(kernel: str, collective: str | None) -> None:
    assert CommNames().collective(kernel) == collective


def test_the_users_patterns_come_first_and_may_name_the_collective(tmp_path: Path) -> None:
    assert CommNames(["mine::ring_"]).collective("void mine::ring_exchange<4>()") == ""
    assert CommNames(["all_gather:mine::ring_"]).collective("void mine::ring_exchange<4>()") == "all_gather"
    assert CommNames(["deep_ep::.*combine"]).collective("void deep_ep::combine<4>()") == ""
    events = [kt.note("ProfilerStep#1", 0, 100), kt.call(1, 5), kt.kernel("mine::ring_exchange", 1, 10, 20)]
    assert shown(imported(tmp_path, events, ("all_reduce:mine::",)).rows, "comm", "name") == [["all_reduce"]]


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "'(' is no regular expression"), ("", "'' names no kernel"), ("all_reduce:", "names no kernel"),
        (".*", "'.*' fits every kernel; write part of the name"),
    ],
)  # fmt: skip
def test_a_pattern_that_is_none_is_refused(tmp_path: Path, pattern: str, why: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        CommNames([pattern])
    assert why in str(error.value)
    with pytest.raises(RunError, match="--comm-kernels: "):
        imported(tmp_path, kt.training(), (pattern,))


def with_own_kernel(folder: Path, name: str, comm_kernels: tuple[str, ...] = ()) -> Analysis:
    """A rank of two whose device computes for 20 us, and then is in a kernel of that name for 60."""
    events = [
        kt.note("ProfilerStep#1", 0, 100), kt.call(1, 1, 1), kt.kernel("gemm", 1, 10, 20), kt.call(2, 3, 1),
        kt.kernel(name, 2, 30, 60),
    ]  # fmt: skip
    return analyze(imported(folder, events, comm_kernels, distributedInfo={"rank": 0, "world_size": 2}))


def test_exposed_time_in_kernels_of_unknown_kind_is_told(tmp_path: Path) -> None:
    (note,) = with_own_kernel(tmp_path / "a", "void mine::ring_exchange<4>()").notes
    assert note == (
        "100 % of the time in which the devices do nothing that surely computes is in kernels of unknown kind (void "
        "mine::ring_exchange<4>()): if they communicate, import again with --comm-kernels PATTERN, part of "
        "their names; until then this time counts as computation"
    )
    known = with_own_kernel(tmp_path / "b", "void mine::ring_exchange<4>()", ("mine::ring_",))
    assert known.notes == ()
    assert known.device is not None
    assert known.device.ranks[0].communication_ns == 60_000
    assert with_own_kernel(tmp_path / "c", "void cutlass::gemm<4>()").notes == ()
    alone = imported(tmp_path / "d", [kt.note("ProfilerStep#1", 0, 9), kt.call(1, 1, 1), kt.kernel("mine::x", 1, 2, 5)])
    assert analyze(alone).notes == ()


def test_what_names_of_kernels_say() -> None:
    computes = ["void cutlass::Kernel2<...>", "ampere_sgemm_128x64_nn", "triton_poi_fused_add_0", "Cijk_Ailk_Bljk_SB"]
    assert [is_computation(name) for name in computes] == [True] * 4
    unknown = ["mine::ring_exchange", "kernel_0x7f", "my_all_reduce_add", "tokens_a2a_permute"]
    assert [is_computation(name) for name in unknown] == [False] * 4


# --- what the device waits for its host in ------------------------------------------------------


def launched(corr: int, at: float, length: float) -> list[kt.Event]:
    """A launch at `at` ms, and its kernel of `length` ms, at once."""
    return [kt.call(corr, at * MS, 10), kt.kernel("gemm", corr, (at + 0.02) * MS, length * MS)]


def host_does(*between: kt.Event) -> list[kt.Event]:
    """Three steps of 100 ms: the device works until 20.5 and from 79.5 on, and meanwhile the host does `between`."""
    found: list[kt.Event] = []
    for number in range(3):
        step = [kt.note(f"ProfilerStep#{number}", 0, 100 * MS), kt.op("aten::linear", 0.1 * MS, 0.3 * MS)]
        step += [*launched(1, 0.1, 20.38), *between, kt.op("aten::linear", 79.4 * MS, 0.3 * MS)]
        for event in [*step, *launched(2, 79.48, 20.4)]:
            moved = {**event, "ts": event["ts"] + 100 * MS * number}
            if "correlation" in event.get("args", {}):
                moved["args"] = {**event["args"], "correlation": 1000 * number + event["args"]["correlation"]}
            found.append(moved)
    return found


def judged(folder: Path, *between: kt.Event) -> tuple[list[str], Analysis]:
    analysis = analyze(imported(folder, host_does(*between)))
    return [finding.code for finding in analysis.findings if finding.is_problem], analysis


def launches(first: float, last: float, every: float) -> list[kt.Event]:
    """Kernels of 20 us, one after the other, each launched when the one before is done."""
    found, at, corr = list[kt.Event](), first, 10
    while at < last:
        found += [kt.op("aten::add", at * MS, 30), *launched(corr, at, 0.02)]
        at, corr = at + every, corr + 1
    return found


SAVED = "torch/serialization.py(850): save"
FOR_DATA = kt.note(NEXT, 20.6 * MS, 58.7 * MS)


@pytest.mark.parametrize(
    ("between", "code", "says"),
    [
        ([FOR_DATA], "data.stall", "for the host to load data"),
        ([FOR_DATA, kt.op("aten::stack", 30 * MS, 20 * MS)], "data.stall", "for the host to load data"),
        pytest.param(
            [kt.note("save_checkpoint", 20.6 * MS, 58.7 * MS)],
            "checkpoint.stall",
            "for the host to save",
            marks=pytest.mark.plants("checkpoint.stall"),
        ),
        (
            [kt.complete("python_function", SAVED, 20.6 * MS, 58.7 * MS, **{"Python id": 5})],
            "checkpoint.stall",
            "to save",
        ),
        pytest.param(
            [kt.op("aten::sort", 20.6 * MS, 58.7 * MS)],
            "compute.host-work",
            "while its host computes on the CPU",
            marks=pytest.mark.plants("compute.host-work"),
        ),
        ([], "compute.host-work", "while its host does something else than to launch"),
        pytest.param(
            launches(21, 79, 0.5),
            "compute.launch-bound",
            "launches come too slowly to keep it busy",
            marks=pytest.mark.plants("compute.launch-bound"),
        ),
    ],
    ids=["loader", "loader with operators", "span", "torch.save", "operator", "nothing", "launches"],
)
def test_what_the_device_waits_for_its_host_in(tmp_path: Path, between: list[kt.Event], code: str, says: str) -> None:
    codes, analysis = judged(tmp_path, *between)
    assert codes == [code]
    assert says in analysis.verdict.headline
    # Without the launches the device's own 42 ms of kernels stay, and what is still launched for them.
    assert analysis.findings[0].gain.ms == pytest.approx(58, abs=7)
    assert ("torch.compile" in str(analysis.findings[0].fixes)) == (code == "compute.launch-bound")


@pytest.mark.parametrize(("line_ms", "named"), [(57.0, True), (20.0, False)])
def test_the_line_that_the_host_is_away_in_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line_ms: float, named: bool
) -> None:
    """Samples of the stack have one line outside the phases, which has most of what the device waits, or less."""
    line = Line(("/home/me/train.py:7", "/home/me/train.py:126"), line_ms)
    monkeypatch.setattr("dsprof.analyzer.rules.compute.host_work.outside_phases", lambda study: line)
    (finding,) = [one for one in judged(tmp_path)[1].findings if one.is_problem]
    assert finding.title.endswith(", most in train.py:126") == named
    assert finding.fixes[0].title.startswith("train.py:126: compute it on the device") == named
    assert [(change["file"], change["line"]) for change in finding.fixes[0].patch] == [
        ("/home/me/train.py", 126)
    ] * named


def test_what_the_host_computes_is_named(tmp_path: Path) -> None:
    _, analysis = judged(tmp_path, kt.op("aten::sort", 21 * MS, 40 * MS), kt.op("aten::unique", 62 * MS, 10 * MS))
    evidence = {item.metric: item.value for item in analysis.findings[0].evidence}
    assert evidence["aten::sort, a step of a rank"] == 40.0
    assert evidence["aten::unique, a step of a rank"] == 10.0
    assert evidence["of it, the host was in operators on the CPU"] == 50.0


def test_a_host_that_is_ahead_costs_its_device_nothing(tmp_path: Path) -> None:
    """It loads for 58 ms, and the device is busy meanwhile."""
    events = [kt.note("ProfilerStep#0", 0, 100 * MS), *launched(1, 1.1, 90), FOR_DATA, *launched(2, 80.1, 8)]
    events[-1]["ts"] = 91.2 * MS
    assert [finding.code for finding in analyze(imported(tmp_path, events)).findings if finding.is_problem] == []
