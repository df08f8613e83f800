"""Pipelines of torch and of DeepSpeed, unmodified, on two ranks of gloo: each action, and what is sent in between."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from framework_runs import STEPS, check_common, counts, inside, of_step, rows_of, run_job
from jobs import Finished

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
