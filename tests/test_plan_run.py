"""`dsprof plan RUN --ranks N`: what a measured run would do with more replicas."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from synthetic import Job, constant, write_capture

from dsprof.analyzer.study import Study, study
from dsprof.cli import main
from dsprof.plan.from_run import CannotPlan, Network, plan_from_run

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


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([], 2, "--ranks is not given"),
        (["--ranks", "8", "--tp", "2"], 2, "of a RUN the batch of a rank and the layout stay as they are"),
        (["--ranks", "8", "--bandwidth", "quick"], 2, "'quick' is no rate"),
    ],
)
def test_what_it_refuses(
    words: list[str], status: int, said: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(run), *words]) == status
    assert said in capsys.readouterr().err
