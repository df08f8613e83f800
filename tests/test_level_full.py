"""Real jobs at level full: they compute what they compute without dsprof, bit for bit, and the numbers are right."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import forked_python
import pytest
from jobs import Finished, environment, profile

from dsprof.launch.peak import measure, measure_here, note_peaks
from dsprof.names import host_name
from dsprof.run import HostPart, RunFolder, RunInfo

JOB = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
    def forward(self, x):
        return x + self.down(torch.relu_(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(16, 32), nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 16)
    def forward(self, ids):
        x = self.embed(ids)
        x = self.blocks[0](x)
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        return {"logits": self.head(self.norm(x))}

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = Model()
if sys.argv[1] == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
else:
    from torch.distributed.fsdp import fully_shard
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
generator = torch.Generator().manual_seed(rank)
losses = []
for step in range(8):
    for _ in range(2):
        ids = torch.randint(0, 16, (4, 10), generator=generator)
        logits = model(ids)["logits"]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        losses.append(loss.item().hex())
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    print(*losses)
dist.destroy_process_group()
"""

TOKENS = 40
BLOCK = 2 * TOKENS * 32 * 64 * 2
HEAD = 2 * TOKENS * 32 * 16


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(JOB))
    return path


def plain(script: Path, kind: str) -> str:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        kind,
    ]
    for _ in range(3):
        done = forked_python.run(command, env=environment(), capture_output=True)
        if done.returncode == 0:
            break
    return done.stdout


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_losses_are_those_without_a_profiler_and_operations_those_of_the_model(
    kind: str, script: Path, tmp_path: Path
) -> None:
    done = profile(tmp_path, script, kind, flags=("--level", "full", "--native", "on"))
    assert done.status == 0, done.stderr
    assert done.stdout.split() == plain(script, kind).split() != []
    assert not any(info.errors for info in done.analysis().run.ranks)
    _check_numbers(done)
    _check_modules(done)
    assert "tokens a second" in done.folder.report_html.read_text()


def _check_numbers(done: Finished) -> None:
    """Two micro-batches a step; the embedding's output needs a gradient, so every product has two in backward."""
    found = done.findings["efficiency"]
    assert found["flops"] == {
        "forward": 2 * (2 * BLOCK + HEAD),
        "backward": 2 * 2 * (2 * BLOCK + HEAD),
        "recompute": pytest.approx(2 * BLOCK, rel=0.5),  # it may end early
        "other": 0,
    }
    assert found["counted"] == [0, 1]
    assert found["notes"] == []
    assert 0 < found["mfu"] <= found["hfu"] < 1
    assert "measured after the job" in found["peak"]
    step_s = done.findings["run"]["step_ms"]["mean"] / 1e3
    rates = {item["what"]: (item["a_second"], item["over"]) for item in found["throughput"]}
    assert rates == {
        "samples": (pytest.approx(2 * 2 * 4 / step_s), [0, 1]),
        "tokens": (pytest.approx(2 * 2 * TOKENS / step_s), [0, 1]),
    }


def _check_modules(done: Finished) -> None:
    modules = {item["module"]: item for item in done.findings["modules"]}
    assert {"embed", "blocks.0", "blocks.0.up", "blocks.1.down", "norm", "head"} <= modules.keys()
    for name in ("embed", "blocks.0.up", "blocks.1.up", "head"):
        assert modules[name]["calls"] == 2
        assert modules[name]["backward_own_ms"] > 0
    assert modules["blocks.0.up"]["gflop"] * 1e9 == pytest.approx(3 * BLOCK)
    assert modules["blocks.1"]["recompute_ms"] > 0
    assert modules["blocks.0"]["recompute_ms"] == 0
    assert modules["blocks.0"]["backward_ms"] >= modules["blocks.0.up"]["backward_ms"]


PART = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters())
for step in range(16):
    loss = model(torch.randn(2, 8)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
"""


def test_of_two_steps_the_second_is_counted(tmp_path: Path) -> None:
    script = tmp_path / "part.py"
    script.write_text(PART)
    without = forked_python.run([sys.executable, str(script)], env=environment(), capture_output=True)
    flags = ("--level", "full", "--native", "on", "--steps", "10:12", "--no-report")
    done = profile(tmp_path, script, ranks=None, flags=flags)
    assert done.status == 0, done.stderr
    assert done.stdout == without.stdout != ""
    found = done.findings["efficiency"]
    product = 2 * 2 * 8 * 4
    assert found["flops"] == {"forward": product, "backward": product, "recompute": 0, "other": 0}
    assert found["counted"] == [0]
    assert 0 < found["mfu"] < 1
    assert [item["module"] for item in done.findings["modules"]] == ["Linear"]


@pytest.mark.slow
def test_level_light_has_none_of_it(script: Path, tmp_path: Path) -> None:
    done = profile(tmp_path, script, "ddp", flags=("--native", "on"))
    assert done.status == 0, done.stderr
    assert not {"efficiency", "modules"} & done.findings.keys()
    rows = done.analysis().rows
    assert not rows["name"].astype(str).str.startswith(("flops.", "samples", "tokens")).any()
    assert json.loads(done.folder.run_json.read_text())["cpu_peaks"] == []


# --- the peak of the CPU ------------------------------------------------------------------------


def test_a_product_is_measured_in_each_format() -> None:
    found = measure(["float32", "float64"], 1, None, seconds=0.05)
    assert found.keys() == {"float32", "float64"}
    assert all(flops > 1e8 for flops in found.values())


def tell(folder: RunFolder, rank: int, *facts: dict[str, object], host: str = "") -> None:
    path = folder.capture / f"rank{rank:05d}.0.{host or host_name()}.{100 + rank}"
    path.mkdir(parents=True)
    (path / "facts.jsonl").write_text("".join(json.dumps({**fact, "rank": rank}) + "\n" for fact in facts) + '{"torn')


def test_it_is_measured_once_for_ranks_that_are_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = RunFolder(tmp_path), []

    def fake(dtypes: list[str], threads: int, cpus: list[int] | None) -> dict[str, float]:
        asked.append((dtypes, threads, cpus))
        return dict.fromkeys(dtypes, 1e9 * threads)

    monkeypatch.setattr("dsprof.launch.peak.measure", fake)
    counted = {"fact": "flops", "operations": [["up", "forward", "float32", 8.0], ["", "other", "", 1.0]]}
    tell(folder, 0, {"fact": "process", "threads": 2, "cpus": [0, 1]}, counted)
    # It set its threads when its capture was open.
    tell(folder, 1, {"fact": "process", "threads": 8, "cpus": [2, 3]}, {**counted, "torch_threads": 2})
    tell(folder, 2, {"fact": "process", "threads": 2, "cpus": [0, 1]}, counted, {"fact": "device", "type": "cuda"})
    tell(folder, 3, {"fact": "process", "threads": 2, "cpus": [0, 1]})
    tell(folder, 4, {"fact": "process", "threads": 2, "cpus": [0, 1]}, counted, host="elsewhere")
    info = RunInfo(id="run", name="run", command=[], level="full", status=0)
    note_peaks(folder, info)
    note_peaks(folder, info)
    assert asked == [(["float32"], 2, [0, 1])]
    assert folder.read_info().cpu_peaks == [
        {"host": host_name(), "ranks": [rank], "threads": 2, "flops": {"float32": 2e9}} for rank in (0, 1)
    ]


def test_each_host_measures_for_its_own_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    speed = {"a": 1e9, "b": 3e9}
    counted = {"fact": "flops", "operations": [["up", "forward", "float32", 8.0]]}
    for rank, host in enumerate("ab"):
        tell(folder, rank, {"fact": "process", "threads": 2, "cpus": [0, 1]}, counted, host=host)
    info = RunInfo(id="run", name="run", command=[], level="full", status=0)
    for host in "ba":
        monkeypatch.setenv("DSPROF_HOST", host)
        monkeypatch.setattr(
            "dsprof.launch.peak.measure", lambda dtypes, *_, flops=speed[host]: dict.fromkeys(dtypes, flops)
        )
        if host == "b":
            folder.write_host(HostPart("b", 1, ended="now", status=0, cpu_peaks=measure_here(folder, info)))
    note_peaks(folder, info)  # on a, the host of rank 0
    peaks = folder.read_info().cpu_peaks
    assert [(item["host"], item["ranks"], item["flops"]["float32"]) for item in peaks] == [
        ("b", [1], 3e9), ("a", [0], 1e9),
    ]  # fmt: skip


@pytest.mark.parametrize("info", [{"level": "light", "status": 0}, {"level": "full", "status": 1}])
def test_nothing_is_measured_for_others(info: dict[str, object], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    tell(
        folder,
        0,
        {"fact": "process", "threads": 2, "cpus": [0]},
        {"fact": "flops", "operations": [["", "forward", "no such format", 1.0]]},
    )
    run = RunInfo(id="run", name="run", command=[], **info)  # type: ignore[arg-type]
    note_peaks(folder, run)
    assert run.cpu_peaks == []
