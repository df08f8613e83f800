"""What scripts of DeepSpeed's ask an engine beyond a step: settings, sizes of batches, and what is not there."""

from __future__ import annotations

import inspect
import pydoc
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from test_engine_lifecycle import start
from torch import nn

from dsprof import engine as ds
from dsprof.engine import Engine
from dsprof.engine.data import ShardedLoader
from dsprof.engine.train.deepspeed_api import ENGINE, PIPELINE_ENGINE
from dsprof.engine.train.settings import SETTINGS

TRAINED = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}


def told(**arguments: Any) -> list[str]:
    """What `initialize` warns of."""
    model = nn.Linear(2, 2)
    for name, value in arguments.items():
        arguments[name] = value(model) if inspect.isfunction(value) else value
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine, *_ = ds.initialize(model=model, **arguments)
    engine.destroy()
    return [str(one.message) for one in caught]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def constant(model: nn.Module) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(sgd(model), lambda _: 1.0)


def test_settings_that_the_script_overrides_are_told() -> None:
    schedule = {"type": "WarmupLR", "params": {}}
    bare = {"train_micro_batch_size_per_gpu": 1}
    passed = "has no effect; the script passes its own to initialize"
    assert told(config=TRAINED) == []
    assert told(config=TRAINED, optimizer=sgd) == [f"optimizer: {passed}"]
    assert told(config={**TRAINED, "scheduler": schedule}, lr_scheduler=constant) == [f"scheduler: {passed}"]
    assert told(config={**bare, "scheduler": schedule}) == [
        'scheduler: has no effect; there is no optimizer: write "optimizer" too, or pass one to initialize'
    ]


def test_parameters_that_are_not_those_of_the_optimizer_are_told() -> None:
    bare = {"train_micro_batch_size_per_gpu": 1}
    assert told(config=bare, optimizer=sgd, model_parameters=lambda model: list(model.parameters())) == []
    assert told(config=bare, optimizer=sgd, model_parameters=lambda model: [model.weight]) == [
        "initialize: model_parameters has 0 parameters to train that optimizer= has not, and not 1 that it has; it has "
        "no effect: the optimizer's own are trained"
    ]


def test_what_stays_in_host_memory_is_told(tmp_path: Path) -> None:
    def offloaded(**more: Any) -> list[str]:
        section = {"device": "nvme", "nvme_path": str(tmp_path), **more}
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": section}
        return [text for text in told(config={**TRAINED, "zero_optimization": zero}) if "max_in_cpu" in text]

    assert offloaded() == [
        "zero_optimization.offload_param.max_in_cpu: lets all 6 elements of rank 0 stay in host memory, so nothing is "
        "on disk; write a smaller number, or 0"
    ]
    assert offloaded(max_in_cpu=4) == offloaded(max_in_cpu=0) == []


def test_a_rank_alone_refuses_unused_parameters_too() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "left": nn.Linear(2, 1)})
    model.forward = lambda x: model["used"](x).sum()  # type: ignore[method-assign]
    engine, *_ = ds.initialize(
        model=model, config={**TRAINED, "zero_optimization": {"stage": 1, "ignore_unused_parameters": False}}
    )
    loss = engine(torch.ones(1, 2))
    with pytest.raises(RuntimeError, match=r"2 parameters got no gradient in this backward, the first: left\.weight"):
        engine.backward(loss)
    engine.destroy()


# --- what an engine answers


def test_every_setting_is_answered() -> None:
    engine = start(nn.Linear(2, 2), stage=3)
    assert len(SETTINGS) > 45
    answers = {name: getattr(engine, name)() for name in SETTINGS}
    assert answers["zero_reduce_bucket_size"] == 500_000_000
    assert answers["zero_optimization_partition_weights"] is True
    assert engine.optimizer_name() is not None
    assert answers["get_data_types"] == (torch.float32, torch.float32)
    assert engine.communication_data_type == torch.float32


def test_every_method_says_what_it_is_for() -> None:
    engine = start(nn.Linear(2, 2))
    shown = pydoc.render_doc(engine.zero_reduce_bucket_size, renderer=pydoc.plaintext)
    assert "`zero_optimization.reduce_bucket_size` of the configuration." in shown
    for names in (ENGINE, PIPELINE_ENGINE):
        for name in names.methods:
            method = names.find(name, engine.state)
            assert inspect.getdoc(method)
            assert (method.__name__, method.__qualname__) == (name, name)
    assert inspect.getdoc(engine.get_lr) == "The learning rate of each parameter group."
    assert pydoc.render_doc(engine.get_lr, renderer=pydoc.plaintext).splitlines()[2].startswith("get_lr() -> ")
    assert str(inspect.signature(engine.set_train_batch_size)) == "(train_batch_size: 'int') -> 'None'"


def test_what_there_is_not_says_what_to_write_instead() -> None:
    engine = start(nn.Linear(2, 2))
    assert not [name for name in ENGINE.unsupported if hasattr(Engine, name) or name in ENGINE]
    with pytest.raises(AttributeError, match="the engine has no 'clip_fp32_gradients': write \"gradient_clipping\" in"):
        engine.clip_fp32_gradients()
    assert not any(hasattr(engine, name) for name in ENGINE.unsupported)


class Scaled(nn.Linear):
    scale = 3  # which DeepSpeed's engine has


def test_a_name_of_the_models_comes_before_what_there_is_not() -> None:
    assert start(Scaled(2, 2)).scale == 3


# --- sizes of batches


def steps_after(engine: Engine, count: int) -> list[bool]:
    applied = []
    for _ in range(count):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        applied.append(engine.was_step_applied())
    return applied


def test_the_number_of_micro_batches_can_change_between_steps() -> None:
    engine, *_ = ds.initialize(model=nn.Linear(2, 2), config={**TRAINED, "gradient_accumulation_steps": 2})
    assert steps_after(engine, 2) == [False, True]
    engine.set_train_batch_size(3)
    assert engine.get_batch_info() == (3, 1, 3)
    assert steps_after(engine, 4) == [False, False, True, False]
    with pytest.raises(RuntimeError, match="set_train_batch_size in the middle of a step"):
        engine.set_train_batch_size(1)
    engine.set_train_micro_batch_size(5)
    assert engine.get_batch_info() == (15, 5, 3)
    with pytest.raises(ValueError, match="7 samples are no multiple of the 5 of a micro-batch over the 1 replicas"):
        engine.set_train_batch_size(7)
    engine.training_dataloader = ShardedLoader([1, 2], batch_size=5)
    with pytest.raises(RuntimeError, match="goes on with batches of 5 samples"):
        engine.set_train_micro_batch_size(1)


def test_the_optimizer_has_the_loss_scale() -> None:
    engine, optimizer, *_ = ds.initialize(
        model=nn.Linear(2, 2), config={**TRAINED, "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    )
    assert optimizer.cur_scale == optimizer.loss_scale == 16
    engine.backward(engine(torch.full((1, 2), 6e4, dtype=torch.float16)).sum())
    engine.step()
    assert optimizer.overflow
    assert optimizer.cur_scale == 8


def test_a_cache_that_is_emptied_is_filled_again() -> None:
    engine, *_ = ds.initialize(
        model=nn.Linear(8, 8),
        config={**TRAINED, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    )
    before = engine(torch.ones(1, 8))
    engine.empty_partition_cache()
    assert torch.equal(engine(torch.ones(1, 8)), before)


def test_numbers_of_numpys_are_saved(tmp_path: Path) -> None:
    engine = start(nn.Linear(2, 2))
    state = {"loss": numpy.float64(0.25), "best": numpy.float32(0.5), "n": numpy.int64(3), "done": numpy.bool_(True)}
    engine.save_checkpoint(tmp_path, client_state=state)
    _, back = engine.load_checkpoint(tmp_path)
    assert back == {"loss": 0.25, "best": 0.5, "n": 3, "done": True}
    assert {type(value) for value in (back or {}).values()} == {float, int, bool}


@pytest.mark.parametrize("stepped_each", [False, True])
def test_a_boundary_that_is_set_from_outside_counts_every_microbatch(tmp_path: Path, stepped_each: bool) -> None:
    """As Accelerate does, which steps at a boundary only; an epoch may end a step early."""
    model = nn.Linear(2, 2)
    engine, *_ = ds.initialize(model=model, config={**TRAINED, "gradient_accumulation_steps": 3})

    def train(boundary: bool) -> None:
        engine.set_gradient_accumulation_boundary(boundary)
        engine.backward(engine(torch.ones(1, 2)).sum())
        if boundary or stepped_each:
            engine.step()

    for boundary in (False, False, True, False, True):
        train(boundary)
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 5, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.save_checkpoint(tmp_path, "whole")
    train(False)
    with pytest.warns(UserWarning, match="in the middle of a step"):
        engine.save_checkpoint(tmp_path, "begun")
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        engine.set_train_batch_size(4)
    engine.load_checkpoint(tmp_path, "begun")
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 5, 5)
    engine.set_train_batch_size(4)
    assert engine.gradient_accumulation_steps() == 4
    engine.destroy()
