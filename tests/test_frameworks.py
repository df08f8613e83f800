"""Which rows arrive from scripts that train with a framework of somebody else's, unmodified, on two ranks of gloo."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from jobs import ABORTED, Finished, environment, profile

from dsprof.trace import load

JOBS = Path(__file__).parent / "framework_jobs"
STEPS = 10
NEEDS = {
    "accelerate": ["accelerate"], "deepspeed": ["deepspeed"], "lightning": ["lightning"],
    "transformers": ["transformers", "accelerate"], "deepspeed_autotp.py": ["deepspeed", "transformers"],
}  # fmt: skip
"""Packages, of a job or of all whose names begin so."""
RUNS: dict[tuple[str, ...], Finished] = {}


def skip_without_packages(job: tuple[str, ...]) -> None:
    for name in NEEDS.get(job[0], NEEDS.get(job[0].split("_")[0], [])):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def run_job(job: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The job under `dsprof run` on two ranks, once for all tests."""
    skip_without_packages(job)
    if job not in RUNS:
        RUNS[job] = profile(tmp_path_factory.mktemp(job[0][:-3]), JOBS / job[0], *job[1:], flags=("--no-report",))
    finished = RUNS[job]
    assert finished.status == 0, finished.stderr
    return finished


def rows_of(finished: Finished, rank: int = 0) -> pd.DataFrame:
    return load(finished.folder).read(rank)


def counts(rows: pd.DataFrame, *columns: str) -> dict[tuple[str, ...], int]:
    """How many rows have which values there."""
    return dict(Counter(tuple(map(str, values)) for values in rows[list(columns)].to_numpy(object)))


def of_step(rows: pd.DataFrame, kind: str, step: int = 5) -> pd.DataFrame:
    return rows[(rows["kind"] == kind) & (rows["step"] == step)]


def inside(inner: pd.DataFrame, outer: pd.DataFrame) -> bool:
    """Whether each of `inner` was issued while one of `outer` was under way."""
    when = inner["issue_ns"]
    return all(((outer["start_ns"] <= at) & (at <= outer["start_ns"] + outer["dur_ns"])).any() for at in when)


def check_common(finished: Finished, backwards: int = 1) -> pd.DataFrame:
    """What every job has: its steps, counted once, and waits that name numbered communications. Rows of rank 0."""
    rows = rows_of(finished)
    assert int((rows["kind"] == "step").sum()) == STEPS
    phases = of_step(rows, "phase")
    assert int((phases["name"] == "backward").sum()) == backwards
    assert int((phases["name"] == "optimizer").sum()) == 1
    assert int((phases["name"] == "forward").sum()) >= backwards
    comm, waits = rows[rows["kind"] == "comm"], rows[rows["kind"] == "wait"]
    assert comm["seq"].notna().all()
    assert (comm["bytes"] >= 0).all()
    known = set(counts(comm, "name", "group", "seq", "peer"))
    assert len(waits)
    assert set(counts(waits, "name", "group", "seq", "peer")) <= known
    info = finished.folder.read_info()
    assert [item.errors for item in info.ranks] == [0] * len(info.ranks)
    return rows


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


@pytest.mark.parametrize(
    "stage", ["1", "3", pytest.param("0", marks=pytest.mark.slow), pytest.param("2", marks=pytest.mark.slow)]
)
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


@pytest.mark.parametrize("schedule", ["1F1B", "DualPipeV"])
def test_deepspeeds_pipelines(tmp_path_factory: pytest.TempPathFactory, schedule: str) -> None:
    """Each instruction with its stage and micro-batch: DualPipeV has a stage of each rank on the way back as well."""
    finished = run_job(("deepspeed_pipeline.py", schedule), tmp_path_factory)
    stages = {0: (0,), 1: (1,)} if schedule == "1F1B" else {0: (0, 3), 1: (1, 2)}
    for rank in (0, 1):
        rows = check_common(finished, backwards=4 * len(stages[rank])) if rank == 0 else rows_of(finished, rank)
        assert counts(of_step(rows, "pipe"), "name", "stage", "microbatch") == {
            (name, str(stage), str(microbatch)): 1
            for name in "FB" for stage in stages[rank] for microbatch in range(4)
        }  # fmt: skip
        comm = of_step(rows, "comm")
        sent = comm[comm["peer"].notna()]
        assert set(sent["purpose"]) == {"pipeline"}
        if schedule == "1F1B":  # the other one posts several in one go
            assert set(counts(sent, "stage", "microbatch")) == {(str(rank), str(number)) for number in range(4)}
            waits = of_step(rows, "wait")
            assert waits.loc[waits["peer"].notna(), "stage"].eq(rank).all()
    facts = [fact for fact in finished.folder.read_info().facts if fact["fact"] == "pipeline" and fact["rank"] == 0]
    evaluated = [("InferenceSchedule", False)] if schedule == "1F1B" else []
    trained = "TrainSchedule" if schedule == "1F1B" else "DualPipeVSchedule"
    assert [(fact["schedule"], fact["trains"]) for fact in facts] == [*evaluated, (trained, True)]
    assert "several schedules" not in finished.findings["not_judged"].get("pipeline.bubble", "")
    fact = facts[-1]
    assert (fact["microbatches"], fact["stages"]) == (4, 2 * len(stages[0]))
    assert (fact["stage_indices"], fact["framework"]) == (list(stages[0]), "deepspeed")


SCHEDULES = {
    # Each rank's stages; neighbouring stages of which one rank has one and the other the other.
    "ScheduleGPipe": ([[0], [1]], 1),
    "Schedule1F1B": ([[0], [1]], 1),
    "ScheduleLoopedBFS": ([[0, 2], [1, 3]], 3),
    "ScheduleInterleaved1F1B": ([[0, 2], [1, 3]], 3),
    "ScheduleInterleavedZeroBubble": ([[0, 2], [1, 3]], 3),
    "ScheduleZBVZeroBubble": ([[0, 3], [1, 2]], 2),
    "ScheduleDualPipeV": ([[0, 3], [1, 2]], 2),
}


def orders(finished: Finished, rank: int) -> dict[str, list[str]]:
    """What each of torch's schedules says that the rank does in a step, in the order in which they ran."""
    found: dict[str, list[str]] = json.loads((finished.folder.path.parent / f"order.{rank}.json").read_text())
    # The table of 2.13 counts the last stage's forwards from 1; what it runs is this.
    found["Schedule1F1B"] = {
        0: ["0F0", *(f"0{action}" for i in range(7) for action in (f"F{i + 1}", f"B{i}")), "0B7"],
        1: [f"1{action}{i}" for i in range(8) for action in "FB"],
    }[rank]
    return found


def actions(pipe: pd.DataFrame) -> list[str]:
    """As torch writes them: the backward of the input, I, is a B to us, and known by the W that there is besides."""
    pipe = pipe.sort_values("start_ns")
    places = list(zip(pipe["stage"], pipe["name"].astype(str), pipe["microbatch"], strict=True))
    split = {(stage, number) for stage, name, number in places if name == "W"}
    return [f"{s}{'I' if name == 'B' and (s, number) in split else name}{number}" for s, name, number in places]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_torchs_pipelines(tmp_path_factory: pytest.TempPathFactory, schedule: str) -> None:
    """Every action of each of its schedules, in its order, and what is sent between them."""
    finished = run_job(("torch_pipelines.py",), tmp_path_factory)
    if schedule not in orders(finished, 0):
        pytest.skip(f"this torch has no {schedule}")
    stages, borders = SCHEDULES[schedule]
    for rank in (0, 1):
        rows = rows_of(finished, rank)
        planned = orders(finished, rank)
        first = 2 * list(planned).index(schedule)
        for step in (first, first + 1):
            assert actions(of_step(rows, "pipe", step)) == planned[schedule]
        # In the first one stages tell each other of shapes too.
        comm, waits = of_step(rows, "comm", first + 1), of_step(rows, "wait", first + 1)
        assert counts(comm, "name", "purpose", "group", "peer", "bytes") == {
            (name, "pipeline", "0", str(1 - rank), str(4 * 64 * 4)): 8 * borders for name in ("send", "recv")
        }
        assert counts(waits, "name", "seq", "peer") == counts(comm, "name", "seq", "peer")
        described = [fact for fact in finished.folder.read_info().facts if fact["fact"] == "pipeline"]
        (fact,) = [fact for fact in described if fact["schedule"] == schedule and fact["rank"] == rank]
        assert (fact["microbatches"], fact["stage_indices"], fact["trains"]) == (8, stages[rank], True)


def test_no_schedule_of_torchs_is_forgotten(tmp_path_factory: pytest.TempPathFactory) -> None:
    finished = run_job(("torch_pipelines.py",), tmp_path_factory)
    assert set(orders(finished, 0)) <= set(SCHEDULES)
    assert [item.errors for item in finished.folder.read_info().ranks] == [0, 0]
    assert int((rows_of(finished)["kind"] == "step").sum()) == 2 * len(orders(finished, 0))
    assert "the job has several schedules" in finished.findings["not_judged"]["pipeline.bubble"]


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


@pytest.mark.slow
def test_the_second_fsdp_in_a_pipeline(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its schedule gathers before the actions and reduces after them, outside of forward and backward."""
    rows = rows_of(run_job(("fsdp2_pipeline.py",), tmp_path_factory))
    assert int((rows["kind"] == "step").sum()) == STEPS
    comm, phases = of_step(rows, "comm"), of_step(rows, "phase")
    block = 4 * (64 * 256 + 256 + 256 * 64 + 64)
    assert counts(comm, "name", "purpose", "bytes") == {
        ("all_gather", "parameter", str(block)): 2,
        ("reduce_scatter", "gradient", str(block)): 2,
    }
    computing = phases[phases["name"].isin(["forward", "backward"]) & (phases["source"] == "measured")]
    assert not any(inside(one, computing) for one in (comm.iloc[[at]] for at in range(len(comm))))
    assert counts(of_step(rows, "pipe"), "name", "stage") == {(name, s): 4 for name in "FBW" for s in "01"}


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
        "headline": "neither a backward pass nor an optimizer's step was seen, so there is no training step to judge",
    }
    rows = rows_of(finished)
    assert counts(rows[rows["kind"] == "comm"], "name", "purpose", "bytes") == {("all_reduce", "other", "4"): STEPS}
    assert counts(rows[rows["kind"] == "phase"], "name", "grad") == {("forward", "False"): STEPS}


INNER = {
    ("tensor_parallel.py",): "1.down",
    ("fsdp1.py",): "1.down",
    ("fsdp2.py",): "1.down",
    ("fsdp2_pipeline.py",): "down",
    ("torch_pipelines.py",): "down",
    ("unusual.py", "optimizers_in_backward"): "1.down",
    ("unusual.py", "threads"): "1.down",
    ("accelerate_loop.py",): "1.down",
    ("transformers_trainer.py",): "transformer.h.1.mlp.c_fc",
    ("lightning_trainer.py",): "net.1.down",
    ("deepspeed_zero.py", "1"): "1.down",
    ("deepspeed_zero.py", "3"): "1.down",
    ("deepspeed_autotp.py",): "model.layers.1.mlp.down_proj",
    ("deepspeed_pipeline.py", "1F1B"): "1.down",
    ("deepspeed_pipeline.py", "DualPipeV"): "3.down",
}
"""Job -> a module two levels or more below the outermost, which level full must show."""


@pytest.mark.slow
@pytest.mark.parametrize("level", ["light", "full"])
@pytest.mark.parametrize("job", INNER, ids=" ".join)
def test_losses_are_those_without_the_profiler(job: tuple[str, ...], level: str, tmp_path: Path) -> None:
    skip_without_packages(job)
    (tmp_path / "watched").mkdir()
    (tmp_path / "plain").mkdir()
    watched = profile(tmp_path / "watched", JOBS / job[0], *job[1:], flags=("--no-report", "--level", level))
    assert watched.status == 0, watched.stderr
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for _ in range(3):
        done = subprocess.run(
            [*torchrun, str(JOBS / job[0]), *job[1:]], cwd=tmp_path / "plain", env=environment(),
            capture_output=True, text=True,
        )  # fmt: skip
        if ABORTED not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        losses = [(tmp_path / which / f"losses.{rank}").read_text() for which in ("watched", "plain")]
        assert losses[0] == losses[1]
        assert len(losses[0].split()) >= STEPS
    if level == "full":
        modules = rows_of(watched)
        modules = modules[modules["kind"] == "module"]
        assert INNER[job] in set(modules["name"])
