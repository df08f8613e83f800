"""Where Python has no global interpreter lock nothing is recorded, nothing is wrapped, and it is said. There the
interpreter's own words are injected."""

from __future__ import annotations

import dataclasses
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401  (the helper is for the torch of this process)
from armed import train

from dsprof.collectors.arming import free_threaded
from dsprof.collectors.native import build
from dsprof.collectors.native.target import running_target
from dsprof.launch import LaunchError
from dsprof.launch.launch import build_native_helper
from dsprof.launch.talk import Talk
from dsprof.run import RunError, open_run
from dsprof.settings import Settings

JOB = """
import sys
sys._is_gil_enabled = lambda: False
import torch, torch.distributed as dist
{arm}
from torch.autograd import graph
from torch.nn import Module
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter
hooked = len(hooks)
{join}
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(torch.ones(6, 4), batch_size=2):
    model(batch).sum().backward()
    optimizer.step()
ours = [
    function for function in (
        Module.__call__, DistributedDataParallel.__init__, DataLoader.__init__, DataLoader.__iter__,
        _BaseDataLoaderIter.__init__, _BaseDataLoaderIter.__next__, graph._engine_run_backward, dist.Work.wait,
    ) if "dsprof" in getattr(getattr(function, "__code__", None), "co_filename", "")
]
print(hooked, len(hooks), ours, "trained", "dsprof_native" in sys.modules)
"""
ALONE, GROUP = "", 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)'
ARM = "from dsprof.collectors.arm import autoload; autoload()"
"""What torch does at the end of its import, for a program forked from a process that has it: it says that it is
free-threaded when that is over."""
NO_ARM = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""With this nothing else arms it."""


def said() -> str:
    return (
        f"nothing is recorded: this Python ({platform.python_version()}, {sys.executable}) is free-threaded, and dsprof"
        " relies on the global interpreter lock; run the job with the ordinary build of the same Python"
    )


def test_this_python_has_the_lock() -> None:
    assert free_threaded.refusal() is None
    assert not running_target().free_threaded


def test_how_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the interpreter was built for; an extension may have switched the lock on, or off again."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
        assert free_threaded.refusal() == said()
    monkeypatch.setattr(sys, "abiflags", "t")
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    assert free_threaded.refusal() == said()


@pytest.mark.parametrize(("join", "fresh"), [(ALONE, True), (GROUP, False)])
def test_a_job_is_left_alone(join: str, fresh: bool, tmp_path: Path) -> None:
    job = JOB.format(join=join, arm="" if fresh else ARM)
    done: subprocess.CompletedProcess[str] = train(tmp_path, job, native="", fresh=fresh, **({} if fresh else NO_ARM))
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 0 [] trained False\n", "")
    (left,) = (tmp_path / "run").iterdir()
    assert left.read_text() == f"{said()}\n"
    with pytest.raises(RunError, match="no capture was begun: nothing is recorded: this Python") as raised:
        open_run(tmp_path / "run")
    assert str(raised.value).endswith("run the job with the ordinary build of the same Python")


def test_a_process_that_is_no_rank_leaves_no_word(tmp_path: Path) -> None:
    job = f"import sys\nsys._is_gil_enabled = lambda: False\nimport torch\n{ARM}"
    done = train(tmp_path, job, native="", **NO_ARM)
    assert (done.returncode, done.stderr) == (0, "")
    assert list((tmp_path / "run").iterdir()) == []


def test_the_launcher_says_it_before_the_job_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    monkeypatch.setattr(build, "ensure", lambda *args: pytest.fail("it was built"))
    for native in ("auto", "off"):
        build_native_helper(Settings(native=native), Talk())
        assert capsys.readouterr().err == f"[dsprof] warning: {said()}\n"
    with pytest.raises(LaunchError, match="no native helper: nothing is recorded: this Python"):
        build_native_helper(Settings(native="on"), Talk())


@pytest.mark.parametrize("soabi", ["cpython-313t-x86_64-linux-gnu", "cpython-314td-x86_64-linux-gnu"])
def test_no_helper_is_built_for_it(soabi: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = dataclasses.replace(running_target(), soabi=soabi)
    monkeypatch.setattr(build, "probe_target", lambda python: other)
    with pytest.raises(build.NoHelper) as raised:
        build.ensure(Path("/usr/bin/python3.13t"), print)
    assert str(raised.value) == f"/usr/bin/python3.13t is free-threaded ({soabi}), where dsprof records nothing"
