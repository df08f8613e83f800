"""What an `initialize` that fails leaves behind, and what the script has back of its optimizer."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from dsprof import engine as ds
from dsprof.engine.comm.consensus import SharedError
from dsprof.engine.zero.shard import ShardedParam
from dsprof.engine.zero.storage import Absent

SGD = {"type": "SGD", "params": {"lr": 0.1}}


def layers(count: int = 4) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(count)))


def configured(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    return {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": zero, **more}


def open_things() -> tuple[int, int]:
    """Process groups beside the job's own, and threads of the engine."""
    groups = dist.distributed_c10d._world.pg_map.keys() - {dist.group.WORLD}
    return len(groups), sum(thread.name.startswith("dsprof-") for thread in threading.enumerate())


def hooks_of(model: torch.nn.Module) -> list[str]:
    """What is still around modules and parameters."""
    found = [name for name, module in model.named_modules() if "forward" in vars(module) or module._forward_pre_hooks]
    return found + [
        name for name, param in model.named_parameters()
        if type(param) is not torch.nn.Parameter or param._post_accumulate_grad_hooks
    ]  # fmt: skip


def refused(model: torch.nn.Module, error: type[Exception] = ValueError, **arguments: Any) -> str:
    """What `initialize` says, which must leave nothing."""
    gc.collect()  # engines of earlier tests
    before, weights = open_things(), [param.detach().clone() for param in model.parameters()]
    with pytest.raises(error) as caught:
        ds.initialize(model=model, **arguments)
    assert all(now <= then for now, then in zip(open_things(), before, strict=True))
    assert hooks_of(model) == []
    assert all(map(torch.equal, model.parameters(), weights))
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


# --- one rank, or all


@pytest.mark.parametrize("stage", [0, 3])
def test_wrong_arguments_leave_the_model_to_the_next(stage: int) -> None:
    model = layers()
    config = configured(stage)
    if stage == 3:
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}  # sharded, on a single rank, too
    recomputed = {**config, "activation_checkpointing": {"policy": "full", "blocks": ["0"]}}
    unknown = {"type": "SGD", "params": {"lr": 0.1, "speed": 2}}
    wrong: list[tuple[str, type[Exception], dict[str, Any]]] = [
        ("model_parameters has a parameter", ValueError, {"model_parameters": layers().parameters()}),
        ("LBFGS cannot be used", ValueError, {"optimizer": torch.optim.LBFGS(model.parameters())}),
        ("that the model does not have", ValueError, {"optimizer": torch.optim.SGD(layers().parameters(), lr=0.1)}),
        ("optimizer is a str", TypeError, {"optimizer": "SGD"}),
        ("data", TypeError, {"training_data": 3}),
        ("speed", ValueError, {"config": {**recomputed, "optimizer": unknown}}),
        ("no schedule", ValueError, {"config": {**recomputed, "optimizer": SGD}, "lr_scheduler": no_schedule}),
    ]  # fmt: skip
    for text, error, arguments in wrong:
        assert text in refused(model, error, **{"config": {**config, "optimizer": SGD}, **arguments})
    engine, *_ = ds.initialize(model=model, config={**config, "optimizer": SGD})
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.destroy()


def no_schedule(optimizer: torch.optim.Optimizer) -> Any:
    for group in optimizer.param_groups:
        group["lr"] = 7.0
    raise ValueError("no schedule")


def test_a_failed_initialize_leaves_the_optimizer_as_it_was() -> None:
    model = layers().bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    plain_step(model, optimizer)
    before = {param: dict(state) for param, state in optimizer.state.items()}
    config = configured(2, bf16={"enabled": True})
    assert refused(model, config=config, optimizer=optimizer, lr_scheduler=no_schedule) == "no schedule"
    assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, model.parameters()))
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert {param: dict(state) for param, state in optimizer.state.items()} == before
    plain_step(model, optimizer)


def plain_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.ones(1, 4, dtype=dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_curve_that_cannot_be_written_leaves_the_optimizer_to_the_script(tmp_path: Path) -> None:
    """The engine's own hook on `optimizer.step` is off again, which comes after all that is sharded."""
    (tmp_path / "file").touch()
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = configured(0, csv_monitor={"enabled": True, "output_path": str(tmp_path / "file"), "job_name": "job"})
    refused(model, OSError, config=config, optimizer=optimizer)
    plain_step(model, optimizer)


# --- some of several ranks


def failing(rank: int, stage: int, failing_ranks: list[int], pipeline: bool) -> tuple[str, float]:
    """What the first `initialize` says, and how far the second engine's weights are from plain torch's."""

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        if rank in failing_ranks:
            raise ValueError("no schedule")
        return torch.optim.lr_scheduler.StepLR(optimizer, 1)

    model: torch.nn.Module = layers()
    expected = layers()
    if pipeline:
        model = ds.PipelineModule(list(model), num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    config = configured(stage, optimizer=SGD, activation_checkpointing={"policy": "full", "blocks": ["*"]})
    error = ValueError if rank in failing_ranks else SharedError
    text = refused(model, error, config=config, lr_scheduler=schedule)
    engine, *_ = ds.initialize(model=model, config=config)
    x = torch.ones(1, 4)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    if pipeline:
        engine.train_batch(iter([(x, x)]))
        torch.nn.functional.mse_loss(expected(x), x).backward()
    else:
        engine.backward(engine(x).sum())
        engine.step()
        expected(x).sum().backward()
    optimizer.step()
    engine.destroy()
    values = dict(expected.named_parameters())
    return text, max((values[name] - param).abs().max().item() for name, param in model.named_parameters())


@pytest.mark.parametrize(("stage", "pipeline"), [(0, False), (2, False), (3, False), (0, True), (3, True)])
def test_what_fails_on_one_rank_fails_on_all_and_can_be_tried_again(ranks: Ranks, stage: int, pipeline: bool) -> None:
    found = ranks.run(2, failing, stage, [1], pipeline)
    assert [text for text, _ in found] == ["initialize: failed on rank 1: ValueError: no schedule", "no schedule"]
    assert max(difference for _, difference in found) < 1e-6


def test_each_rank_that_fails_says_why_itself(ranks: Ranks) -> None:
    found = ranks.run(2, failing, 3, [0, 1], False)
    assert [text for text, _ in found] == ["no schedule"] * 2


def halfway(rank: int) -> tuple[str, str]:
    """Of a rank whose memory ends while its weights are taken into pieces: no other can give them back."""
    model = layers()
    config = configured(3, optimizer=SGD)
    before = open_things()
    shard = ShardedParam.make_master

    def make_master(param: ShardedParam, *args: Any, **kwargs: Any) -> torch.nn.Parameter:
        if rank == 1:
            raise MemoryError("no memory")
        return shard(param, *args, **kwargs)

    with (
        mock.patch("dsprof.engine.offload.build.InMemory.make_master", lambda _, param: make_master(param)),
        pytest.raises((MemoryError, SharedError)) as caught,
    ):
        ds.initialize(model=model, config=config)
    assert open_things() == before
    assert any(type(param) is Absent for param in model.parameters())
    with pytest.raises(ValueError, match="is sharded") as again:
        ds.initialize(model=model, config=config)
    return "\n".join([str(caught.value), *caught.value.__notes__]), str(again.value)


def test_weights_that_are_left_in_pieces_are_told(ranks: Ranks) -> None:
    note = "initialize left 0.0.weight, and perhaps others, sharded (ZeRO stage 3): build the model anew"
    (first, again), (second, _) = ranks.run(2, halfway)
    assert first == f"initialize: failed on rank 1: MemoryError: no memory\n{note}"
    assert second == f"no memory\n{note}"
    assert again == "initialize: 0.0.weight is sharded (ZeRO stage 3), by an engine that is gone; build the model anew"


def sharded_early(rank: int, fails: str) -> tuple[str, int, float]:
    """The most elements that are whole while an initialize fails, of a model that was never whole, and how far the
    training with the next is off."""
    config = configured(3, optimizer=SGD)
    with ds.zero.Init(config_dict_or_path=config):
        model = layers()
    peak, fill = 0, ShardedParam.fill

    def watched(param: ShardedParam, *gathered: Any) -> None:
        nonlocal peak
        fill(param, *gathered)
        peak = max(peak, sum(param.numel() for param in model.parameters() if type(param) is not Absent))

    schedule = no_schedule if rank == 1 or fails == "all" else None
    with mock.patch.object(ShardedParam, "fill", watched), pytest.raises((ValueError, SharedError)) as caught:
        ds.initialize(model=model, config=config, lr_scheduler=schedule)
    engine, *_ = ds.initialize(model=model, config=config)
    expected = layers()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        plain_step(expected, optimizer)
    engine.destroy()
    off = max((a - b).abs().max().item() for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    return str(caught.value), peak, off


@pytest.mark.parametrize("fails", ["all", "one"])
def test_a_failed_initialize_of_a_model_that_does_not_fit_leaves_it_sharded(ranks: Ranks, fails: str) -> None:
    for _, peak, off in ranks.run(2, sharded_early, fails):
        assert peak == 16  # a weight of 4 x 4, and not the 80 elements of all
        assert off < 1e-6


# --- the script's optimizer


def three_steps(make: Callable[[Any], torch.optim.Optimizer]) -> list[torch.Tensor]:
    model = layers()
    optimizer = make(model.parameters())
    for _ in range(3):
        plain_step(model, optimizer)
    return list(model.parameters())


def one_step_of_each(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], *, between: bool
) -> None:
    """By an engine, by the script (`between`), and by the next engine."""
    for first in (True, False):
        engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=config)
        engine.backward(engine(torch.ones(1, 4, dtype=next(model.parameters()).dtype)).sum())
        engine.step()
        engine.destroy()
        assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, model.parameters()))
        if first and between:
            model.zero_grad()
            plain_step(model, optimizer)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_destroyed_engine_gives_the_optimizer_back_with_its_state(stage: int) -> None:
    model = layers()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    one_step_of_each(model, optimizer, configured(stage), between=True)
    for param, expected in zip(model.parameters(), three_steps(lambda p: torch.optim.Adam(p, lr=0.1)), strict=True):
        torch.testing.assert_close(param, expected)
        assert optimizer.state[param]["exp_avg"].shape == param.shape
        assert float(optimizer.state[param]["step"]) == 3.0


def given_back(rank: int, stage: int) -> tuple[int, list[float], list[torch.Tensor]]:
    """How many parameters have state, the steps that it counts, and the weights."""
    model = layers()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    one_step_of_each(model, optimizer, configured(stage), between=True)
    steps = [float(state["step"]) for state in optimizer.state.values()]
    return len(optimizer.state), steps, [param.detach() for param in model.parameters()]


def test_of_several_ranks_state_in_pieces_begins_anew(ranks: Ranks) -> None:
    expected = three_steps(lambda params: torch.optim.Adam(params, lr=0.1))
    for count, steps, found in ranks.run(2, given_back, 0):
        assert (count, steps) == (8, [3.0] * 8)
        torch.testing.assert_close(found, [param.detach() for param in expected])
    for stage in (2, 3):
        first, second = ranks.run(2, given_back, stage)
        assert first[:2] == second[:2] == (0, [])
        torch.testing.assert_close(first[2], second[2])


def test_state_comes_back_in_the_models_precision() -> None:
    model = layers().bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    one_step_of_each(model, optimizer, configured(1, bf16={"enabled": True}), between=True)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


def test_state_in_files_begins_anew(tmp_path: Path) -> None:
    model = layers().bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    config = configured(2, bf16={"enabled": True})
    config["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    one_step_of_each(model, optimizer, config, between=True)
    assert not optimizer.state


def test_frozen_and_new_parameters_are_in_the_optimizer_that_is_given_back() -> None:
    model = layers(3)
    first, second, third = (block[0].requires_grad_(number != 1) for number, block in enumerate(model))
    pairs = [("first", first.weight), ("frozen", second.weight), ("bias", first.bias)]
    optimizer = torch.optim.SGD(pairs, lr=0.1, momentum=0.9)
    optimizer.state[second.weight] = {"momentum_buffer": torch.ones(4, 4)}
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=configured(2))
    optimizer.add_param_group({"params": [("third", third.weight)]})
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.destroy()
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    params = [id(param) for group in optimizer.param_groups for param in group["params"]]
    assert names == ["first", "frozen", "bias", "third"]
    assert params == list(map(id, (first.weight, second.weight, first.bias, third.weight)))
    assert {id(param) for param in optimizer.state} == set(params)
    optimizer.step()
