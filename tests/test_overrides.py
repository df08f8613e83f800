"""The rank's half of `--set`: that a value reaches the object, and that what became of it is told."""

from __future__ import annotations

import gc
import importlib
import json
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from jobs import profile
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from dsprof.collectors.hooking import statements
from dsprof.collectors.overrides import install as overrides

Facts = list[dict[str, Any]]
Turn = Callable[[dict[str, Any]], Facts]


def told(facts: Facts, key: str) -> dict[str, Any]:
    """The first that is told of a key; there is one for each line that makes something."""
    return next(one for one in facts if one.get("key") == key)


def test_a_loader_has_other_workers(turn: Turn) -> None:
    facts = turn({"loader.num_workers": 2, "loader.prefetch_factor": 3, "loader.persistent_workers": True})
    loader = DataLoader([1, 2, 3], 1, False)
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 3, True)
    fact = told(facts, "loader.num_workers")
    assert (fact["value"], fact["was"]) == (2, 0)
    assert fact["site"].startswith(f"{__file__}:")


def test_a_loader_without_workers_has_nothing_of_theirs(turn: Turn) -> None:
    turn({"loader.num_workers": 0})
    loader: DataLoader[int] = DataLoader([1, 2], num_workers=2, prefetch_factor=4, persistent_workers=True, timeout=5)  # type: ignore[arg-type]
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (0, None, False)
    assert list(loader) == [torch.tensor([1]), torch.tensor([2])]


def test_prefetching_needs_workers(turn: Turn) -> None:
    facts = turn({"loader.prefetch_factor": 4})
    assert DataLoader([1]).prefetch_factor is None  # type: ignore[arg-type]
    assert told(facts, "loader.prefetch_factor")["why"] == "the loader has no workers; set loader.num_workers, too"


def test_an_optimizer_of_a_class_that_has_it_is_fused(turn: Turn) -> None:
    facts = turn({"optimizer.fused": True})
    parameters = [nn.Parameter(torch.ones(2))]
    assert torch.optim.AdamW(parameters, foreach=True).defaults["fused"] is True
    assert "fused" not in torch.optim.RMSprop(parameters).defaults
    assert told(facts, "optimizer.fused")["was"] is None


def test_ddp(turn: Turn, group: None) -> None:
    facts = turn({"ddp.bucket_cap_mb": 7, "ddp.gradient_as_bucket_view": True, "ddp.comm_hook": "fp16"})
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


def test_fsdp2_has_coarser_units_and_another_format(turn: Turn, group: None) -> None:
    from torch.distributed import fsdp

    facts = turn({"fsdp2.modules_per_unit": 2, "fsdp2.reduce_dtype": "bfloat16", "fsdp2.reshard_after_forward": False})
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


def test_fsdp2_is_refused_where_units_stay_incomplete(turn: Turn, group: None) -> None:
    from torch.distributed import fsdp

    turn({"fsdp2.modules_per_unit": 2})
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in model:
        fsdp.fully_shard(layer)
    with pytest.raises(RuntimeError, match="call fully_shard\\(model\\) after its parts"):
        torch.optim.SGD(model.parameters(), 0.1)


def test_fsdp2_that_is_set_up_unit_by_unit_keeps_its_units(turn: Turn, group: None) -> None:
    from torch.distributed import fsdp

    facts = turn({"fsdp2.modules_per_unit": 2})
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in model:
        fsdp.fully_shard(layer)
        assert layer.in_features == 4
        assert not hasattr(layer, "nothing_of_the_kind")
        layer.set_requires_gradient_sync(True)  # type: ignore[operator]
    fsdp.fully_shard(model)
    assert sorted(sharded_units(model)) == [2, 2, 2]
    assert (
        "the script calls set_requires_gradient_sync() of each module" in told(facts, "fsdp2.modules_per_unit")["why"]
    )
    assert [type(layer).__name__ for layer in model] == 3 * ["FSDPLinear"]
    assert type(model[0]).__mro__[2] is nn.Linear


def test_fsdp2_is_reached_by_its_older_names(turn: Turn, group: None) -> None:

    facts = turn({"fsdp2.modules_per_unit": 2})
    from torch.distributed._composable.fsdp import fully_shard
    from torch.distributed.fsdp import fully_shard as other

    assert other is fully_shard
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for layer in model:
        fully_shard(layer)
    other(model)
    assert sorted(sharded_units(model)) == [4, 4]
    assert told(facts, "fsdp2.modules_per_unit")["was"] == 1


def test_fsdp2_prefetches_ahead(turn: Turn, group: None) -> None:
    from torch.distributed import fsdp

    facts = turn({"fsdp2.forward_prefetch": 2})
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for layer in model:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    ahead = [len(layer._get_fsdp_state()._states_to_forward_prefetch) for layer in model]  # type: ignore[union-attr,operator]
    assert ahead == [2, 2, 1, 0]
    assert told(facts, "fsdp2.forward_prefetch")["value"] == 2


def test_a_json_configuration_is_changed_and_stated(
    turn: Turn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []

    def initialize(args: Any = None, model: Any = None, config: Any = None, config_params: Any = None) -> None:
        taken.append((getattr(args, "deepspeed_config", None), config, config_params))

    module = ModuleType("deepspeed")
    module.initialize = initialize  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "wandb": {"api_key": "0123456789abcdef"}}))
    facts = turn({"zero_optimization.reduce_bucket_size": 1000, "zero_optimization.stage": 1})

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


BATCHES = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}


@pytest.mark.parametrize(
    ("turned", "left", "says"),
    [
        ({"gradient_accumulation_steps": 8}, {"train_batch_size": 64, "gradient_accumulation_steps": 8},
         "which is 2 in the configuration, is found anew, so that train_batch_size stays 64"),
        ({"train_micro_batch_size_per_gpu": 8}, {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8},
         "gradient_accumulation_steps, which is 4 in the configuration, is found anew"),
        ({"train_batch_size": 128}, {"train_batch_size": 128, "train_micro_batch_size_per_gpu": 2},
         "so that train_micro_batch_size_per_gpu stays 2"),
        ({"train_batch_size": 128, "gradient_accumulation_steps": 2},
         {"train_batch_size": 128, "gradient_accumulation_steps": 2}, "train_micro_batch_size_per_gpu, which is 2"),
        ({"gradient_clipping": 2.0}, {**BATCHES, "gradient_clipping": 2.0}, ""),
    ],
)  # fmt: skip
def test_batch_sizes_never_contradict_each_other(
    turned: dict[str, Any], left: dict[str, Any], says: str, turn: Turn, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    module = ModuleType("deepspeed")
    module.initialize = lambda args=None, config=None: taken.append(config)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    facts = turn(turned)
    module.initialize(config=dict(BATCHES))
    assert taken == [left]
    notes = [fact["text"] for fact in facts if fact["fact"] == "note"]
    assert len(notes) == bool(says)
    assert all(says in note for note in notes)


def test_the_configuration_is_stated_where_nothing_is_asked_for(turn: Turn, group: None) -> None:
    facts = turn({})
    module = importlib.import_module("dsprof.engine.setup.initialize")  # `dsprof.engine` may have its function already
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    module.initialize(model=nn.Linear(2, 2), config=config)[0].destroy()
    (fact,) = [one for one in facts if one["fact"] == "config"]
    assert (fact["dialect"], fact["path"], fact["content"]) == ("dsprof", None, config)


def test_the_optimizer_of_a_configuration_is_no_argument_of_torchs(turn: Turn, group: None) -> None:
    facts = turn({"optimizer.type": "Lion", "optimizer.params.lr": 0.5})
    module = importlib.import_module("dsprof.engine.setup.initialize")
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, optimizer, *_ = module.initialize(model=nn.Linear(2, 2), config=config)
    assert (type(optimizer).__name__, optimizer.param_groups[0]["lr"]) == ("Lion", 0.5)
    engine.destroy()
    assert told(facts, "optimizer.type")["was"] == "SGD"


def test_float8_reaches_the_engine(turn: Turn, group: None) -> None:
    """Its layer rounds inputs to three bits of mantissa: 1.03 is 1 there."""
    facts = turn({"fp8.enabled": True, "fp8.filter": "all"})
    module = importlib.import_module("dsprof.engine.setup.initialize")
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    layer = nn.Linear(16, 16, bias=False)
    nn.init.ones_(layer.weight)
    engine = module.initialize(model=layer, config=config)[0]
    assert engine(torch.full((1, 16), 1.03)).tolist() == [[16.0] * 16]
    engine.destroy()
    assert (told(facts, "fp8.enabled")["value"], told(facts, "fp8.enabled")["was"]) == (True, None)


def test_an_argument_that_is_not_there_is_told(turn: Turn) -> None:
    facts = turn({"loader.nun_workers": 2})
    assert told(facts, "loader.nun_workers")["why"] == "DataLoader has no argument nun_workers; it has num_workers"


def test_pipelines_have_other_micro_batches_and_schedules(turn: Turn, group: None) -> None:
    from torch.distributed import pipelining

    facts = turn({"pipelining.microbatches": 6, "pipelining.schedule": "gpipe"})
    stage = pipelining.PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, 3, loss_fn=nn.MSELoss())
    assert type(schedule).__name__ == "ScheduleGPipe"
    assert schedule._n_microbatches == 6
    schedule.step(torch.ones(12, 2), target=torch.ones(12, 2))
    assert told(facts, "pipelining.microbatches")["was"] == 3
    assert told(facts, "pipelining.schedule")["was"] == "Schedule1F1B"


def test_a_schedule_that_takes_the_place_of_another_can_be_pickled(turn: Turn, group: None) -> None:
    from torch.distributed import pipelining

    turn({"pipelining.schedule": "gpipe"})
    schedule = pipelining.Schedule1F1B.__new__(pipelining.Schedule1F1B)
    schedule._n_microbatches = 5
    again = pickle.loads(pickle.dumps(schedule))
    assert type(again) is pipelining.ScheduleGPipe
    assert again._n_microbatches == 5


def test_arguments_of_trainers(turn: Turn, tmp_path: Path) -> None:
    from accelerate import Accelerator
    from transformers import Seq2SeqTrainingArguments

    wanted = {"trainer.gradient_accumulation_steps": 4, "trainer.lr_scheduler_typ": "cosine"}
    facts = turn({**wanted, "accelerate.gradient_accumulation_steps": 3})
    arguments = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    assert arguments.gradient_accumulation_steps == 4
    assert told(facts, "trainer.gradient_accumulation_steps")["was"] == 1
    assert told(facts, "trainer.lr_scheduler_typ")["why"].endswith("it has lr_scheduler_type")
    assert Accelerator(cpu=True).gradient_accumulation_steps == 3
    assert told(facts, "accelerate.gradient_accumulation_steps")["was"] == 1


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_a_loader_that_would_read_its_samples_several_times_gets_no_workers(turn: Turn) -> None:
    facts = turn({"loader.num_workers": 2, "loader.prefetch_factor": 3})
    loader = DataLoader(Numbers(), batch_size=None)
    assert (loader.num_workers, list(loader)) == (0, [0, 1, 2])
    assert "its samples would come several times" in told(facts, "loader.num_workers")["why"]
    assert DataLoader(Numbers(), num_workers=1).num_workers == 2  # the script sees to it


def test_an_optimizer_that_cannot_be_fused_is_left_as_it_is(turn: Turn) -> None:
    facts = turn({"optimizer.fused": True})
    parameters = [torch.ones(2, dtype=torch.complex64, requires_grad=True)]
    groups = ({"params": (one for one in parameters)} for _ in range(1))
    optimizer = torch.optim.AdamW(groups)
    assert not optimizer.defaults["fused"]
    assert optimizer.param_groups[0]["params"][0] is parameters[0]
    assert told(facts, "optimizer.fused")["why"] == "fused kernels take no parameters of torch.complex64 on cpu"


def accumulating(every: int, turn: Turn) -> tuple[nn.Module, torch.optim.Optimizer]:
    turn({"ddp.accumulate": every})
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    return model, torch.optim.SGD([nn.Parameter(torch.ones(1)), *model.parameters()], 0.1)


def test_a_forward_without_a_backward_is_none_of_those_that_accumulate(turn: Turn, group: None) -> None:
    model, optimizer = accumulating(2, turn)
    for number in range(2):
        model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2))  # a metric, say
        assert model.require_backward_grad_sync == (number == 0)  # for the backward that comes next
    optimizer.step()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="1 of 2 backward passes"):
        optimizer.step()


def test_two_forwards_with_one_backward_count_once(turn: Turn, group: None) -> None:
    model, optimizer = accumulating(2, turn)
    for _ in range(2):
        (model(torch.ones(1, 2)) + model(torch.zeros(1, 2))).sum().backward()
    optimizer.step()


def test_a_model_with_a_static_graph_reduces_always(turn: Turn, group: None) -> None:
    facts = turn({"ddp.accumulate": 2, "ddp.static_graph": True})
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert "static_graph=True" in told(facts, "ddp.accumulate")["why"]


def test_a_closure_that_goes_backward_alone_is_refused(turn: Turn, group: None) -> None:
    model, optimizer = accumulating(2, turn)

    def closure() -> float:
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return float(loss.detach())

    with pytest.raises(RuntimeError, match="1 of 2 backward passes"):
        optimizer.step(closure)


def test_a_model_that_accumulates_is_freed(turn: Turn, group: None) -> None:
    model, optimizer = accumulating(2, turn)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None


def test_garbage_is_collected_by_steps_of_whatever_optimizer_steps(turn: Turn, monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[None] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(None))
    facts = turn({"gc.every": 2})
    first, second = (torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1) for _ in range(2))
    for _ in range(4):  # a GAN: two optimizers, four steps
        first.step()
        second.step()
        gc.enable()
    assert len(collected) == 2
    first.step()
    assert not gc.isenabled()
    for _ in range(4):  # the first has done its part
        second.step()
    assert len(collected) == 4
    assert told(facts, "gc.every")["was"] == "automatic"


def test_automatic_collection_comes_back_when_all_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(overrides.VARIABLE, '{"gc.every": 2}')
    uninstall = overrides.install()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    optimizer.step()
    uninstall()
    assert gc.isenabled()
    optimizer.step()
    assert gc.isenabled()
    statements.send_to(lambda _: None)
    statements.send_to(None)


def test_what_a_rank_starts_keeps_the_cores_of_the_rank(turn: Turn, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = list(range(8))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(cores))
    monkeypatch.setattr("os.sched_setaffinity", lambda _, own: cores.__setitem__(slice(None), own))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    turn({"affinity.cores": "spread"})
    assert cores == [4, 5, 6, 7]
    turn({"affinity.cores": "spread"})  # in a child, which has the environment and the cores
    assert cores == [4, 5, 6, 7]


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
