"""What torch.compile takes for itself is a row, also where Dynamo comes late or is reset; and it compiles the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from armed import ALONE, both, captured, inside, train

from dsprof.collectors.hooking import statements
from dsprof.collectors.hooking.statements import Fact
from dsprof.collectors.loop.compilation import Recompilations

CODE = f"""
import os, sys, torch, torch.distributed as dist
torch.manual_seed(0)
{ALONE}
assert os.environ["DSPROF"] == "0" or "torch._dynamo" not in sys.modules
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
@torch.compile(backend="eager", fullgraph=True)
def criterion(x):
    return x.square().sum()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    if step == 3:
        torch._dynamo.reset()
    loss = criterion(compiled(torch.ones(2, 4)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
dist.destroy_process_group()
"""


@both
def test_compilations_are_seen_where_they_happen(native: str, tmp_path: Path) -> None:
    done = train(tmp_path, CODE, native=native, fresh=True)  # torch._dynamo comes with the first compilation
    assert done.returncode == 0, done.stderr
    run = captured(tmp_path)
    forwards, backwards, compiles = run.phases("forward"), run.phases("backward"), run.phases("compile")
    assert len(forwards) == len(backwards) == 4
    # model, criterion and the model's backward, at the first step and again after the reset
    assert len(compiles) == 6
    for first, compiled in ((0, compiles[:3]), (3, compiles[3:])):
        assert inside(compiled[0], forwards[first])
        assert forwards[first].end_ns <= compiled[1].start_ns
        assert compiled[1].end_ns <= backwards[first].start_ns
        assert inside(compiled[2], backwards[first])
    alone = train(tmp_path, CODE, native=native, DSPROF="0")
    assert (alone.returncode, alone.stdout) == (0, done.stdout)  # the losses


@both
def test_a_handler_is_left_as_it_was(native: str, tmp_path: Path) -> None:
    code = f"""
import torch, torch.distributed as dist, torch._dynamo
{ALONE}
from dsprof.collectors.capture import session
handler = torch._dynamo.callback.callback_handler
assert len(handler.start_callbacks) == len(handler.end_callbacks) == 1
session.stop()
assert handler.start_callbacks == handler.end_callbacks == [] and "clear" not in vars(handler)
"""
    done = train(tmp_path, code, native=native)
    assert (done.returncode, done.stderr) == (0, "")


WAITS = f"""
import torch, torch.distributed as dist
{ALONE}
@torch.compile(backend="eager")
def reduce(x):
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x + 1
parameter = torch.nn.Parameter(torch.ones(2))
@torch.compile(backend="eager")
def clip(x):
    parameter.grad = x
    return torch.nn.utils.clip_grad_norm_([parameter], 1.0)
print(reduce(torch.ones(2)).sum().item(), clip(torch.ones(2)).item())
dist.destroy_process_group()
"""


@both
def test_what_we_replace_can_be_called_in_a_compiled_function(native: str, tmp_path: Path) -> None:
    without, done = (train(tmp_path, WAITS, native=native, DSPROF=armed) for armed in "01")
    assert without.returncode == 0, without.stderr
    assert (done.returncode, done.stdout) == (0, without.stdout), done.stderr


def test_what_is_compiled_again_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    stated: list[Fact] = []
    monkeypatch.setattr(statements, "_sink", stated.append)
    again = Recompilations()

    @torch.compile(backend="eager", dynamic=False)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * x.shape[0]

    again.sample()  # nothing was compiled
    for size in (2, 3, 4, 5, 6):
        doubled(torch.ones(size))
        again.compiled()
        again.sample()
    again.state()
    again.state()
    line = doubled._torchdynamo_orig_callable.__code__.co_firstlineno  # type: ignore[attr-defined]
    assert {(fact["function"], fact["site"]) for fact in stated} == {("doubled", f"{__file__}:{line}")}
    # told when it has come twice as often as it was told, and at the end
    assert [fact["times"] for fact in stated] == [1, 2, 4]
    assert stated[-1]["reason"] == "tensor 'x' size mismatch at index 0. expected 5, actual 6"
    assert stated[-1]["spent_ms"] > 0
    torch._dynamo.reset()
