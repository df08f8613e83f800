"""The rank's half of `--set`: that a value reaches the object, and that what became of it is told."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import profile
from torch import nn
from torch.utils.data import DataLoader

from dsprof.collectors.hooking import errors, statements
from dsprof.collectors.overrides import install as overrides

Facts = list[dict[str, Any]]
Ask = Callable[[dict[str, Any]], Facts]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    """Install what is asked for; gives the list in which facts arrive. Everything is taken away again."""
    undo: list[Callable[[], None]] = []
    counted: list[tuple[str, str]] = []

    def install(values: dict[str, Any]) -> Facts:
        facts: Facts = []
        monkeypatch.setenv(overrides.VARIABLE, json.dumps(values))
        statements.send_to(facts.append)
        errors.send_to(lambda where, said: counted.append((where, said)))
        undo.append(overrides.install())
        return facts

    yield install
    for one in undo:
        one()
    statements.send_to(None)
    errors.send_to(None)
    assert not counted


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def told(facts: Facts, key: str) -> dict[str, Any]:
    """The first that is told of a key; there is one for each line that makes something."""
    return next(one for one in facts if one.get("key") == key)


def test_a_loader_has_other_workers(ask: Ask) -> None:
    facts = ask({"loader.num_workers": 2, "loader.prefetch_factor": 3, "loader.persistent_workers": True})
    loader = DataLoader([1, 2, 3], 1, False)
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 3, True)
    fact = told(facts, "loader.num_workers")
    assert (fact["value"], fact["was"]) == (2, 0)
    assert fact["site"].startswith(f"{__file__}:")


def test_a_loader_without_workers_has_nothing_of_theirs(ask: Ask) -> None:
    ask({"loader.num_workers": 0})
    loader: DataLoader[int] = DataLoader([1, 2], num_workers=2, prefetch_factor=4, persistent_workers=True, timeout=5)  # type: ignore[arg-type]
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (0, None, False)
    assert list(loader) == [torch.tensor([1]), torch.tensor([2])]


def test_prefetching_needs_workers(ask: Ask) -> None:
    facts = ask({"loader.prefetch_factor": 4})
    assert DataLoader([1]).prefetch_factor is None  # type: ignore[arg-type]
    assert told(facts, "loader.prefetch_factor")["why"] == "the loader has no workers; set loader.num_workers, too"


def test_an_optimizer_of_a_class_that_has_it_is_fused(ask: Ask) -> None:
    facts = ask({"optimizer.fused": True})
    parameters = [nn.Parameter(torch.ones(2))]
    assert torch.optim.AdamW(parameters, foreach=True).defaults["fused"] is True
    assert "fused" not in torch.optim.RMSprop(parameters).defaults
    assert told(facts, "optimizer.fused")["was"] is None


def test_ddp(ask: Ask, group: None) -> None:
    facts = ask({"ddp.bucket_cap_mb": 7, "ddp.gradient_as_bucket_view": True, "ddp.comm_hook": "fp16"})
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=3)
    assert model.bucket_bytes_cap == 7 * 2**20
    assert model.gradient_as_bucket_view is True
    assert told(facts, "ddp.bucket_cap_mb")["was"] == 3
    assert told(facts, "ddp.comm_hook")["was"] is None
    model(torch.ones(1, 2)).sum().backward()


def sharded_units(module: nn.Module) -> list[int]:
    """How many parameters each communication unit of FSDP2 has, in the order of their modules."""
    states = [one._get_fsdp_state() for one in module.modules() if hasattr(one, "_get_fsdp_state")]
    groups = {id(state): state for state in states}.values()
    return [len(state._fsdp_param_group.fsdp_params) for state in groups if state._fsdp_param_group is not None]


def test_fsdp2_has_coarser_units_and_another_format(ask: Ask, group: None) -> None:
    from torch.distributed import fsdp

    facts = ask({"fsdp2.modules_per_unit": 2, "fsdp2.reduce_dtype": "bfloat16", "fsdp2.reshard_after_forward": False})
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    for layer in model:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    assert sorted(sharded_units(model)) == [2, 4, 4]
    assert told(facts, "fsdp2.reduce_dtype")["was"] is None
    assert told(facts, "fsdp2.modules_per_unit")["was"] == 1
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def test_fsdp2_is_refused_where_units_stay_incomplete(ask: Ask, group: None) -> None:
    from torch.distributed import fsdp

    ask({"fsdp2.modules_per_unit": 2})
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in model:
        fsdp.fully_shard(layer)
    with pytest.raises(RuntimeError, match="call fully_shard\\(model\\) after its parts"):
        torch.optim.SGD(model.parameters(), 0.1)


def test_fsdp2_prefetches_ahead(ask: Ask, group: None) -> None:
    from torch.distributed import fsdp

    facts = ask({"fsdp2.forward_prefetch": 2})
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for layer in model:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    ahead = [len(layer._get_fsdp_state()._states_to_forward_prefetch) for layer in model]  # type: ignore[union-attr,operator]
    assert ahead == [2, 2, 1, 0]
    assert told(facts, "fsdp2.forward_prefetch")["value"] == 2


def test_a_json_configuration_is_changed_and_stated(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []

    def initialize(args: Any = None, model: Any = None, config: Any = None, config_params: Any = None) -> None:
        taken.append((getattr(args, "deepspeed_config", None), config, config_params))

    module = ModuleType("deepspeed")
    module.initialize = initialize  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "wandb": {"api_key": "0123456789abcdef"}}))
    facts = ask({"zero_optimization.reduce_bucket_size": 1000, "zero_optimization.stage": 1})

    module.initialize(config=str(path))  # type: ignore[attr-defined]
    changed = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}, "wandb": {"api_key": "0123456789abcdef"}}
    assert taken.pop() == (None, changed, None)
    (config,) = [fact for fact in facts if fact["fact"] == "config"]
    assert (config["path"], config["dialect"]) == (str(path), "deepspeed")
    assert config["content"]["zero_optimization"] == changed["zero_optimization"]
    assert "0123456789abcdef" not in json.dumps(facts)
    assert told(facts, "zero_optimization.stage")["was"] == 2

    flags = type("Flags", (), {"deepspeed_config": str(path)})()
    module.initialize(flags)  # type: ignore[attr-defined]
    assert taken.pop() == (None, changed, None)
    assert flags.deepspeed_config == str(path)
    given: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    module.initialize(config_params=given)  # type: ignore[attr-defined]
    assert taken.pop()[1:] == ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}}, None)
    assert given == {"zero_optimization": {"stage": 3}}


def test_the_configuration_is_stated_where_nothing_is_asked_for(ask: Ask, group: None) -> None:
    from dsprof import engine

    facts = ask({})
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine.initialize(model=nn.Linear(2, 2), config=config)[0].destroy()
    (fact,) = [one for one in facts if one["fact"] == "config"]
    assert (fact["dialect"], fact["path"], fact["content"]) == ("dsprof", None, config)


def test_an_argument_that_is_not_there_is_told(ask: Ask) -> None:
    facts = ask({"loader.nun_workers": 2})
    assert told(facts, "loader.nun_workers")["why"] == "DataLoader has no argument nun_workers; it has num_workers"


def test_pipelines_have_other_micro_batches_and_schedules(ask: Ask, group: None) -> None:
    from torch.distributed import pipelining

    facts = ask({"pipelining.microbatches": 6, "pipelining.schedule": "gpipe"})
    stage = pipelining.PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, 3, loss_fn=nn.MSELoss())
    assert type(schedule).__name__ == "ScheduleGPipe"
    assert schedule._n_microbatches == 6
    schedule.step(torch.ones(12, 2), target=torch.ones(12, 2))
    assert told(facts, "pipelining.microbatches")["was"] == 3
    assert told(facts, "pipelining.schedule")["was"] == "Schedule1F1B"


def test_arguments_of_trainers(ask: Ask, tmp_path: Path) -> None:
    from accelerate import Accelerator
    from transformers import Seq2SeqTrainingArguments

    wanted = {"trainer.gradient_accumulation_steps": 4, "trainer.lr_scheduler_typ": "cosine"}
    facts = ask({**wanted, "accelerate.gradient_accumulation_steps": 3})
    arguments = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    assert arguments.gradient_accumulation_steps == 4
    assert told(facts, "trainer.gradient_accumulation_steps")["was"] == 1
    assert told(facts, "trainer.lr_scheduler_typ")["why"].endswith("it has lr_scheduler_type")
    assert Accelerator(cpu=True).gradient_accumulation_steps == 3
    assert told(facts, "accelerate.gradient_accumulation_steps")["was"] == 1


JOB = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
losses = []
for number in range(24):
    loss = model(torch.full((2, 16), 0.1 * (1 + dist.get_rank() + number))).pow(2).mean()
    loss.div(3).backward()
    losses.append(loss.item())
    if number % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()
if dist.get_rank() == 0:
    print(losses)
dist.destroy_process_group()
"""


def losses_of_one_process() -> list[float]:
    """What rank 0 of JOB sees, with the ranks' gradients averaged by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    for number in range(24):
        of_ranks = [model(torch.full((2, 16), 0.1 * (1 + rank + number))).pow(2).mean() for rank in range(2)]
        losses.append(of_ranks[0].item())
        (sum(of_ranks) / 6).backward()  # type: ignore[union-attr]
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_a_job_trains_with_its_knobs_turned(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(JOB)
    changes = {
        "ddp.accumulate": 3,
        "ddp.bucket_cap_mb": 1,
        "gc.every": 2,
        "env.SOMETHING": "x",
        "fsdp2.param_dtype": "float32",
    }
    flags = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    finished = profile(tmp_path, script, flags=("--no-report", *flags))
    assert finished.status == 0, finished.stderr
    assert json.loads(finished.stdout) == pytest.approx(losses_of_one_process(), rel=1e-5)
    said = " ".join(finished.stderr.split())
    assert "this run had --set ddp.accumulate=3 (without it: 1)" in said
    assert "this run had --set gc.every=2 (without it: automatic)" in said
    assert "--set fsdp2.param_dtype=float32 was not applied: nothing in the job takes it" in said
    assert json.loads(finished.folder.run_json.read_text())["knobs"] == {**changes}
    analysis = finished.analysis()
    reductions = analysis.collectives[analysis.collectives["purpose"] == "gradient"]
    assert set(reductions.groupby("step").size()) == {1}
