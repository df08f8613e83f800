"""Which rows arrive from scripts that train with a framework of somebody else's, unmodified, on two ranks of gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
from framework_runs import (
    JOBS,
    STEPS,
    check_common,
    counts,
    inside,
    of_step,
    rows_of,
    run_job,
    skip_without_packages,
)
from jobs import Finished, profile

from dsprof.schema import SHARDING


def test_tensor_parallelism(tmp_path_factory: pytest.TempPathFactory) -> None:
    rows = check_common(run_job(("tensor_parallel.py",), tmp_path_factory))
    assert counts(of_step(rows, "comm"), "name", "purpose") == {
        ("all_reduce", "tensor-parallel"): 5,  # one a block in forward; in backward none for the first block's input
        ("all_reduce", "norm"): 1,
    }


def test_the_first_fsdp(tmp_path_factory: pytest.TempPathFactory) -> None:
    rows = check_common(run_job(("fsdp1.py",), tmp_path_factory))
    found = counts(of_step(rows, "comm"), "name", "purpose")
    assert set(found) == {("all_gather", "parameter"), ("reduce_scatter", "gradient"), ("all_reduce", "norm")}
    assert found["reduce_scatter", "gradient"] == 3


def test_accelerate_counts_a_step_once_under_accumulation(tmp_path_factory: pytest.TempPathFactory) -> None:
    rows = check_common(run_job(("accelerate_loop.py",), tmp_path_factory), backwards=2)
    assert counts(of_step(rows, "comm"), "name", "purpose") == {("all_reduce", "gradient"): 1}
    assert int((of_step(rows, "phase")["name"] == "data").sum()) == 2


@pytest.mark.parametrize("stage", ["3", *(pytest.param(stage, marks=pytest.mark.slow) for stage in "012")])
def test_deepspeeds_zero(tmp_path_factory: pytest.TempPathFactory, stage: str) -> None:
    """Its backward holds the reduction of gradients, its step all that it gathers."""
    finished = run_job(("deepspeed_zero.py", stage), tmp_path_factory)
    rows = check_common(finished, backwards=2)
    comm, phases = of_step(rows, "comm"), of_step(rows, "phase")
    gradients = comm[comm["purpose"] == "gradient"]
    assert len(gradients)
    assert inside(gradients, phases[phases["name"] == "backward"])
    expected = {"gradient", "norm"} | ({"parameter"} if stage != "0" else set())
    assert set(comm["purpose"]) - {"other"} == expected
    (fact, *_) = [fact for fact in finished.folder.read_info().facts if fact["fact"] == "deepspeed"]
    assert (fact["zero_stage"], fact["accumulation"], fact["clipping"]) == (int(stage), 2, 1.0)
    told = [fact for fact in finished.folder.read_info().facts if fact["fact"] == "optimizer"]
    assert sorted((fact["rank"], fact["number"]) for fact in told) == [(0, 1), (1, 1)]  # not the one within, too
    own_work = of_step(rows, "module")
    own_work = own_work[own_work["name"] == SHARDING]
    assert (len(own_work) > 0) is (stage != "0")
    trained = phases[phases["name"].isin(["forward", "backward"])]
    assert inside(own_work.assign(issue_ns=own_work["start_ns"]), trained)


def test_the_second_fsdp_with_recomputation(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Parameters are gathered for forward, ahead of it for one block, and for backward, of each micro-batch."""
    rows = check_common(run_job(("fsdp2.py",), tmp_path_factory), backwards=2)
    block = 4 * (64 * 256 + 256 + 256 * 64 + 64)
    assert counts(of_step(rows, "comm"), "name", "purpose", "bytes") == {
        ("all_gather", "parameter", str(block)): 12,
        ("reduce_scatter", "gradient", str(block)): 3,
        ("all_reduce", "norm", "48"): 1,
    }
    phases = of_step(rows, "phase")
    again, backwards = phases[phases["name"] == "recompute"], phases[phases["name"] == "backward"]
    assert len(again) == 6
    for start in again["start_ns"]:
        assert ((backwards["start_ns"] <= start) & (start <= backwards["start_ns"] + backwards["dur_ns"])).any()


def test_transformers_trainer(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A step of two micro-batches is one, with one reduction, and DDP needs none for the norm. The evaluation after
    the fifth step is part of the sixth, and does not train."""
    finished = run_job(("transformers_trainer.py",), tmp_path_factory)
    rows = check_common(finished, backwards=2)
    for step in (4, 5):
        comm = of_step(rows, "comm", step)
        gradients = comm[comm["purpose"] == "gradient"]
        assert counts(gradients, "name", "group", "bytes") == {("all_reduce", "0", "108032"): 1}
        # Which parameters were used, and what it gathers for its log and its evaluation.
        assert set(comm["purpose"]) == {"gradient", "other"}
        assert inside(gradients, of_step(rows, "phase", step).query("name == 'backward'"))
    forwards = {step: of_step(rows, "phase", step).query("name == 'forward'")["grad"].tolist() for step in (4, 5)}
    assert forwards == {4: [True, True], 5: [False, True, True]}
    assert {fact["framework"] for fact in finished.folder.read_info().facts if fact["fact"] == "ddp"} == {
        "transformers"
    }


def check_lightning(finished: Finished) -> None:
    """Both ranks are in the one run, and there is one verdict on it."""
    assert finished.stderr.count("[dsprof] verdict:") == 1
    assert finished.findings["run"]["ranks"] == {"expected": 2, "captured": 2}
    assert finished.findings["run"]["steps"] == STEPS
    info = finished.folder.read_info()
    assert [(item.rank, item.closed, item.errors) for item in info.ranks] == [(0, True, 0), (1, True, 0)]
    assert info.world_size == 2
    assert info.groups["0"]["ranks"] == [0, 1]
    check_common(finished, backwards=2)
    for rank in (0, 1):
        rows = rows_of(finished, rank)
        comm = of_step(rows, "comm", 4)
        gradients = comm[comm["purpose"] == "gradient"]
        assert counts(gradients, "name", "group", "bytes") == {("all_reduce", "0", "397056"): 1}
        validated = of_step(rows, "phase", 5).query("name == 'forward'")["grad"]
        assert validated.tolist() == [False, False, True, True]
    assert {fact["framework"] for fact in info.facts if fact["fact"] == "ddp"} == {"lightning"}


@pytest.mark.slow
def test_lightning_under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> None:
    check_lightning(run_job(("lightning_trainer.py",), tmp_path_factory))


def test_lightning_starts_the_second_rank_itself(tmp_path: Path) -> None:
    skip_without_packages(("lightning_trainer.py",))
    finished = profile(tmp_path, JOBS / "lightning_trainer.py", ranks=None, flags=("--no-report",))
    assert finished.status == 0, finished.stderr
    check_lightning(finished)


@pytest.mark.slow
def test_a_rank_that_lightning_started_fails(tmp_path: Path) -> None:
    """Nobody knows how it ended, but it is not the one that waited for it that is to blame."""
    skip_without_packages(("lightning_trainer.py",))
    finished = profile(tmp_path, JOBS / "lightning_trainer.py", "fails", ranks=None, flags=("--no-report",))
    assert finished.status == 1
    assert finished.findings["verdict"]["status"] == "failed"
    died = next(finding for finding in finished.findings["findings"] if finding["code"] == "run.rank-died")
    assert died["where"]["ranks"] == [1]
    assert died["title"].startswith("rank 1 was gone first")


def test_deepspeeds_automatic_tensor_parallelism(tmp_path_factory: pytest.TempPathFactory) -> None:
    finished = run_job(("deepspeed_autotp.py",), tmp_path_factory)
    rows = check_common(finished)
    comm, groups = of_step(rows, "comm"), finished.folder.read_info().groups
    assert set(counts(comm, "name", "purpose")) == {
        ("all_reduce", "tensor-parallel"), ("all_gather", "tensor-parallel"),
        ("all_reduce", "gradient"), ("all_reduce", "norm"),
    }  # fmt: skip
    shared = comm[comm["purpose"] == "tensor-parallel"]
    assert set(shared["bytes"]) == {4 * 16 * 32 * 4}  # a batch's activations
    assert len(shared) >= 8  # two layers, each with two blocks in forward and as many in backward
    assert [groups[name]["ranks"] for name in shared["group"].unique()] == [[0, 1]]
    gradients = comm[comm["purpose"] == "gradient"]
    assert [groups[name]["ranks"] for name in gradients["group"]] == [[0]]


UNUSUAL = {
    # What the verdict says that a step is; optimizer steps, and gradient reductions, in one.
    "threads": ("", 1, {("all_reduce", "1"): 1}),
    "optimizers_in_backward": ("an iteration of 12 steps of 12 optimizers", 12, {("reduce_scatter", "0"): 3}),
    "several_optimizers": (
        "an iteration of 2 optimizer steps: 1 of Plain 1, 1 of Adam 2", 2, {("all_reduce", "0"): 1},
    ),
    "no_optimizer": ("one backward: no optimizer of torch.optim was seen to step", 0, {("all_reduce", "0"): 1}),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["threads", *(pytest.param(name, marks=pytest.mark.slow) for name in UNUSUAL if name != "threads")],
)  # fmt: skip
def test_unusual_loops(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    finished = run_job(("unusual.py", name), tmp_path_factory)
    step_is, optimizers, reductions = UNUSUAL[name]
    assert finished.findings["run"]["steps"] == STEPS
    assert (finished.findings["run"]["step_is"] or "").startswith(step_is)
    assert [item.errors for item in finished.folder.read_info().ranks] == [0, 0]
    rows = rows_of(finished)
    comm, phases = of_step(rows, "comm"), of_step(rows, "phase")
    gradients = comm[comm["purpose"] == "gradient"]
    assert counts(gradients, "name", "group") == reductions
    assert inside(gradients, phases[phases["name"] == "backward"])
    assert int((phases["name"] == "optimizer").sum()) == optimizers
    if name == "threads":  # theirs have nothing to do with the training
        beside = rows[(rows["kind"] == "comm") & rows["group"].isin(["2", "3"])]
        assert counts(beside, "group", "purpose") == {("2", "other"): 100, ("3", "other"): 100}
        assert all(sorted(own["seq"]) == list(range(100)) for _, own in beside.groupby("group", observed=True))
        assert len(rows[(rows["kind"] == "wait") & rows["group"].isin(["2", "3"])]) == 200


def test_a_job_that_never_trains_is_told_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    finished = run_job(("unusual.py", "forward_only"), tmp_path_factory)
    assert finished.findings["verdict"] == {
        "status": "inconclusive",
        "headline": "neither a backward pass nor an optimizer's step was seen, so there is no training step to judge: "
        "capture a part that trains, as `dsprof run --steps 10:30` does",
    }
    rows = rows_of(finished)
    assert counts(rows[rows["kind"] == "comm"], "name", "purpose", "bytes") == {("all_reduce", "other", "4"): STEPS}
    measured = rows[rows["source"] == "measured"]  # what lies between two forwards may count as one, if it is short
    assert counts(measured[measured["kind"] == "phase"], "name", "grad") == {("forward", "False"): STEPS}
