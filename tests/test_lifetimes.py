"""A capture keeps nothing of the job's: with its step a tensor goes, not with the next collection of garbage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from captures import build_helper
from jobs import environment

JOB = """
import gc, sys, weakref
from pathlib import Path
import torch, torch.distributed as dist
from dsprof.collectors import errors, native, session, window

folder = Path(sys.argv[1])
window.LOOK_EVERY_S = 0.0
capture = session.start()
assert isinstance(capture.recorder, native.NativeRecorder) == (sys.argv[2] == "native")
dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
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
        (Path(session.identity.setting("DSPROF_RUN")) / "control.json").write_text('{"capture": "on"}')

model = torch.nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters())
loader = iter(torch.utils.data.DataLoader(torch.arange(10)))
gc.collect()
gc.disable()
for number in range(10):
    next(loader)
    step(number)
print([one() is not None for one in kept].count(True), gc.isenabled())
session.stop()
"""


@pytest.mark.parametrize(("recorder", "level"), [("native", "light"), ("python", "full")])
def test_a_steps_tensors_go_with_the_step(recorder: str, level: str, tmp_path: Path) -> None:
    if recorder == "native":
        build_helper()
    env = {
        "DSPROF_NATIVE": "1" if recorder == "native" else "0", "DSPROF_LEVEL": level,
        "DSPROF_RUN": str(tmp_path / "run"), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
        "PYTHONPATH": ":".join(sys.path),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(tmp_path), recorder], env=environment(**env), capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 False\n"
