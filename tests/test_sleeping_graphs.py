"""CUDA graphs on a device that sleeps, which spoils a capture as CUDA does when it is asked for an event meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from sleeping_jobs import Ran, SleepingRanks
from sleeping_truth import assert_phases, told_phases

from dsprof.analyzer import analyze


def run(ranks: SleepingRanks, where: Path, first: int, what: str, *, world: int = 1) -> Ran:
    """With dsprof; held against the same job without it."""
    watched = ranks.run(where / "watched", "graph.py", str(first), what, ranks=world, without="nvml")
    bare = ranks.run(where / "bare", "graph.py", str(first), what, ranks=world, armed=False)
    for rank in range(world):
        assert watched.told[rank]["losses"] == bare.told[rank]["losses"]
        did, plain = watched.log(rank)["name"].value_counts(), bare.log(rank)["name"].value_counts()
        assert did.drop("wait", errors="ignore").to_dict() == plain.drop("wait", errors="ignore").to_dict()
    assert not [warning for warning in watched.trace.run.warnings if "error" in warning]
    return watched


@pytest.mark.parametrize("first", [0, 3])
def test_a_step_that_is_captured_is_left_alone(sleeping_ranks: SleepingRanks, tmp_path: Path, first: int) -> None:
    """Also where the times of the device begin in the middle of the graph's capture, since the optimizer's step is in
    it."""
    ran = run(sleeping_ranks, tmp_path, first, "all", world=2)
    hidden = [fact["communications"] for fact in ran.trace.run.facts if fact["fact"] == "cuda_graph"]
    assert hidden == [4 if first else None] * 2  # of a graph whose capture had begun before it is not known
    assert "CUDA graph" in analyze(ran.trace).not_judged["comm.exposed"]


def test_an_optimizer_that_is_captured_is_left_alone(sleeping_ranks: SleepingRanks, tmp_path: Path) -> None:
    """What is not in the graph is timed as before."""
    ran = run(sleeping_ranks, tmp_path, 3, "optimizer")
    assert len(told_phases(ran, "backward")) >= 10
    assert_phases(ran, "forward", least=3)
    assert_phases(ran, "backward", least=3)


def test_a_capture_that_cuda_refuses_to_begin_suspends_nothing(sleeping_ranks: SleepingRanks, tmp_path: Path) -> None:
    ran = run(sleeping_ranks, tmp_path, 3, "nothing")
    assert len(told_phases(ran, "optimizer")) >= 10
    assert_phases(ran, "backward", least=3)
    assert not [fact for fact in ran.trace.run.facts if fact["fact"] == "cuda_graph"]
