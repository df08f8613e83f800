"""What dsprof says of jobs whose fault is known, on a device that sleeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sleeping_jobs import Ran, SleepingRanks
from sleeping_truth import MS, Int, assert_communications, assert_moments, assert_phases, close

from dsprof.analyzer import analyze


@pytest.fixture(scope="module")
def slow(sleeping_ranks: SleepingRanks, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The device of rank 2 of 4 takes half as long again."""
    return sleeping_ranks.run(tmp_path_factory.mktemp("slow"), "ddp.py", "--slow-rank=2", ranks=4)


@pytest.fixture(scope="module")
def late(sleeping_ranks: SleepingRanks, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The host of rank 1 does nothing for 150 ms of each step, of which its device takes 29 ms."""
    arguments = ("--late-rank=1", "--late-ms=150", "--head-start-ms=0", "--steps=9")
    return sleeping_ranks.run(tmp_path_factory.mktemp("late"), "ddp.py", *arguments, ranks=2)


def assert_lateness(ran: Ran, rank: int, of: int) -> Int:
    """The rank came as much later than `of` to each all-reduce as dsprof tells, but for what their clocks may be off.
    Returns it, ns."""
    told = [ran.communications("all_reduce", number)["arrival_ns"].to_numpy(np.int64) for number in (rank, of)]
    did = [ran.did("nccl:all_reduce", number, last=len(told[0])) for number in (rank, of)]
    late: Int = (did[0]["arrival_ns"] - did[1]["arrival_ns"]).to_numpy()
    ahead = np.logical_and.reduce([each["ahead"].to_numpy(bool) for each in did])
    assert ahead.sum() >= len(late) // 3
    assert_moments((told[0] - told[1])[ahead], late[ahead], "lateness")
    return late


def test_four_ranks_of_which_one_has_a_slow_device(slow: Ran) -> None:
    for rank in range(4):
        assert_communications(slow, "all_reduce", "nccl:all_reduce", rank, least=20)
        assert_phases(slow, "backward", rank, least=5)
    for other in (0, 1, 3):
        assert np.median(assert_lateness(slow, 2, other)[::4]) > 3 * MS  # the first bucket of each step


def test_the_slow_device_is_named(slow: Ran, sleeping_ranks: SleepingRanks, tmp_path: Path) -> None:
    """Where a busy machine stopped another rank for longer, in one more run."""
    if analyze(slow.trace).slowest_rank != 2:
        slow = sleeping_ranks.run(tmp_path / "again", "ddp.py", "--slow-rank=2", ranks=4)
    assert analyze(slow.trace).slowest_rank == 2


def test_a_late_host_has_its_device_arrive_late(late: Ran) -> None:
    assert np.median(assert_lateness(late, 1, 0)[::4]) > 60 * MS
    assert analyze(late.trace).slowest_rank == 1


@pytest.fixture(scope="module")
def item(sleeping_ranks: SleepingRanks, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The host asks for the loss at the end of each step."""
    return sleeping_ranks.run(tmp_path_factory.mktemp("item"), "ddp.py", "--sync-every=1", "--head-start-ms=0", ranks=2)


def test_a_host_that_asks_for_the_loss_in_each_step(item: Ran) -> None:
    """It stands still in `.item()` for what its device has left to do then."""
    for rank in range(2):
        assert_communications(item, "all_reduce", "nccl:all_reduce", rank, least=20)
        rows = item.rows(rank)
        stood = rows[(rows["name"] == "host_sync") & (rows["purpose"] == "item") & (rows["step"] >= 2)]
        assert len(stood) >= 9


def loaded(ranks: SleepingRanks, factory: pytest.TempPathFactory, ms: int) -> Ran:
    return ranks.run(factory.mktemp("loader"), "loader.py", f"--load-ms={ms}")


@pytest.fixture(scope="module")
def hidden(sleeping_ranks: SleepingRanks, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return loaded(sleeping_ranks, tmp_path_factory, 3)


@pytest.fixture(scope="module")
def exposed(sleeping_ranks: SleepingRanks, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return loaded(sleeping_ranks, tmp_path_factory, 50)


def test_a_loader_behind_the_device_costs_nothing(hidden: Ran) -> None:
    """The device takes 20 ms for a step, which the host has launched in 5."""
    analysis = analyze(hidden.trace)
    assert analysis.step_ms is not None
    assert analysis.step_ms.median == pytest.approx(20.07, abs=0.2)
    steps = analysis.steps[analysis.steps["ordinary"].astype(bool)]
    for part, ms in (("compute", 18.04), ("optimizer", 2.01), ("data", 0.0)):
        assert steps[part].median() == pytest.approx(ms, abs=0.2), part
    # A busy machine may have the device stand still; where it has not, nothing is wrong with the job.
    updates = np.diff(hidden.did("update")["end_ns"].to_numpy(np.int64))
    if updates[1:].max() < 1.5 * np.median(updates):
        assert [finding.code for finding in analysis.findings if finding.severity != "info"] == []


def test_a_loader_that_the_device_waits_for_costs_what_it_waits(exposed: Ran) -> None:
    """It takes 50 ms, less what the device is busy with meanwhile."""
    analysis = analyze(exposed.trace)
    updates = exposed.did("update")["end_ns"].to_numpy(np.int64)
    ordinary = analysis.steps[analysis.steps["ordinary"].astype(bool)]
    true_ms = np.diff(updates)[ordinary["step"].to_numpy(np.int64) - 1] / MS
    assert close(ordinary["dur_ns"].to_numpy(np.int64), true_ms * MS).all()
    # What is neither computing nor updating is standing still for data, but for what the host takes to launch.
    still_ms = true_ms - 20.05
    assert ordinary["compute"].min() > 17.9
    assert (ordinary["data"] < still_ms + 0.2).all()
    assert (ordinary["data"] / still_ms).median() > 0.85


def test_a_device_that_fails_is_left_alone_and_told_once(sleeping_ranks: SleepingRanks, tmp_path: Path) -> None:
    ran = sleeping_ranks.run(tmp_path, "loader.py", "--fail-at=8")
    told = [warning for warning in ran.trace.run.warnings if "illegal memory access" in warning]
    assert len(told) == 1
    assert "events of a device" in told[0]
    assert len(ran.told[0]["losses"]) == 16
    assert (ran.rows()["kind"] == "step").sum() >= 8  # later ones end when nobody saw
