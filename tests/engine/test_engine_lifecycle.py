"""What scripts do with an engine that is not one forward, one backward, one step."""

from __future__ import annotations

import copy
import pickle
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from models import batches, build, reference
from ranks import Ranks
from test_engine import SMALL, adamw, configuration, whole

from dsprof import engine as ds
from dsprof.engine.comm.comm import open_comm
from dsprof.engine.comm.lane import Inline
from dsprof.engine.hooks import Hooks


def test_whatever_is_used_first_the_others_are_there() -> None:
    """A submodule that is imported becomes an attribute of its package: none may have a public function's name."""
    assert {module.name for module in pkgutil.iter_modules(ds.__path__)} & ds._HOME.keys() == set()


@pytest.mark.slow
def test_the_first_call_may_be_init_distributed() -> None:
    code = "import dsprof.engine as ds; ds.init_distributed('gloo'); assert callable(ds.initialize), ds.initialize"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def two_losses(rank: int, stage: int, sparse: bool) -> float:
    model, expected = build(odd=False), build(odd=False)
    config = configuration(
        stage,
        gradient_accumulation_steps=1,
        gradient_clipping=0.0,
        sparse_gradients=sparse,
        zero=SMALL if stage == 3 else {},
    )
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    data = batches(3, 2, 2)
    for step in data:
        engine.backward(engine(step[0, rank]))
        engine.backward(engine(step[1, rank]))
        engine.step()
    reference(expected, adamw, data, scale=2.0)
    found = whole(engine)
    return max((found[name] - value).abs().max().item() for name, value in expected.named_parameters())


@pytest.mark.parametrize(("stage", "sparse"), [(0, False), (1, False), (2, False), (3, False), (0, True), (1, True)])
def test_two_backwards_before_a_step_add_up(ranks: Ranks, stage: int, sparse: bool) -> None:
    assert max(ranks.run(2, two_losses, stage, sparse)) < 2e-5


def timeouts(rank: int) -> tuple[timedelta, timedelta]:
    comm = open_comm([[0, 1]], lambda: Inline(Hooks()))
    assert comm.group is not None
    world = dist.distributed_c10d._get_default_group()
    mine, jobs = (group._get_backend(torch.device("cpu")).options._timeout for group in (comm.group, world))
    return mine, jobs


def test_groups_of_the_engine_have_the_jobs_timeout(ranks: Ranks) -> None:
    """The ranks of these tests have one of their own (ranks.py)."""
    assert ranks.run(2, timeouts) == [(timedelta(seconds=60), timedelta(seconds=60))] * 2


# --- one engine after the other


def again(rank: int, stage: int) -> tuple[float, str]:
    model = build(odd=False)
    zero = SMALL if stage == 3 else {}
    config = configuration(stage, gradient_accumulation_steps=1, gradient_clipping=0.0, zero=zero)
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    data = batches(2, 1, 2)
    text = ""
    for step in data:
        engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
        engine.backward(engine(step[0, rank]))
        engine.step()
        try:
            ds.initialize(model=model, model_parameters=model.parameters(), config=config)
        except ValueError as error:
            text = str(error)
        engine.destroy()
    expected = build(odd=False)
    reference(expected, lambda params: torch.optim.SGD(params, lr=0.1), data)
    found = dict(model.named_parameters())
    return max((found[n] - value).abs().max().item() for n, value in expected.named_parameters()), text


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_destroyed_engine_leaves_the_model_to_the_next(ranks: Ranks, stage: int) -> None:
    for difference, text in ranks.run(2, again, stage):
        assert difference < 1e-5
        assert text == (
            "initialize: the model has an engine already; call its destroy() first, on all ranks, or, where nothing "
            "refers to that engine any more, build the model anew"
        )


# --- what is not trained, or in a way that cannot be


def test_a_model_that_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ValueError, match="weight is complex, which the engine does not train"):
        start(torch.nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="0 is an embedding with sparse=True, and its gradients travel as rows"):
        start(torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True)), stage=2)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"model_parameters has a parameter of shape \(3, 3\) that the model does not"):
        start(model, model_parameters=torch.nn.Linear(3, 3).parameters())


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: torch.nn.Sequential(torch.nn.LazyLinear(2)), "0.weight"),
        (lambda: torch.nn.LazyBatchNorm1d(affine=False), "running_mean"),
        (
            lambda: ds.PipelineModule([ds.pipe.LayerSpec(torch.nn.LazyLinear, 2)], partition_method="uniform"),
            "0.weight",
        ),
    ],
    ids=["parameter", "buffer", "pipeline"],
)
def test_a_lazy_model_is_refused(make: Callable[[], torch.nn.Module], name: str) -> None:
    with pytest.raises(ValueError, match=f"initialize: {name} has no shape yet: run the lazy module's forward once"):
        start(make(), model_parameters=None)


def test_arguments_of_another_kind_are_refused() -> None:
    model = torch.nn.Linear(2, 2)
    for parameters, text in [
        ("abc", " is a str; write model_parameters=model.parameters(), a list of parameters, or parameter groups"),
        (model, " is a Linear; write model_parameters=model.parameters()"),
        (model.weight, " is a Parameter; write"),
        ({"params": model.parameters()}, " is a dict; write"),
        (["weight"], "[0] is a str, no parameter; write"),
        ([model.weight, {"params": []}], "[0] is a Parameter among parameter groups; write"),
        ([{"lr": 0.1}], "[0] is a dict without 'params' among parameter groups; write"),
        ([{"params": 3}], "[0]['params'] is a int; write"),
        ([{"params": [model.weight, 3]}], "[0]['params'][1] is a int, no parameter; write"),
    ]:
        with pytest.raises(TypeError, match=f"initialize: model_parameters{re.escape(text)}"):
            start(model, model_parameters=parameters)
        model = torch.nn.Linear(2, 2)
    for args, text in [(3, "args=3; pass what"), ("ds.json", "args='ds.json'; pass"), (model, "args is a Linear")]:
        with pytest.raises(TypeError, match=f"initialize: {text}"):
            start(model, args=args)


@pytest.mark.parametrize("optimizer", [None, lambda params: torch.optim.SGD(params, lr=0.1)])
def test_parameters_of_a_group_may_be_a_generator(optimizer: Any) -> None:
    model = torch.nn.Linear(2, 2)
    groups = [{"params": model.parameters(), "weight_decay": 0.5}]
    arguments = {} if optimizer is None else {"optimizer": optimizer}
    group = start(model, model_parameters=groups, **arguments).optimizer.param_groups[0]
    assert (len(group["params"]), group["weight_decay"]) == (2, 0.5)


def test_parameters_that_no_optimizer_has_do_not_count_into_the_norm() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    engine = start(model, model_parameters=model[1].parameters())
    before = model[0].weight.detach().clone()
    engine.backward(engine(torch.ones(1, 2)).sum())
    assert model[1].weight.grad is not None
    expected = model[1].weight.grad.norm().item()
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(expected)
    assert torch.equal(model[0].weight, before)


def test_a_parameter_that_is_unfrozen_later_is_an_error() -> None:
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    engine = start(model)
    model.bias.requires_grad_(True)
    engine.backward(engine(torch.ones(1, 2)).sum())
    with pytest.raises(RuntimeError, match="bias was frozen when the engine was made, and has a gradient now"):
        engine.step()


def test_the_models_own_methods_are_the_engines() -> None:
    class Speaking(torch.nn.Linear):
        def generate(self, words: int) -> str:
            return "word " * words

    engine = start(Speaking(2, 2))
    assert engine.generate(2) == "word word "
    with pytest.raises(AttributeError, match="the engine has no 'sing', and neither has its Speaking"):
        engine.sing()


class Copied(torch.nn.Linear):
    def __deepcopy__(self, memo: object) -> Copied:
        return Copied(2, 2)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied(make: Callable[[object], object]) -> None:
    """Two engines would train one model."""
    engine = start(Copied(2, 2))
    with pytest.raises(TypeError, match=r"an engine cannot be copied, pickled or .* write engine\.save_checkpoint"):
        make(engine)


def test_a_loss_without_a_graph_is_refused() -> None:
    engine = start(torch.nn.Linear(2, 2))
    loss = engine(torch.ones(1, 2)).sum()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"engine\.backward is called under torch\.no_grad\(\)"):
        engine.backward(loss)
    with torch.no_grad():
        detached = engine(torch.ones(1, 2)).sum()
    with pytest.raises(RuntimeError, match="the loss depends on no parameter that is trained"):
        engine.backward(detached)
    with pytest.raises(TypeError, match=r"engine\.backward wants the loss, and got a tuple"):
        engine.backward((loss,))
    engine.backward(loss)


class Mean(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean()


def test_a_batch_is_trained_in_training_mode() -> None:
    engine = start(Mean(2, 2))
    engine.eval()
    engine.eval_batch(iter([torch.ones(1, 2)]))
    assert not engine.training
    engine.train_batch(iter([torch.ones(1, 2)]))
    assert engine.training
    assert engine.module.training


def test_train_batch_takes_what_models_return() -> None:
    class Model(torch.nn.Linear):
        def forward(self, pair: Any) -> Any:  # type: ignore[override]
            loss = super().forward(pair.x).mean()
            return {"loss": loss} if pair.kind == 0 else (loss, None) if pair.kind == 1 else {}

    class Pair(NamedTuple):
        x: torch.Tensor
        kind: int

    class Batches:
        def __init__(self, kind: int) -> None:
            self.kind = kind

        def __next__(self) -> Any:
            return [Pair(torch.ones(1, 2), self.kind)]

    engine = start(Model(2, 2))
    for kind in (0, 1):
        assert engine.train_batch(Batches(kind)).ndim == 0
    with pytest.raises(TypeError, match="the model returned a dict; it must return its loss"):
        engine.train_batch(Batches(2))


def test_a_schedule_that_needs_a_metric_gets_it() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    engine = start(model, optimizer=optimizer, lr_scheduler=schedule)
    for metric in (1.0, 2.0):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step(lr_kwargs={"metrics": metric})
    assert engine.get_lr() == [0.5]


def start(model: torch.nn.Module, stage: int = 0, **arguments: Any) -> Any:
    """An engine in this process alone."""
    config = {"train_batch_size": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    if "optimizer" not in arguments:
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    arguments.setdefault("model_parameters", model.parameters())
    return ds.initialize(model=model, config=config, **arguments)[0]


# --- the end of an engine


def groups_left(rank: int, config: dict[str, Any], pipeline: bool) -> tuple[int, list[str]]:
    """How many process groups more there are after an engine than before, and what using it says."""
    before = dist.distributed_c10d._world.pg_map.copy()
    model: torch.nn.Module = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    if pipeline:
        model = ds.PipelineModule(list(model), num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    x = torch.ones(1, 4)
    if pipeline:
        engine.train_batch(iter([(x, x)] * 4))
    else:
        loss = engine(x).sum()
        engine.backward(loss)
        engine.step()
    engine.destroy()
    engine.destroy()
    after = dist.distributed_c10d._world.pg_map
    uses = [lambda: engine.train_batch(iter([(x, x)] * 4)), lambda: engine.save_checkpoint("nowhere")]
    if not pipeline:
        uses += [lambda: engine(x), lambda: engine.backward(loss), engine.step]
    said = []
    for use in uses:
        with pytest.raises(RuntimeError) as error:
            use()
        said.append(str(error.value))
    return len(after) - len(before), said


@pytest.mark.parametrize(
    ("ranks_of_it", "more"),
    [
        (2, {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}),
        (4, {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}),
        (4, {"pipeline": {"stages": 2}, "gradient_accumulation_steps": 2}),
        (4, {"tensor_parallel": {"autotp_size": 2}}),
    ],
    ids=["stage 3", "hpZ", "pipeline", "tensor"],
)
def test_destroy_leaves_no_process_group_and_an_engine_that_says_so(
    ranks: Ranks, ranks_of_it: int, more: dict[str, Any]
) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **more}
    for groups, said in ranks.run(ranks_of_it, groups_left, config, "pipeline" in more):
        assert groups == 0
        assert set(said) == {
            "the engine was destroyed: its model, engine.module, is as any other; to train on, call initialize again"
        }


def failing_end(rank: int) -> int:
    before = len(dist.distributed_c10d._world.pg_map)
    model = ds.PipelineModule([torch.nn.Linear(4, 4) for _ in range(2)], num_stages=2, loss_fn=torch.nn.MSELoss())
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = ds.initialize(model=model, config=config)

    def fail() -> None:
        raise OSError("the disk is gone")

    engine._opened.callback(fail)
    with pytest.raises(OSError, match="the disk is gone"):
        engine.destroy()
    return len(dist.distributed_c10d._world.pg_map) - before


def test_a_pipelines_links_are_closed_if_something_else_fails(ranks: Ranks) -> None:
    assert ranks.run(2, failing_end) == [0, 0]


@pytest.mark.parametrize("what", ["step", "train_batch"])
def test_a_model_of_which_everything_is_frozen_is_not_trained(what: str) -> None:
    engine = start(torch.nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(RuntimeError, match=rf"engine.{what}: the optimizer has no parameters: those of the model were"):
        engine.step() if what == "step" else engine.train_batch(iter([torch.ones(1, 2)]))
    with pytest.raises(RuntimeError, match=r"engine.backward: the loss depends on no parameter that is trained"):
        engine.backward(engine(torch.ones(1, 2)).sum())
    other = start(torch.nn.Linear(2, 2), optimizer=None)
    with pytest.raises(RuntimeError, match=rf"engine.{what}: there is no optimizer: pass one"):
        other.step() if what == "step" else other.train_batch(iter([torch.ones(1, 2)]))
