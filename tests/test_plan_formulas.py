"""`dsprof plan --ranks N`: layouts, memory, time and cost from formulas, without a run."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dsprof.cli import main
from dsprof.plan.cost import COEFFICIENTS, cost
from dsprof.plan.formulas import model_of, plan_from_formulas
from dsprof.plan.hardware import GPUS, Cluster, UnknownGpu, find_gpu, read_latency, read_rate
from dsprof.plan.layouts import NoLayout, TransformerModel, Wanted, describe, layouts
from dsprof.plan.memory import CONTEXT_GIB, FRAGMENTED, GIB, memory
from dsprof.plan.steps import StepShapes

A100 = Cluster(GPUS["a100"], "bfloat16", 200.0)
MEASURED = Cluster(GPUS["a100"], "float16", 8 * 200 / 8)
SEVEN = TransformerModel(hidden=4096, heads=32, layers=32, sequence=2048, vocabulary=51200, global_batch=256)


def shapes(**changed: float) -> StepShapes:
    row = {
        "hidden": 4096.0, "heads": 32.0, "layers": 32.0, "sequence": 2048.0, "global_batch": 64.0, "micro_batch": 1.0,
        "tp": 1.0, "dp": 8.0, "pp": 1.0, "vocabulary": 1.0,
    }  # fmt: skip
    return StepShapes.of([{**row, **changed}])


# --- published steps -------------------------------------------------------------------------------------------------

TABLE_1 = [
    (2304, 24, 24, 1, 1, 32, 512, 137), (3072, 32, 30, 2, 1, 64, 512, 138), (4096, 32, 36, 4, 1, 128, 512, 142),
    (6144, 48, 40, 8, 1, 256, 1024, 135), (8192, 64, 48, 8, 2, 512, 1536, 138), (10240, 80, 60, 8, 4, 1024, 1792, 140),
    (12288, 96, 80, 8, 8, 1536, 2304, 148), (16384, 128, 96, 8, 16, 1920, 2160, 155),
    (20480, 128, 105, 8, 35, 2520, 2520, 163), (25600, 160, 128, 8, 64, 3072, 3072, 163),
]  # fmt: skip
"""Narayanan et al., 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (arXiv
2104.04473), table 1: width, heads, layers, tensor and pipeline parallelism, A100s, global batch, TFLOP/s a GPU.

Also from the paper: eight GPUs a node with eight adapters of 200 Gb/s, sequences of 2048, a vocabulary of 51200,
activations computed again, and equation 3, by which operations are counted. Assumed here: the micro-batch, which the
table does not tell, and 1F1B, where the paper interleaves, in how many chunks is not told."""
TABLE_2 = [
    (12288, 96, 96, 8, 12, 384, 1536, 153), (12288, 96, 96, 8, 12, 768, 1536, 149),
    (12288, 96, 96, 8, 12, 1536, 1536, 141), (20480, 128, 105, 8, 35, 560, 2240, 171),
    (20480, 128, 105, 8, 35, 1120, 2240, 167), (20480, 128, 105, 8, 35, 2240, 2240, 159),
]  # fmt: skip
"""Its table 2, the rows of "PTD parallelism", where the micro-batch is told: 1. The table gives 96 and 280 as the
product of tensor and pipeline parallelism; that 8 of it are tensor parallel is taken from table 1, the sizes of the
model of 174.6 billion parameters from section 5.3."""


def per_gpu(row: tuple[int, ...], micro_batch: int) -> float:
    """TFLOP/s that the model tells, by equation 3."""
    hidden, heads, layers, tp, pp, gpus, batch, _ = row
    step = shapes(
        hidden=hidden, heads=heads, layers=layers, tp=tp, pp=pp, dp=gpus // tp // pp, global_batch=batch,
        micro_batch=micro_batch, vocabulary=51200,
    )  # fmt: skip
    seconds = float(cost(MEASURED.expected()[0], step).step[0]) / 1e3
    flops = 96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
    return flops / seconds / gpus / 1e12


@pytest.mark.parametrize("row", TABLE_1, ids=lambda row: f"{row[5]} GPUs")
def test_published_throughput_within_five_points_of_the_peak(row: tuple[int, ...]) -> None:
    """With a micro-batch of 2."""
    assert 100 * abs(per_gpu(row, 2) - row[-1]) / 312 < 5


@pytest.mark.parametrize("row", TABLE_2, ids=lambda row: f"{row[0]} on {row[5]} GPUs")
def test_published_throughput_where_the_micro_batch_is_told(row: tuple[int, ...]) -> None:
    """Nothing is assumed but 1F1B."""
    assert 100 * abs(per_gpu(row, 1) - row[-1]) / 312 < 5


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "bytes_each"), [(0, 16.0), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)], ids=lambda value: str(value)
)
def test_states_by_zero_stage(zero: int, bytes_each: float) -> None:
    """16P; 4P + 12P/N; 2P + 14P/N; 16P/N, in mixed precision with Adam on 8 ranks."""
    found = memory(shapes(zero=float(zero)))
    parameters = 12 * 32 * 4096**2 + 4096
    states = found.parameters + found.gradients + found.optimizer
    assert states[0] * GIB == pytest.approx(parameters * bytes_each)


def test_activations_kept_and_computed_again() -> None:
    """34 s b h a layer are kept; else 2 s b h, and one layer whole."""
    tokens = 2048 * 4096
    kept, again = (memory(shapes(recompute=flag)).activations[0] * GIB for flag in (0.0, 1.0))
    assert kept == pytest.approx(32 * 34 * tokens, rel=1e-3)
    assert again == pytest.approx((32 * 2 + 34) * tokens, rel=1e-3)


def test_a_first_stage_holds_as_many_micro_batches_as_there_are_stages() -> None:
    one, four = (memory(shapes(recompute=0.0, pp=pp, dp=1.0)).activations[0] for pp in (1.0, 4.0))
    assert four == pytest.approx(one, rel=1e-3)  # a quarter of the layers, four times


def test_what_is_reserved_beside() -> None:
    found = memory(shapes())
    used = found.total - found.reserved
    assert found.reserved == pytest.approx(used * FRAGMENTED + CONTEXT_GIB)


# --- layouts ---------------------------------------------------------------------------------------------------------


def test_all_layouts_divide_the_job() -> None:
    found = layouts(SEVEN, 16, 8, Wanted())
    assert len(found) > 50
    assert set(found.tp * found.dp * found.pp) == {16.0}
    assert set(found.global_batch % (found.dp * found.micro_batch)) == {0.0}
    assert set(found.tp) == {1.0, 2.0, 4.0, 8.0}
    assert set(found.zero[found.pp > 1]) == {1.0}


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (Wanted(tp=2, dp=4, pp=4), "--tp 2 x --dp 4 x --pp 4 are 32 ranks, and --ranks says 16"),
        (Wanted(tp=3), "--tp 3 does not divide --ranks 16"),
        (Wanted(tp=2, pp=64), "--tp 2 x --pp 64 does not divide --ranks 16"),
        (Wanted(micro_batch=7), "no layout of 16 ranks divides"),
    ],
)
def test_layouts_that_there_are_not(wanted: Wanted, said: str) -> None:
    with pytest.raises(NoLayout, match=said):
        layouts(SEVEN, 16, 8, wanted)


def test_the_best_layouts_fit_and_are_ordered() -> None:
    plan = plan_from_formulas(SEVEN, 16, A100, 8, Wanted())
    assert (plan.best.need.total <= 80).all()
    assert list(plan.best.predicted.ms) == sorted(plan.best.predicted.ms)
    assert (plan.best.predicted.low < plan.best.predicted.ms).all()
    assert [count for count, _ in plan.curve] == [4, 8, 16, 32, 64]
    first = {describe(plan.best.shapes, row) for row in range(3)}
    assert len(first) == 3


def test_what_does_not_fit_says_how_much_is_missing() -> None:
    with pytest.raises(NoLayout, match=r"no layout fits into 8 GiB a rank: the smallest of \d+ needs \d+ GiB \(tp"):
        plan_from_formulas(SEVEN, 4, A100, 8, Wanted(), memory_gib=8)


def test_a_model_by_its_parameters_alone() -> None:
    model, assumed = model_of(7e9, None, None, None, 2048, 32000, 256)
    assert (model.layers, model.hidden, model.heads) == (32, 4096, 32)
    assert assumed[0] == "the model has 32 layers of width 4096, the usual shape of 7e+09 parameters"
    with pytest.raises(NoLayout, match="the layers of the model are not known"):
        model_of(None, None, None, None, 2048, 32000, 256)


# --- words -----------------------------------------------------------------------------------------------------------


def test_names_of_devices() -> None:
    assert find_gpu("H100").memory_gib == 80
    assert find_gpu("RTX4090").name == "RTX 4090"
    with pytest.raises(UnknownGpu, match="--gpu h10: is not known; did you mean h100"):
        find_gpu("h10")


def test_rates_and_times() -> None:
    assert (read_rate("400Gb"), read_rate("50GB/s"), read_rate("3.2Tbps")) == (50.0, 50.0, 400.0)
    assert (read_latency("5us"), read_latency("0.02ms")) == (5.0, 20.0)
    for word in ("400", "fastGb", "-1GB"):
        with pytest.raises(ValueError, match=r"is no rate|is not"):
            read_rate(word)


# --- the verb --------------------------------------------------------------------------------------------------------

ASKED = ["plan", "--ranks", "16", "--params", "7e9", "--global-batch", "256", "--gpu", "h100"]


def test_the_verb_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--tokens", "1e12", "--price", "2"]) == 0
    said = capsys.readouterr().out
    for words in (
        "on 16 ranks of H100 SXM",
        "GPU hours",
        "which cost",
        "strong scaling: the global batch stays 256 sequences",
        "the network between nodes is a guess of 100 GB/s a node: give --bandwidth",
        "to know more: run a few steps",
    ):
        assert words in said

    assert main([*ASKED, "--bandwidth", "400Gb", "--steps", "1000", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["layouts"]) == 3
    best = told["layouts"][0]
    assert told["cost"]["gpu_hours"][0] == pytest.approx(best["step"]["ms"] * 1000 * 16 / 3.6e6)
    assert told["cost"]["money"] is None
    assert best["step"]["low"] < best["step"]["ms"] < best["step"]["high"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "h10"], "did you mean h100"),
        (["--tp", "3"], "--tp 3 does not divide --ranks 16"),
        (["--bandwidth", "fast"], "'fast' is no rate; write 400Gb (bits) or 50GB (bytes), a second"),
        (["--dtype", "int4"], "--dtype int4: is not known; write one of bf16, fp16, fp32"),
        (["--gpu", "v100"], "--dtype bf16: the data sheet of V100 SXM2 has no peak for it"),
        (["--heads", "7"], "--heads 7 does not divide the width 4096"),
        (["--params", "-7e9"], "--params -7e+09: has to be a number above 0"),
        (["--params", "nan"], "--params nan: has to be a number above 0"),
        (["--memory-gib", "0"], "--memory-gib 0: has to be a number above 0"),
        (["--price", "-2"], "--price -2: has to be a number above 0"),
        (["--tokens", "1e9", "--steps", "5"], "--tokens and --steps both say how long the training is"),
        (["--global-batch", "same"], "--global-batch same: keeps that of a RUN, and none is given"),
        (["--global-batch", "many"], "--global-batch many: is not a whole number above 0"),
    ],
)
def test_what_the_verb_refuses(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, *words]) == 2
    assert said in capsys.readouterr().err


def test_sizes_that_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--ranks", "16", "--global-batch", "256"]) == 2
    assert (
        "the layers of the model are not known: give --hidden and --layers, or --params 7e9" in capsys.readouterr().err
    )
    assert main(["plan", "--ranks", "16", "--params", "7e9"]) == 2
    assert "--global-batch is not given" in capsys.readouterr().err


def test_a_price_alone_is_told_for_a_thousand_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--price", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    hours = told["layouts"][0]["step"]["ms"] * 1000 * 16 / 3.6e6
    assert (told["cost"]["gpu_hours"][0], told["cost"]["money"][0]) == pytest.approx((hours, 2 * hours))


def test_heads_that_are_not_given_divide_the_width() -> None:
    model, assumed = model_of(None, 1000, 4, None, 2048, 32000, 8)
    assert model.heads == 5
    assert "it has 5 heads, of 200" in assumed


def test_what_is_fixed_of_a_layout_is_fixed_in_the_curve_too() -> None:
    plan = plan_from_formulas(SEVEN, 16, A100, 8, Wanted(recompute=True, tp=2))
    assert len(plan.curve) > 2
    for _, ranked in plan.curve:
        assert set(ranked.shapes.recompute) == {1.0}
        assert set(ranked.shapes.tp) == {2.0}


def test_a_number_of_ranks_that_nobody_has_is_divided_at_once() -> None:
    with pytest.raises(NoLayout, match="no layout of 999999999989 ranks divides"):
        layouts(SEVEN, 999_999_999_989, 8, Wanted())  # a prime number


def test_what_no_data_sheet_was_compared_with_is_known_less() -> None:
    """The link of H200 NVL, and the memory's rate of V100 PCIe, are from memory."""
    names = [one.name for one in COEFFICIENTS]
    nvl, sxm = (Cluster(GPUS[name], "bfloat16").expected() for name in ("h200-nvl", "h200"))
    link = names.index("node_link_gb_s")
    assert (nvl.spread[link], sxm.spread[link]) == (0.7, 0.3)
    assert (nvl.most[link], sxm.most[link]) == (np.inf, 450.0)
    v100 = Cluster(GPUS["v100-pcie"], "float16").expected()
    assert v100.spread[names.index("score_passes")] == 0.7
    unchecked = {gpu.name: gpu.unchecked for gpu in GPUS.values() if gpu.unchecked}
    assert unchecked == {"H200 NVL": ("link_gb_s",), "V100 PCIe": ("tb_a_second",)}


def test_each_device_has_memory_and_a_link() -> None:
    assert GPUS["a100"].tb_a_second == 2.039
    assert GPUS["a100-40gb"].tb_a_second == 1.555
    for gpu in GPUS.values():
        assert gpu.memory_gib
        assert gpu.link_gb_s
        assert gpu.source.startswith("https://")
