"""Trials: they end at the same step on all ranks and keep their losses, which are compared."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from jobs import profile

from dsprof.collectors.loop import trial
from dsprof.fix.losses import LossCheck, Losses, check
from dsprof.fix.trial import read_trial

JOB = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for number in range(1000):
    model(torch.full((2, 4), 1.0 + dist.get_rank())).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("not reached")
"""


def test_ranks_end_at_the_same_step_and_leave_their_losses(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(JOB)
    finished = profile(tmp_path, script, flags=("--no-report",), variables={"DSPROF_TRIAL": '{"steps": 12}'})
    assert (finished.status, finished.stdout) == (0, ""), finished.stderr
    assert finished.findings["run"]["steps"] == 12
    found = read_trial(finished.folder.path)
    assert found is not None
    assert {rank: list(losses) for rank, losses in found.losses.items()} == {0: list(range(12)), 1: list(range(12))}
    torch.manual_seed(0)
    assert found.losses[0][0] == pytest.approx(torch.nn.Linear(4, 1)(torch.ones(2, 4)).square().mean().item())


def test_a_process_that_is_no_trial_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSPROF_TRIAL", raising=False)
    backward = torch.autograd.backward
    trial.follow()()
    assert torch.autograd.backward is backward


def test_losses_are_those_that_are_one_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPROF_RUN", str(tmp_path))
    losses = trial._Losses()
    uninstall = losses.watch()
    try:
        weight = torch.ones(3, requires_grad=True)
        for number in range(4):
            losses.step = number // 2
            (weight.sum() * number).backward()
        weight.backward(torch.ones(3))
        torch.autograd.backward([weight.sum() + 7])
    finally:
        uninstall()
    losses.write()
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text()) == {"rank": 0, "losses": [[0, 1.5], [1, pytest.approx(25 / 3)]]}
    assert [(step, float(loss)) for step, loss in losses.taken] == [(0, 0.0), (0, 3.0), (1, 6.0), (1, 9.0), (1, 10.0)]


# --- comparing


def of(*losses: float) -> Losses:
    return {0: dict(enumerate(losses))}


def test_losses_may_differ_as_far_as_the_knob_promises_and_the_job_itself_does() -> None:
    original = [of(4.0, 2.0), of(4.0, 2.0)]
    assert check(["gc.freeze"], original, [of(4.0, 2.0)]) == LossCheck(0.0, 1e-5)
    broken = check(["gc.freeze"], original, [of(4.0, 2.2)])
    assert broken.broken == (
        "the losses of the first steps differ by 3.3 %, where at most <0.1 % is to be expected: it trains differently "
        "than it promises"
    )
    assert check(["ddp.bucket_cap_mb"], original, [of(4.0, 2.01)]).broken == ""
    own = [of(4.0, 2.0), of(4.0, 2.03)]
    assert check(["ddp.bucket_cap_mb"], own, [of(4.0, 2.07)]).broken == ""
    assert check(["ddp.bucket_cap_mb", "gc.freeze"], original, [of(4.0, 2.01)]).broken == ""


@pytest.mark.parametrize(
    ("keys", "original", "changed", "why"),
    [
        (["loader.num_workers"], [of(1.0), of(1.0)], [of(2.0)], "the change may train differently"),
        (["fp16.enabled"], [of(1.0), of(1.0)], [of(2.0)], "the change may train differently"),
        (["gc.freeze"], [{}, {}], [{}], "the job calls backward of no single number"),
        (["gc.freeze"], [of(1.0)], [of(1.0)], "two runs of the job as it was are needed to compare its losses"),
        (["gc.freeze"], [of(1.0), of(1.1)], [of(2.0)], "the job's own losses differ from run to run by 9.5 %: seed it "
         "to compare them"),
    ],
)  # fmt: skip
def test_where_losses_are_not_compared_it_says_why(
    keys: list[str], original: list[Losses], changed: list[Losses], why: str
) -> None:
    found = check(keys, original, changed)
    assert (found.apart, found.why, found.broken) == (None, why, "")


def test_a_job_that_diverges_by_itself_is_not_blamed_on_the_change() -> None:
    nan = [of(1.0, math.nan), of(1.0, math.nan)]
    assert check(["gc.freeze"], nan, [of(1.0, math.nan)]) == LossCheck(0.0, 1e-5)
    assert "differ in which of them are numbers" in check(["gc.freeze"], [of(1.0), of(1.0)], [of(math.nan)]).broken
