"""A capture keeps nothing of the job's: with its step a tensor goes, not with the next collection of garbage."""

from __future__ import annotations

from pathlib import Path

import pytest
from armed import ALONE, captured, train

JOB = f"""
import gc, weakref
from pathlib import Path
import torch, torch.distributed as dist
from dsprof.collectors.capture import window

window.LOOK_EVERY_S = 0.0
{ALONE}
kept = []

class Watched:
    pass

class Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, watched):
        ctx.watched = watched
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))

    def forward(self, x, watched):
        return Keep.apply(self.layers(x), watched)

def step(number):
    watched = Watched()
    kept.append(weakref.ref(watched))
    loss = model(torch.ones(2, 4), watched).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if number == 5:
        Path("run/control.json").write_text('{{"capture": "on"}}')

model = torch.nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters())
loader = iter(torch.utils.data.DataLoader(torch.arange(10)))
gc.collect()
gc.disable()
for number in range(10):
    next(loader)
    step(number)
print([one() is not None for one in kept].count(True), gc.isenabled())
"""


@pytest.mark.parametrize(("native", "level"), [("1", "light"), ("0", "full")])
def test_a_steps_tensors_go_with_the_step(native: str, level: str, tmp_path: Path) -> None:
    done = train(tmp_path, JOB, native=native, DSPROF_LEVEL=level)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 False\n"
    assert len(captured(tmp_path).phases("optimizer")) == 10
