"""What is left of a step that fails half-way: no step and no checkpoint of it, until one is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn

from dsprof import engine as ds
from dsprof.engine.checkpoint import CheckpointError

WIDTH = 8
LAYERS = 8
TILE = WIDTH * WIDTH


def build() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def sample(number: int, rank: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


def start(model: nn.Module, stage: int, optimizer: Any = None, **zero: Any) -> Any:
    """An engine that steps one layer after the other."""
    section = {"stage": stage, "sub_group_size": TILE // 2 if stage else TILE, **zero}
    if stage == 3:
        section |= {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": section}
    if optimizer is None:
        config["optimizer"] = {"type": "Adam", "params": {"lr": 0.01}}
    return ds.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine: Any, number: int, rank: int) -> None:
    engine.backward(engine(sample(number, rank)).pow(2).mean())
    engine.step()


def expected(steps: int, ranks: int = 2) -> list[Tensor]:
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for number in range(steps):
        optimizer.zero_grad()
        torch.stack([model(sample(number, rank)).pow(2).mean() for rank in range(ranks)]).mean().backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def worst(engine: Any, wanted: list[Tensor]) -> float:
    with ds.zero.GatheredParameters(engine.module.parameters()):
        pairs = zip(engine.module.parameters(), wanted, strict=True)
        return max((mine - other).abs().max().item() for mine, other in pairs)


def said(error: type[Exception], use: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        use()
    return str(caught.value)


def refusals(engine: Any, folder: str, rank: int) -> list[str]:
    loss = engine(sample(1, rank)).pow(2).mean()
    return [said(RuntimeError, lambda: engine.backward(loss)), *refused_saves(engine, folder)]


def refused_saves(engine: Any, folder: str) -> list[str]:
    saves = (engine.save_checkpoint, engine.save_16bit_model)
    return [said(CheckpointError, partial(save, folder)) for save in saves]


# --- a schedule that ends


def ended_schedule(rank: int, stage: int, folder: str) -> tuple[str, int, float]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=1, cycle_momentum=False)
    engine = ds.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule,
        config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.0},
    )[0]  # fmt: skip
    train(engine, 0, rank)
    weights = [param.detach().clone() for param in optimizer.param_groups[0]["params"]]
    engine.backward(engine(sample(1, rank)).pow(2).mean())
    text = said(ValueError, engine.step)
    changed = max(
        (now - then).abs().max().item() for now, then in zip(optimizer.param_groups[0]["params"], weights, strict=True)
    )
    engine.save_checkpoint(folder, "last")
    return text, engine.global_steps, changed


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_whose_schedule_has_ended_is_taken_and_can_be_saved(ranks: Ranks, stage: int, tmp_path: Path) -> None:
    for text, steps, changed in ranks.run(2, ended_schedule, stage, str(tmp_path)):
        assert text.startswith("Tried to step")
        assert steps == 2
        assert changed > 0


# --- an optimizer that raises


def broken_in(optimizer: torch.optim.Optimizer, tile: int) -> Callable[[], None]:
    """Have its steps raise from that tile on; call the result to end it."""
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps > tile:
            raise ArithmeticError("this tile cannot be stepped")

    return optimizer.register_step_pre_hook(count).remove


def broken_optimizer(rank: int, stage: int, folder: str) -> tuple[list[str], float]:
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    engine = start(model, stage, optimizer)
    train(engine, 0, rank)
    engine.save_checkpoint(folder, "good")
    mend = broken_in(optimizer, 3)
    assert said(ArithmeticError, lambda: train(engine, 1, rank)) == "this tile cannot be stepped"
    mend()
    found = refusals(engine, folder, rank)
    engine.load_checkpoint(folder, load_module_only=True)  # the optimizer's state is still half old, half new
    found += refusals(engine, folder, rank)
    engine.load_checkpoint(folder)
    for number in range(1, 4):
        train(engine, number, rank)
    engine.save_checkpoint(folder, "again")
    return found, worst(engine, expected(4))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_optimizer_that_fails_between_tiles(ranks: Ranks, stage: int, tmp_path: Path) -> None:
    for found, weights in ranks.run(2, broken_optimizer, stage, str(tmp_path)):
        for number, text in enumerate(found):
            doing = ("engine.backward", "save_checkpoint", "save_16bit_model")[number % 3]
            assert text.startswith(
                f"{doing}: an earlier step of this engine failed half-way: ArithmeticError: this tile cannot be stepped"
            )
        assert weights < 1e-6


def broken_pipeline(rank: int, folder: str) -> tuple[list[str], list[float]]:
    torch.manual_seed(2)
    model = ds.PipelineModule([nn.Linear(WIDTH, WIDTH) for _ in range(4)], 2, loss_fn=nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
        "zero_optimization": {"sub_group_size": TILE}, "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    }  # fmt: skip
    engine = ds.initialize(model=model, config=config)[0]
    step = lambda: engine.train_batch(iter([(sample(0, 0), sample(1, 0))] * 2)).item()  # noqa: E731
    losses = [step()]
    engine.save_checkpoint(folder, "good")
    losses.append(step())
    engine.load_checkpoint(folder)
    mend = broken_in(engine.optimizer, 1)
    said(ArithmeticError, step)
    mend()
    found = [said(RuntimeError, step), said(CheckpointError, lambda: engine.save_checkpoint(folder))]
    engine.load_checkpoint(folder)
    return found, [*losses, step()]


def test_an_optimizer_that_fails_in_a_pipeline(ranks: Ranks, tmp_path: Path) -> None:
    for found, (first, second, again) in ranks.run(2, broken_pipeline, str(tmp_path)):
        assert found[0].startswith("train_batch: an earlier step of this engine failed half-way: ArithmeticError")
        assert found[1].startswith("save_checkpoint: an earlier step of this engine failed half-way: ArithmeticError")
        assert first > second == again


# --- a disk that fails


def broken_disk(rank: int, folder: str) -> tuple[str, list[str], float]:
    """Writes of the step after the first fail from the third on."""
    offload = {"device": "nvme", "nvme_path": folder, "pipeline_write": False, "pipeline_read": False}
    model = build().bfloat16()
    engine = start(model, 1, offload_optimizer=offload)
    train_half(engine, 0, rank)
    engine.save_checkpoint(f"{folder}/checkpoints", "good")
    writes, write = 0, os.pwritev

    def fail(*args: Any) -> int:
        nonlocal writes
        writes += 1
        if writes > 3:
            raise OSError(5, "Input/output error")
        return write(*args)

    with mock.patch.object(engine.states._file.disk.writes, "_call", fail):
        first = said(RuntimeError, lambda: train_half(engine, 1, rank))
    found = [said(RuntimeError, lambda: train_half(engine, 1, rank)), *refused_saves(engine, folder)]
    engine.load_checkpoint(f"{folder}/checkpoints")
    other = start(build().bfloat16(), 1)
    train_half(other, 0, rank)
    for number in range(1, 4):
        train_half(engine, number, rank)
        train_half(other, number, rank)
    return first, found, worst(engine, [param.detach() for param in other.module.parameters()])


def train_half(engine: Any, number: int, rank: int) -> None:
    engine.backward(engine(sample(number, rank).bfloat16()).float().pow(2).mean())
    engine.step()


def test_an_offload_write_that_fails_between_tiles(ranks: Ranks, tmp_path: Path) -> None:
    for first, found, weights in ranks.run(2, broken_disk, str(tmp_path)):
        assert "Input/output error" in first
        for doing, text in zip(("engine.backward", "save_checkpoint", "save_16bit_model"), found, strict=True):
            assert text.startswith(f"{doing}: an earlier step of this engine failed half-way: OffloadError: ")
        assert weights == 0.0
