"""Saving a checkpoint is a row, once, whoever saves it and however."""

from __future__ import annotations

from pathlib import Path

from armed import ALONE, both, captured, train

OPEN = f"""
import io, sys, threading, time
import torch, torch.distributed as dist
{ALONE}
state = {{"weight": torch.ones(1000)}}
"""


@both
def test_torch_save(native: str, tmp_path: Path) -> None:
    code = (
        OPEN
        + """
torch.save(state, "a.pt")
with open("b.pt", "wb") as file:
    torch.serialization.save(state, file)
try:
    torch.save(lambda: None, "c.pt")
except Exception as error:
    print(type(error).__name__)
class Slow:
    def __reduce__(self):
        time.sleep(0.002)
        return (list, ())
torch.save(Slow(), f=io.BytesIO())
thread = threading.Thread(target=torch.save, args=(state, "d.pt"))
thread.start()
thread.join()
assert torch.load("a.pt")["weight"].sum() == 1000
"""
    )
    done = train(tmp_path, code, native=native)
    assert (done.returncode, done.stderr) == (0, "")
    run = captured(tmp_path)
    saves = run.phases("checkpoint")
    assert len(saves) == len(run.phases()) == 5
    assert len({row.thread for row in saves}) == 2
    assert all(row.end_ns > row.start_ns for row in saves)
    lines = [
        1 + code.split(call)[0].count("\n") for call in ('torch.save(state, "a', "torch.serial", "torch.save(lambda")
    ]
    assert [(fact["function"], fact["site"]) for fact in run.of("checkpoint")][:3] == [
        ("torch.save", f"{tmp_path}/train.py:{line}") for line in lines
    ]


@both
def test_torch_save_that_somebody_has_replaced(native: str, tmp_path: Path) -> None:
    """As ultralytics does: the capture finds another function there than in torch.serialization."""
    code = (
        """
import torch, torch.distributed as dist
real = torch.save
def replaced(*args, **kwargs):
    return real(*args, **kwargs)
torch.save = replaced
"""
        + ALONE
        + """
torch.save(1, "a.pt")
torch.serialization.save(1, "b.pt")
real(1, "c.pt")
"""
    )
    done = train(tmp_path, code, native=native)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(captured(tmp_path).phases("checkpoint")) == 2


@both
def test_a_trainers_checkpoint_is_all_that_it_does_to_save_one(native: str, tmp_path: Path) -> None:
    code = (
        """
import sys, types
import torch, torch.distributed as dist
class Trainer:
    def _save_checkpoint(self, model, trial):
        torch.save(1, "model.pt")
        torch.save(1, "optimizer.pt")
class Accelerator:
    def save_state(self, folder):
        torch.save(1, folder)
for name, cls in (("transformers.trainer", Trainer), ("accelerate.accelerator", Accelerator)):
    sys.modules[name] = types.ModuleType(name)
    setattr(sys.modules[name], cls.__name__, cls)
"""
        + ALONE
        + """
Trainer()._save_checkpoint(None, None)
Accelerator().save_state("saved")
"""
    )
    done = train(tmp_path, code, native=native)
    assert (done.returncode, done.stderr) == (0, "")
    run = captured(tmp_path)
    assert len(run.phases("checkpoint")) == 2
    assert [fact["function"] for fact in run.of("checkpoint")] == ["transformers.Trainer", "accelerator.save_state"]


@both
def test_what_is_quickly_put_into_memory_is_no_checkpoint(native: str, tmp_path: Path) -> None:
    code = (
        OPEN
        + """
for _ in range(20):
    began = time.perf_counter()
    torch.save(1, io.BytesIO())
    print(time.perf_counter() - began > 0.0009)
"""
    )
    done = train(tmp_path, code, native=native)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(captured(tmp_path).phases("checkpoint")) <= done.stdout.count("True")


@both
def test_distributed_checkpoint_is_one_row_a_call(native: str, tmp_path: Path) -> None:
    code = (
        OPEN
        + """
assert "torch.distributed.checkpoint" not in sys.modules
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import save
dcp.save(state, checkpoint_id="one")
save(state, storage_writer=dcp.FileSystemWriter("two", thread_count=2))
dcp.async_save(state, checkpoint_id="three").result()
torch.save(state, "four.pt")
"""
    )
    done = train(tmp_path, code, native=native)
    assert done.returncode == 0, done.stderr
    run = captured(tmp_path)
    assert len(run.phases("checkpoint")) == 4
    assert [fact["function"] for fact in run.of("checkpoint")] == [
        "torch.distributed.checkpoint.save", "torch.distributed.checkpoint.save",
        "torch.distributed.checkpoint.async_save", "torch.save",
    ]  # fmt: skip


@both
def test_safetensors_under_whatever_name(native: str, tmp_path: Path) -> None:
    code = (
        """
import torch, torch.distributed as dist
from safetensors.torch import save_file as imported_before  # as transformers does
import safetensors.torch
"""
        + ALONE
        + """
imported_before({"weight": torch.ones(10)}, "a.safetensors")
safetensors.torch.save_file({"weight": torch.ones(10)}, "b.safetensors")
safetensors.torch.save_model(torch.nn.Linear(2, 2), "c.safetensors")
"""
    )
    done = train(tmp_path, code, native=native)
    assert (done.returncode, done.stderr) == (0, "")
    run = captured(tmp_path)
    assert len(run.phases("checkpoint")) == 3
    assert [fact["function"].rpartition(".")[2] for fact in run.of("checkpoint")] == [
        "save_file", "save_file", "save_model",
    ]  # fmt: skip


@both
def test_the_engines_own_checkpoint_is_told_once(native: str, tmp_path: Path) -> None:
    code = """
import torch, dsprof.engine as engine
model = torch.nn.Linear(2, 2)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
trained, *_ = engine.initialize(model=model, model_parameters=model.parameters(), config=config)
trained.backward(trained(torch.ones(1, 2)).sum())
trained.step()
trained.save_checkpoint("checkpoints")
trained.save_16bit_model("whole")
torch.save({}, "after.pt")
"""
    done = train(
        tmp_path,
        code,
        native=native,
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    assert done.returncode == 0, done.stderr
    run = captured(tmp_path)
    assert len(run.phases("checkpoint")) == 3
    assert [fact["function"] for fact in run.of("checkpoint")] == ["torch.save"]
