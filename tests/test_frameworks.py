"""Which rows arrive from scripts that train with a framework of somebody else's, unmodified, on two ranks of gloo."""

from __future__ import annotations

import importlib.util
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
RUNS: dict[tuple[str, ...], Finished] = {}

JOBS_OF_TORCH = [("tensor_parallel.py",), ("fsdp1.py",)]


def run_job(job: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The job under `dsprof run`, once for all tests."""
    needs = {"deepspeed": "deepspeed", "accelerate": "accelerate"}.get(job[0].split("_")[0])
    if needs and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
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
    fact = next(fact for fact in finished.folder.read_info().facts if fact["fact"] == "pipeline")
    assert (fact["microbatches"], fact["stages"]) == (4, 2 * len(stages[0]))
    assert (fact["stage_indices"], fact["framework"]) == (list(stages[0]), "deepspeed")


@pytest.mark.slow
@pytest.mark.parametrize("level", ["light", "full"])
@pytest.mark.parametrize(
    "job",
    [
        *JOBS_OF_TORCH, ("accelerate_loop.py",), ("deepspeed_zero.py", "1"), ("deepspeed_zero.py", "3"),
        ("deepspeed_pipeline.py", "1F1B"), ("deepspeed_pipeline.py", "DualPipeV"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_losses_are_those_without_the_profiler(job: tuple[str, ...], level: str, tmp_path: Path) -> None:
    if job not in JOBS_OF_TORCH and importlib.util.find_spec(job[0].split("_")[0]) is None:
        pytest.skip(f"{job[0].split('_')[0]} is not installed")
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
        assert modules["name"].nunique() > 3
