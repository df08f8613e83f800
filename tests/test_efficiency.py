"""MFU, samples and tokens a second from rows whose numbers are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from records import Record, capture_of, derive, phase
from synthetic import MS

from dsprof.analyzer.align.groups import find_mesh
from dsprof.analyzer.align.topology import Topology
from dsprof.analyzer.work.mfu import Efficiency, RankWork, judge_efficiency, sum_work
from dsprof.analyzer.work.module_times import module_times, sum_modules
from dsprof.data_sheets import DEVICES, FROM_MEMORY, find_device
from dsprof.run import RankInfo, RunInfo
from dsprof.schema import Kind
from dsprof.trace.capture import Gap
from dsprof.trace.derive import trace_rows

GFLOP = 1e9


def gauge(name: str, start: float, end: float, value: float, **more: Any) -> Record:
    return (Kind.GAUGE, name, start, end, {"value": value, **more})


def step(at: float, size: float = 64.0, optimizers: int = 1) -> list[Record]:
    """100 ms, a batch of 8 x 16 tokens."""
    rows = [
        phase("forward", at, at + 40, value=size),
        (Kind.MODULE, "GPT", at, at + 40, {}),
        gauge("samples", at, at, 8, module="GPT"),
        gauge("tokens", at, at, 128, module="GPT"),
        phase("forward", at + 41, at + 43, value=2),
        (Kind.MODULE, "Loss", at + 41, at + 43, {}),
        gauge("samples", at + 41, at + 41, 999, module="Loss"),
        phase("backward", at + 45, at + 80),
    ]
    return [*rows, *(phase("optimizer", at + 90 + i, at + 90.5 + i) for i in range(optimizers))]


def counted(start: float, end: float, dtype: str = "float32") -> list[Record]:
    of: dict[str, float] = {"forward": 3 * GFLOP, "backward": 6 * GFLOP, "recompute": 1 * GFLOP}
    return [gauge(f"flops.{dtype}", start, end, value, module="GPT", purpose=what) for what, value in of.items()] + [
        gauge("uncounted.flash_attn::forward", start, end, 12)
    ]


def told(start: float, end: float, steps: int = 1, dtype: str = "float32") -> dict[str, Any]:
    """The same as a fact."""
    of: dict[str, float] = {"forward": 3 * GFLOP, "backward": 6 * GFLOP, "recompute": 1 * GFLOP}
    return {
        "fact": "flops",
        "begin_ns": round(start * MS),
        "end_ns": round(end * MS),
        "thread": 7,
        "optimizer_steps": steps,
        "operations": [["GPT", what, dtype, value] for what, value in of.items()],
        "uncounted": {"flash_attn::forward": 12},
    }


def work_of(*records: Record, native: bool = True, facts: list[dict[str, Any]] | None = None) -> RankWork:
    found = sum_work(derive(*records, facts=facts), native)
    assert found is not None
    return found


FOUR_STEPS = [record for i in range(4) for record in step(100.0 * i)]


def test_a_rank_tells_the_operations_and_the_batch_of_a_step() -> None:
    """The loss is a module of its own and takes less time: its input is not the batch."""
    expected = RankWork(
        flops={
            ("forward", "float32"): 3 * GFLOP, ("backward", "float32"): 6 * GFLOP, ("recompute", "float32"): GFLOP,
        },
        why="",
        uncounted={"flash_attn::forward": 12},
        sizes=(66, 66),
        module="GPT",
        samples=8,
        tokens=128,
    )  # fmt: skip
    assert work_of(*FOUR_STEPS, facts=[told(193, 294)]) == expected
    assert work_of(*FOUR_STEPS, *counted(193, 294)) == expected  # a capture of an older version


def test_operations_stay_where_the_records_of_their_step_were_given_up() -> None:
    """Whether that step was as large as the others is then not known, and is said."""
    steps = [record for i in range(8) for record in step(100.0 * i)]
    kept = [record for record in steps if not 150 <= record[2] < 450]
    before = sum(record[2] < 150 for record in kept)
    capture = capture_of(*kept, facts=[told(193, 294)])
    rows = trace_rows(replace(capture, gaps=[Gap(before, 4, 3, given_up=True)]), 0, 0)
    found = sum_work(rows, native=True)
    assert found is not None
    assert (found.flops or {})["backward", "float32"] == 6 * GFLOP
    assert (found.sizes, found.cut) == (None, True)
    table = module_times(sum_modules(rows, 0)).set_index("module")
    assert table["gflop"].to_dict() == {"GPT": 9, "Loss": 0}
    (note,) = judge(run_of(), {0: replace(found, uncounted={})}).notes
    assert note == (
        "records of the step that was counted are missing on rank 0: whether its input was as large as that of the "
        "others is not known"
    )


def test_a_step_in_which_nothing_is_counted_is_one_all_the_same() -> None:
    fact = {**told(193, 294), "operations": [], "uncounted": {}}
    assert work_of(*FOUR_STEPS, facts=[fact]).flops == {}


@pytest.mark.parametrize("broken", [{"operations": [[1, 2]]}, {"begin_ns": None}, {"uncounted": 5}, {"end_ns": 0}])
def test_a_fact_that_is_damaged_says_nothing(broken: dict[str, Any]) -> None:
    found = work_of(*FOUR_STEPS, facts=[{**told(193, 294), **broken}, {"fact": "flops", "dtypes": ["float32"]}])
    assert (found.flops, found.samples) == (None, 8)


def test_of_several_optimizers_one_turn_of_each_is_a_step() -> None:
    """They were counted in four spans, one for each optimizer's step, the first of them in the middle of a step."""
    steps = [record for i in range(4) for record in step(100.0 * i, optimizers=2)]
    spans = [(190.7, 191.6), (191.7, 290.6), (290.7, 291.6), (291.7, 390.6)]
    expected = 2 * 3 * GFLOP
    flops = work_of(*steps, facts=[told(*span) for span in spans]).flops
    assert (flops or {})["forward", "float32"] == expected
    flops = work_of(*steps, *(row for span in spans for row in counted(*span))).flops
    assert (flops or {})["forward", "float32"] == expected


def test_a_part_of_a_step_is_none() -> None:
    """One optimizer of two was stepped while operations were counted."""
    steps = [record for i in range(4) for record in step(100.0 * i, optimizers=2)]
    found = work_of(*steps, facts=[told(190.7, 191.6)])
    assert (found.flops, found.why) == (None, "a step is 2 steps of optimizers, of which 1 were counted")


def test_nothing_is_said_below_level_full() -> None:
    rows = derive(phase("forward", 0, 40), phase("backward", 45, 80), phase("optimizer", 90, 91))
    assert sum_work(rows, native=True) is None


def test_without_the_helper_it_says_so() -> None:
    assert work_of(*FOUR_STEPS, native=False).why == "the native helper counts them, and it was not there"


# --- all ranks ----------------------------------------------------------------------------------

WORK = RankWork(
    flops={("forward", "bfloat16"): 30e12, ("backward", "bfloat16"): 60e12, ("recompute", "bfloat16"): 10e12},
    uncounted={},
    sizes=(66, 66),
    module="GPT",
    samples=8,
    tokens=128,
)


def communications(run: RunInfo, **purposes: str) -> pd.DataFrame:
    """One collective of each group of the job, on all of its ranks: of what it is for, "gradient" if that is not said;
    "all_to_all" is a name."""
    rows = [
        {
            "kind": "comm", "rank": rank, "step": 1, "group": group, "seq": 0, "peer": None, "bytes": 64,
            "purpose": "other" if of == "all_to_all" else of, "name": of if of == "all_to_all" else "all_reduce",
            "issue_ns": 1, "arrival_ns": None,
        }
        for group, fact in run.groups.items()
        for of in [purposes.get(f"group_{group}", "gradient")]
        for rank in fact["ranks"]
    ]  # fmt: skip
    columns = ["kind", "rank", "step", "group", "seq", "peer", "bytes", "purpose", "name", "issue_ns", "arrival_ns"]
    return pd.DataFrame(rows, columns=columns)


def run_of(name: str = "NVIDIA H100 80GB HBM3", ranks: int = 2, **more: Any) -> RunInfo:
    facts = [{"fact": "device", "type": "cuda", "name": name, "tf32": False, "rank": rank} for rank in range(ranks)]
    return RunInfo(id="run", name="run", command=[], world_size=ranks, **{"facts": facts, **more})


def judge(run: RunInfo, work: Mapping[int, RankWork], topology: Topology | None = None, **purposes: str) -> Efficiency:
    stages = topology or Topology()
    mesh = find_mesh(communications(run, **purposes), run, stages)
    found = judge_efficiency(run, work, 200.0, mesh, stages)
    assert found is not None
    return found


def test_mfu_is_without_what_is_computed_again() -> None:
    """90 TFLOP in 200 ms are 450 TFLOP/s of 989.5."""
    found = judge(run_of(), {0: WORK, 1: WORK})
    assert found.mfu == pytest.approx(450 / 989.5)
    assert found.hfu == pytest.approx(500 / 989.5)
    assert found.flops_a_second == pytest.approx(2 * 450e12)
    assert found.peak.startswith("H100 SXM in bfloat16, 989.5 TFLOP/s (https://www.nvidia.com/")


def test_formats_are_compared_with_peaks_of_their_own() -> None:
    mixed = RankWork(flops={("forward", "bfloat16"): 98.95e12, ("backward", "float32"): 3.35e12})
    found = judge(run_of(), {0: mixed, 1: mixed})
    assert found.mfu == pytest.approx((0.1 + 0.05) / 0.2)


def test_an_unknown_device_has_no_mfu() -> None:
    found = judge(run_of("NVIDIA H100 80GB HBM3 MIG 1g.10gb"), {0: WORK, 1: WORK})
    assert (found.mfu, found.hfu) == (None, None)
    assert found.why_no_mfu == "no data sheet is known of NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    assert found.flops["forward"] == 30e12


def test_a_cpu_is_compared_with_what_was_measured() -> None:
    run = run_of(facts=[], cpu_peaks=[{"host": "a", "ranks": [0, 1], "threads": 2, "flops": {"bfloat16": 900e12}}])
    assert judge(run, {0: WORK, 1: WORK}).mfu == pytest.approx(0.5)
    assert judge(run_of(facts=[]), {0: WORK, 1: WORK}).why_no_mfu.startswith(
        "what the CPU of rank 0 can compute was not"
    )


def cpu_peak(host: str, ranks: list[int], flops: float) -> dict[str, Any]:
    return {"host": host, "ranks": ranks, "threads": 2, "flops": {"bfloat16": flops}}


def test_each_rank_is_compared_with_its_own_host() -> None:
    """Rank 1 was on host a before it moved to b."""
    peaks = [cpu_peak("a", [0, 1], 900e12), cpu_peak("b", [1], 450e12)]

    def place(rank: int, host: str, restart: int = 0) -> RankInfo:
        return RankInfo(rank, restart, host, 100 + rank, "", True, 0, 0, 0, 0, 0, True)

    run = run_of(facts=[], cpu_peaks=peaks)
    run.ranks = [place(0, "a"), place(1, "a"), place(1, "b", restart=1)]
    found = judge(run, {0: WORK, 1: WORK})
    assert found.mfu == pytest.approx((0.5 + 1.0) / 2)
    assert found.peak == (
        "the CPU in bfloat16, 4.5e+05 to 9e+05 GFLOP/s (measured after the job, 2 threads, nothing beside it)"
    )
    run.cpu_peaks = peaks[:1]
    unmeasured = judge(run, {0: WORK, 1: WORK})
    assert unmeasured.why_no_mfu.startswith("what the CPU of rank 1 can compute was not measured")


def test_steps_of_unequal_size_have_no_mfu() -> None:
    found = judge(run_of(), {0: RankWork(flops=WORK.flops, sizes=(100, 66))})
    assert (found.mfu, found.flops_a_second) == (None, None)
    assert found.why_no_mfu == "steps differ in the size of their input, and one was counted"
    assert found.notes == ("on rank 0 the step that was counted has an input of 100 elements, the mean step 66",)


def test_what_has_no_formula_is_a_note() -> None:
    found = judge(run_of(), {0: RankWork(flops=WORK.flops, uncounted={"flash_attn::forward": 12})})
    assert found.notes == ("what flash_attn::forward (12 calls) computes is not known",)


def throughput(found: Efficiency) -> list[tuple[str, float | None, tuple[int, ...]]]:
    return [(item.what, item.a_second, item.over) for item in found.throughput]


def test_replicas_are_summed() -> None:
    """8 samples in 200 ms on each rank."""
    run = run_of(groups={"0": {"ranks": [0, 1], "size": 2}})
    found = judge(run, {0: WORK, 1: WORK})
    assert throughput(found) == [("samples", 80, (0, 1)), ("tokens", 1280, (0, 1))]


def test_tensor_parallel_ranks_are_not() -> None:
    """Ranks 0 and 1 hold parts of one replica, 2 and 3 of another."""
    run = run_of(ranks=4, groups={"5": {"ranks": [0, 2]}, "6": {"ranks": [1, 3]}})
    found = judge(run, dict.fromkeys(range(4), WORK))
    assert throughput(found) == [("samples", 80, (0, 2)), ("tokens", 1280, (0, 2))]


def test_ranks_that_hold_parts_of_one_replica_share_its_batch() -> None:
    run = run_of(groups={"0": {"ranks": [0, 1]}})
    found = judge(run, {0: WORK, 1: WORK}, group_0="tensor-parallel")
    assert throughput(found) == [("samples", 40, (0,)), ("tokens", 640, (0,))]


def test_gradients_that_a_tensor_parallel_group_reduces_make_no_replicas_of_it() -> None:
    """As those of norms are under sequence parallelism: ranks 0 and 1 hold parts of one replica all the same."""
    groups = {"1": {"ranks": [0, 1]}, "2": {"ranks": [2, 3]}, "3": {"ranks": [0, 2]}, "4": {"ranks": [1, 3]}}
    facts = [{"fact": "tensor_parallel", "group": group, "rank": 0} for group in "12"]
    run = run_of(ranks=4, groups=groups, facts=facts)
    found = judge(run, dict.fromkeys(range(4), WORK))
    assert throughput(found) == [("samples", 80, (0, 2)), ("tokens", 1280, (0, 2))]


def test_ranks_that_divide_a_sequence_have_its_tokens_and_not_its_samples_each() -> None:
    """Ranks 0 and 1 share sequences, 2 and 3 others; all four average gradients."""
    groups = {"1": {"ranks": [0, 1]}, "2": {"ranks": [2, 3]}, "3": {"ranks": [0, 1, 2, 3]}}
    run = run_of(ranks=4, groups=groups)
    found = judge(run, dict.fromkeys(range(4), WORK), group_1="all_to_all", group_2="all_to_all")
    assert throughput(found) == [("samples", 80, (0, 2)), ("tokens", 2560, (0, 1, 2, 3))]


def test_of_a_pipeline_the_first_stage_tells() -> None:
    run = run_of(ranks=4, groups={"5": {"ranks": [0, 1]}, "6": {"ranks": [2, 3]}})
    work = {rank: WORK if rank >= 2 else RankWork(samples=8, module="Stage") for rank in range(4)}
    stages = Topology({0: (1,), 1: (1,), 2: (0,), 3: (0,)})
    assert throughput(judge(run, work, stages)) == [
        ("samples", 80, (2, 3)), ("tokens", 1280, (2, 3)),
    ]  # fmt: skip


def test_shards_and_their_replicas_are_one_set() -> None:
    groups = {"1": {"ranks": [0, 1]}, "2": {"ranks": [2, 3]}, "3": {"ranks": [0, 2]}, "4": {"ranks": [1, 3]}}
    found = judge(run_of(ranks=4, groups=groups), dict.fromkeys(range(4), WORK))
    assert throughput(found)[0] == ("samples", 160, (0, 1, 2, 3))


def test_where_it_is_not_known_who_averages_each_rank_stands_for_itself() -> None:
    found = judge(run_of(), {0: WORK, 1: WORK})
    assert throughput(found) == [("samples", None, ()), ("tokens", None, ())]
    assert found.throughput[0].each == 40


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("A100-SXM4-40GB", "A100"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GB200", None),
    ],
)
def test_devices_by_the_name_that_torch_gives_them(name: str, known: str | None) -> None:
    found = find_device(name)
    assert (found.name if found else None) == known


def test_float32_is_tf32_only_where_it_is_allowed() -> None:
    h100 = find_device("NVIDIA H100 80GB HBM3")
    assert h100 is not None
    assert (h100.flops("float32", False), h100.flops("float32", True)) == (67e12, 494.5e12)
    v100 = find_device("Tesla V100-SXM2-16GB")
    assert v100 is not None
    assert (v100.flops("float32", True), v100.flops("bfloat16", False)) == (15.7e12, None)


def test_every_figure_has_a_source() -> None:
    assert all(device.source.startswith("https://") for device in DEVICES)
    told = [one for one in DEVICES if (one.tb_a_second, one.memory_gib, one.link_gb_s) != (None, None, None)]
    assert all("http" in one.memory_source or FROM_MEMORY in one.memory_source for one in told)
