"""`dsprof plan RUN --ranks N`: what a measured run would do with more replicas, another batch or another device."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from math import log
from pathlib import Path

import pytest
from synthetic import Job, constant, write_capture

from dsprof.analyzer.study import Study, study
from dsprof.cli import main
from dsprof.plan.changes import Batch, CannotPlan, device_change
from dsprof.plan.from_run import plan_from_run
from dsprof.plan.hardware import GPUS
from dsprof.plan.network import Network

LINK = Job(backward=constant(200), buckets=(8 << 20, 24 << 20), latency_ms=4, jitter=0.0)
"""Two ranks. Of two transfers, 4 ms of latency and 1 ms a MiB each, the first is hidden and the step waits 28 ms for
the second: 1 + 40 + 200 + 28 + 5 ms."""
NODE = Network(gpus_per_node=64)


@cache
def measured() -> Study:
    return study(LINK.trace())


def test_the_run_itself_is_what_was_measured() -> None:
    plan = plan_from_run(measured(), 2, NODE)
    assert plan.asked.ms == pytest.approx(274, abs=0.1)
    assert plan.asked.efficiency == pytest.approx(1.0)
    assert plan.asked.transfer_ms == pytest.approx(40, abs=0.1)
    assert (plan.replicas, plan.asked.parts["compute"]) == (2, pytest.approx(240, abs=0.1))


def test_eight_ranks_by_hand() -> None:
    """Latency by log2(8) / log2(2) = 3, bytes by (7/8) / (1/2) = 1.75: 24 and 56 ms, of which 12 are hidden."""
    plan = plan_from_run(measured(), 8, NODE)
    assert plan.asked.transfer_ms == pytest.approx(80, abs=0.2)
    assert plan.asked.parts["comm_exposed"] == pytest.approx(68, abs=0.3)
    assert plan.asked.ms == pytest.approx(314, abs=0.5)
    assert plan.asked.low < 314 < plan.asked.high
    assert plan.asked.efficiency == pytest.approx(274 / 314, abs=0.002)
    assert [one.ranks for one in plan.curve] == [2, 4, 8]


def test_a_network_that_was_never_measured_is_a_guess() -> None:
    """1 GB/s of which 80 % are reached: 32 MiB twice, 7/8 of it."""
    inside = plan_from_run(measured(), 8, NODE)
    guessed = plan_from_run(measured(), 8, Network(4))
    given = plan_from_run(measured(), 8, Network(4, gb_s=0.5, latency_us=1000.0))
    assert guessed.asked.ms == pytest.approx(inside.asked.ms)
    assert guessed.asked.high - guessed.asked.low > 1.5 * (inside.asked.high - inside.asked.low)
    assert any("is a guess; give --bandwidth" in one for one in guessed.assumptions)
    assert any("the one given, and so a guess" in one for one in given.assumptions)
    bytes_ms = 2 * 32 * 2**20 * 7 / 8 / (0.5 * 0.8) / 1e6
    assert given.asked.transfer_ms == pytest.approx(bytes_ms + 24 + 2 * 3 * 1.0, rel=0.01)
    assert given.tells_most.startswith("run a few steps on two nodes")


def test_scaling_is_said_in_words() -> None:
    plan = plan_from_run(measured(), 8, NODE)
    assert plan.assumptions[0] == "weak scaling: each rank keeps its batch, so the global batch is 4 times the run's"


def test_the_same_batch_on_four_times_the_ranks_by_hand() -> None:
    """A quarter of forward and backward, and of what they hide: 60 ms and 3. The rest of the 80 ms is waited for; 1 ms
    of loading shrinks as well, 5 of the optimizer do not."""
    plan = plan_from_run(measured(), 8, NODE, same_batch=True)
    assert plan.scaling == "strong"
    assert plan.asked.parts["compute"] == pytest.approx(60, abs=0.1)
    assert plan.asked.parts["comm_exposed"] == pytest.approx(77, abs=0.3)
    assert plan.asked.ms == pytest.approx(60 + 77 + 0.25 + 5, abs=0.5)
    assert plan.asked.efficiency == pytest.approx(274 / 4 / 142.25, abs=0.005)
    weak = plan_from_run(measured(), 8, NODE).asked
    assert (plan.asked.high - plan.asked.low) / plan.asked.ms > (weak.high - weak.low) / weak.ms
    assert plan.measured.ms == pytest.approx(274, abs=0.1)
    assert plan.assumptions[0].startswith("strong scaling: the global batch is the run's; a rank's micro-batch is 0.25")


@pytest.mark.parametrize(
    ("batch", "share", "smaller"),
    [
        (Batch(), 1.0, False),
        (Batch(keep=True), 0.25, True),
        (Batch(keep=True, accumulated=8), 0.25, False),
        (Batch(keep=True, accumulated=2), 0.25, True),
        (Batch(of_run=64, wanted=128), 0.5, True),
        (Batch(of_run=64, wanted=128, accumulated=4), 0.5, False),
        (Batch(of_run=64, wanted=256), 1.0, False),
    ],
)
def test_the_share_of_a_rank_from_two_to_eight_replicas(batch: Batch, share: float, smaller: bool) -> None:
    assert batch.share(8, 2) == pytest.approx(share)
    assert batch.smaller(share) == smaller


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (Batch(of_run=64, wanted=60), "--global-batch 60 does not divide among 8 replicas"),
        (Batch(of_run=4, keep=True), "a global batch of 4 is less than one sample for each of 8 replicas"),
    ],
)
def test_a_batch_that_cannot_be_shared(batch: Batch, said: str) -> None:
    with pytest.raises(CannotPlan, match=said):
        batch.check(8)


def test_a_batch_that_is_not_recorded_cannot_be_compared() -> None:
    with pytest.raises(
        CannotPlan, match="write --global-batch same to keep the run's, or capture it with --level full"
    ):
        plan_from_run(measured(), 8, NODE, global_batch=64)


@cache
def on_gpu(name: str) -> Study:
    facts = [{"fact": "device", "rank": rank, "type": "cuda", "name": name} for rank in (0, 1)]
    return study(replace(LINK, facts=facts).trace())


def test_another_device_by_the_data_sheets() -> None:
    """From A100 to H200: matrix products 312 / 989.5, memory 2.039 / 4.8, link 300 / 450."""
    plan = plan_from_run(on_gpu("NVIDIA A100-SXM4-80GB"), 2, NODE, gpu=GPUS["h200"])
    compute = (312 / 989.5 * 2.039 / 4.8) ** 0.5
    assert plan.asked.parts["compute"] == pytest.approx(240 * compute, rel=1e-3)
    assert plan.asked.parts["optimizer"] == pytest.approx(5 * 2.039 / 4.8, rel=1e-2)
    assert plan.asked.transfer_ms == pytest.approx(8 + 32 * 300 / 450, abs=0.2)
    same = plan_from_run(on_gpu("NVIDIA A100-SXM4-80GB"), 2, NODE)
    assert plan.asked.high - plan.asked.low > 10 * (same.asked.high - same.asked.low)
    assert any("H200 SXM for A100 by their data sheets, which is a guess" in one for one in plan.assumptions)
    assert plan.tells_most.startswith("run a few steps on that device")
    assert plan.measured.ms == pytest.approx(274, abs=0.1)


@pytest.mark.parametrize(
    ("run", "gpu", "field", "said"),
    [
        (
            "NVIDIA A100-SXM4-80GB",
            "h200-nvl",
            "link_gb_s",
            "the link inside a node of H200 NVL was compared with no data",
        ),
        (
            "NVIDIA A100-SXM4-80GB",
            "v100-pcie",
            "tb_a_second",
            "the memory's rate of V100 PCIe was compared with no data",
        ),
        ("Tesla V100-PCIE-32GB", "a100", "tb_a_second", "the memory's rate of V100 PCIe was compared with no data"),
    ],
)
def test_what_no_data_sheet_tells_widens_the_interval(run: str, gpu: str, field: str, said: str) -> None:
    """Against the same sheet with the field checked; one without the field is said so, and as wide."""
    measured_on = on_gpu(run)
    plan = plan_from_run(measured_on, 2, NODE, gpu=GPUS[gpu])
    assert any(one.startswith(said) for one in plan.assumptions)
    change = device_change(measured_on, GPUS[gpu])
    if gpu != "a100":
        checked = plan_from_run(measured_on, 2, NODE, gpu=replace(GPUS[gpu], unchecked=()))
        assert checked.asked.ms == plan.asked.ms
        assert checked.asked.high < plan.asked.high
        sure = device_change(measured_on, replace(GPUS[gpu], unchecked=()))
        at = {"tb_a_second": 1, "link_gb_s": 2}[field]
        assert change.uncertain[at] == pytest.approx((sure.uncertain[at] ** 2 + 0.7**2) ** 0.5)
    assert change.uncertain[0] > 0.2


def test_a_link_that_is_not_known_is_said_and_widens_the_interval() -> None:
    unknown = replace(GPUS["h200"], link_gb_s=None)
    plan = plan_from_run(on_gpu("NVIDIA A100-SXM4-80GB"), 2, NODE, gpu=unknown)
    assert plan.asked.transfer_ms == pytest.approx(40, abs=0.2)  # as it was
    assert any(one.startswith("the link inside a node of H200 SXM is not known") for one in plan.assumptions)
    assert device_change(on_gpu("NVIDIA A100-SXM4-80GB"), unknown).uncertain[2] == pytest.approx(
        (0.2**2 + 0.7**2) ** 0.5
    )


def test_an_uncertain_link_takes_off_no_more_than_there_is_communication() -> None:
    """The same device with a link that is not known. 30 ms compute, 5 step, 1 loads; 36 of 40 ms of transfers are
    waited for. Without them 36 are left, of which 0.2 of what computes and 0.2 of the optimizer's are uncertain."""
    facts = [{"fact": "device", "rank": rank, "type": "cuda", "name": "NVIDIA A100-SXM4-80GB"} for rank in (0, 1)]
    run = study(replace(LINK, forward=constant(10), backward=constant(20), facts=facts).trace())
    unknown = replace(GPUS["a100"], name="another", link_gb_s=None)
    asked = plan_from_run(run, 2, NODE, gpu=unknown).asked
    alone = asked.ms - asked.parts["comm_exposed"]
    assert alone == pytest.approx(36, abs=0.2)
    assert asked.low == pytest.approx(alone - 1.96 * ((0.2 * 30) ** 2 + (0.2 * 5) ** 2) ** 0.5, abs=0.5)
    assert asked.high > asked.ms + 1.96 * 0.7 * 40


def test_a_type_that_was_not_counted_is_taken_to_be_any() -> None:
    """A100 and RTX 3090: 312 and 71 in half precision, 19.5 and 35.6 in float32; memories of 2.039 and 0.936."""
    change = device_change(on_gpu("NVIDIA A100-SXM4-80GB"), GPUS["rtx-3090"])
    assert any("was not counted, and is taken to be half precision" in one for one in change.said)
    types, sheet = log(312 / 71 / (19.5 / 35.6)) / 4, log(312 / 71 / (2.039 / 0.936)) / 2
    assert change.uncertain[0] == pytest.approx((types**2 + sheet**2 + 0.2**2) ** 0.5)


@pytest.mark.parametrize(("name", "said"), [("", "no data sheet is known"), ("Some GPU", "is known of Some GPU")])
def test_a_device_that_has_no_sheet_is_not_compared(name: str, said: str) -> None:
    with pytest.raises(CannotPlan, match=said):
        plan_from_run(on_gpu(name), 2, NODE, gpu=GPUS["h200"])


def test_a_run_on_no_gpu_is_not_scaled_to_one() -> None:
    with pytest.raises(CannotPlan, match="so --gpu cannot be compared with them; leave out --gpu"):
        plan_from_run(measured(), 8, NODE, gpu=GPUS["h200"])


def test_ranks_that_trained_together_share_a_node() -> None:
    """Two ranks on one host are said to be a node, however few --gpus-per-node says; nothing is a guess then."""
    plan = plan_from_run(measured(), 2, Network(1, gb_s=0.001))
    assert plan.asked.ms == pytest.approx(274, abs=0.1)
    assert "--bandwidth and --latency are not used: the ranks share one node" in plan.assumptions


def test_what_it_costs() -> None:
    plan = plan_from_run(measured(), 8, NODE, steps=3600, price=2.0)
    assert plan.spending is not None
    assert plan.spending.gpu_hours[0] == pytest.approx(plan.asked.ms * 8 / 1e3)
    assert plan.spending.money is not None
    assert plan.spending.money[0] == pytest.approx(2 * plan.spending.gpu_hours[0])
    with pytest.raises(CannotPlan, match="how many tokens its step has is not recorded; give --steps"):
        plan_from_run(measured(), 8, NODE, tokens=1e9)


def test_one_rank_tells_nothing_of_communication() -> None:
    with pytest.raises(CannotPlan, match="run it on at least 2 data-parallel ranks"):
        plan_from_run(study(Job(ranks=1).trace()), 8, NODE)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan") / "run"
    for capture in LINK.captures().values():
        write_capture(capture, folder / "capture")
    return folder


def test_the_verb(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run), "--ranks", "8", "--gpus-per-node", "4"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("on 8 ranks a step takes 314 ms [")
    assert "each rank does 87 % of what it does on 2 (274 ms a step)" in said
    assert "weak scaling" in said
    assert "to know more: run a few steps on two nodes" in said
    assert main(["plan", str(run), "--ranks", "8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["asked"]["ranks"] == 8
    assert told["scaling"] == "weak"
    assert told["layouts"]["best"][0]["layout"]["dp"] == 8


def test_the_fastest_layouts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without layers that were timed, and with nothing seen between layers, replicas and even parts of the model."""
    assert main(["plan", str(run), "--ranks", "4", "--global-batch", "same"]) == 0
    said = capsys.readouterr().out
    assert "layouts looked at" in said
    assert "each is replayed beside the layout that ran (tp 1, dp 2, pp 1, ZeRO 0, 1 micro-batch)" in said
    assert main(["plan", str(run), "--ranks", "8", "--zero-stage", "1", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["layouts"]["best"]
    assert {one["layout"]["zero"] for one in best} == {1}
    assert all(one["low"] < one["ms"] < one["high"] for one in best)


def test_layouts_that_cannot_be_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run), "--ranks", "8", "--tp", "2"]) == 0
    said = capsys.readouterr().out
    assert "other layouts are not ranked: no layout of 8 ranks with tp 2 can be told from the run's" in said
    assert "what tensor parallelism would exchange is not known" in said
    assert main(["plan", str(run), "--ranks", "8", "--tp", "3"]) == 0
    assert "3 does not divide 8" in capsys.readouterr().out
    assert main(["plan", str(run), "--ranks", "8", "--pp", "4"]) == 0
    assert "by what each layer takes, which was not timed: run again with --level full" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([], 2, "--ranks is not given"),
        (["--ranks", "8", "--hidden", "2"], 2, "of a RUN the model stays as it is; leave out --hidden"),
        (["--ranks", "8", "--gpu", "h10"], 2, "--gpu h10: is not known"),
        (["--ranks", "8", "--gpu", "h100"], 4, "so --gpu cannot be compared with them; leave out --gpu"),
        (["--ranks", "8", "--bandwidth", "quick"], 2, "'quick' is no rate"),
    ],
)
def test_what_it_refuses(
    words: list[str], status: int, said: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(run), *words]) == status
    assert said in capsys.readouterr().err
