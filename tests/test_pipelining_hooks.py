"""torch.distributed.pipelining: every action of a stage becomes a row, whenever the script imports it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from armed import ALONE, both, captured, inside, train
from captures import Row

from dsprof.ondisk import Flag
from dsprof.schema import Kind

TRAIN = """
import torch, torch.distributed as dist
torch.manual_seed(0)
{early}
{alone}
{late}
from torch.distributed.pipelining import PipelineStage, {schedule}
models = [torch.nn.Linear(4, 4) for _ in range({stages})]
stages = [PipelineStage(m, i, {stages}, torch.device("cpu")) for i, m in enumerate(models)]
pipeline = {schedule}(stages if {stages} > 1 else stages[0], 3, loss_fn=lambda out, y: (out - y).square().mean())
optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
x = torch.ones(6, 4)
for _ in range(2):
    losses = []
    pipeline.step(x, target=x, losses=losses)
    optimizer.step()
    print(sum(loss.item() for loss in losses))
dist.destroy_process_group()
"""


stages_of_one_rank = pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch 2.11 sends what stages of one rank exchange, and gloo refuses what a rank sends to itself",
)


def script(schedule: str, stages: int, *, early: bool) -> str:
    imported = "import torch.distributed.pipelining"
    return TRAIN.format(
        schedule=schedule, stages=stages, alone=ALONE, early=imported if early else "", late="" if early else imported
    )


def place(row: Row) -> tuple[int, int]:
    """Stage and micro-batch."""
    return row.stage, row.microbatch


@pytest.mark.parametrize("early", [True, False])
@both
def test_stages_and_micro_batches(native: str, early: bool, tmp_path: Path) -> None:
    code = script("ScheduleGPipe", 1, early=early)
    done = train(tmp_path, code, native=native)
    assert done.returncode == 0, done.stderr
    run = captured(tmp_path)
    pipe = [row for row in run.rows if row.kind is Kind.PIPE]
    step = [("F", (0, 0)), ("F", (0, 1)), ("F", (0, 2)), ("B", (0, 0)), ("B", (0, 1)), ("B", (0, 2))]
    assert [(row.name, place(row)) for row in pipe] == step * 2
    assert {(row.flags, row.group, row.seq, row.tag, row.host_ns, row.value) for row in pipe} == {
        (Flag(0), "", 2**32 - 1, -1, 0, None)
    }
    for action, phase in (("F", "forward"), ("B", "backward")):
        for row in pipe:
            assert row.name != action or any(inside(other, row) for other in run.phases(phase))
    assert run.of("pipeline") == [
        {
            "schedule": "ScheduleGPipe", "microbatches": 3, "stages": 1, "stage_indices": [0],
            "trains": True, "tensors": 2, "bytes": 80, "frozen": 0,
            "site": f"{tmp_path}/train.py:{code.split('pipeline =')[0].count(chr(10)) + 1}", "framework": None,
        }
    ]  # fmt: skip


@stages_of_one_rank
@both
def test_a_backward_in_two_parts_on_several_stages(native: str, tmp_path: Path) -> None:
    done = train(tmp_path, script("ScheduleInterleavedZeroBubble", 2, early=True), native=native)
    assert done.returncode == 0, done.stderr
    run = captured(tmp_path)
    pipe = [(row.name, *place(row)) for row in run.rows if row.kind is Kind.PIPE]
    assert sorted(pipe) == sorted(
        [(name, stage, microbatch) for name in "FBW" for stage in (0, 1) for microbatch in range(3)] * 2
    )
    (fact,) = run.of("pipeline")
    assert (fact["stages"], fact["stage_indices"]) == (2, [0, 1])


@stages_of_one_rank
def test_losses_are_those_of_the_job_alone(tmp_path: Path) -> None:
    code = script("ScheduleInterleaved1F1B", 2, early=True)
    said = {
        train(tmp_path, code, native=native, **env).stdout
        for native, env in (("1", {}), ("0", {}), ("0", {"DSPROF": "0"}))
    }
    assert len(said) == 1
    assert len(said.pop().split()) == 2
