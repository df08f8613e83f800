"""Steps that scripts begin and do not end: forwards without a backward, errors that they catch, `zero_grad` in the
middle. They train as in one process, or are refused."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from slow_cases import slow_but
from torch import Tensor, nn

from dsprof import engine as ds

WIDTH = 6


def build() -> nn.Sequential:
    torch.manual_seed(4)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(5)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def sample(number: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))


def loss_of(model: Any, number: int, rank: int) -> Tensor:
    loss: Tensor = model(sample(number, rank)).pow(2).mean()
    return loss


def start(model: nn.Module, stage: int, accumulate: int = 1, **more: Any) -> Any:
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    config = {
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": accumulate, "zero_optimization": zero,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.5}}, **more,
    }  # fmt: skip
    return ds.initialize(model=model, config=config)[0]


class Alone:
    """The same training in one process."""

    def __init__(self, ranks: int = 2) -> None:
        self.model = build()
        self.ranks = ranks
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5)

    def step(self, *numbers: int) -> None:
        self.optimizer.zero_grad()
        losses = [loss_of(self.model, number, rank) for number in numbers for rank in range(self.ranks)]
        torch.stack(losses).mean().backward()
        self.optimizer.step()

    def differs(self, engine: Any) -> float:
        with ds.zero.GatheredParameters(engine.module.parameters()):
            pairs = zip(engine.module.parameters(), self.model.parameters(), strict=True)
            return max((mine - other).abs().max().item() for mine, other in pairs)


def refused(use: Callable[[], Any], error: type[Exception] = RuntimeError) -> str:
    with pytest.raises(error) as caught:
        use()
    return str(caught.value)


# --- a forward that nobody takes backward


def extra_forward(rank: int, stage: int, kind: str) -> tuple[list[float], float]:
    """A forward with gradients between backward and step; the losses of the forwards after it, ours less theirs."""
    engine, alone = start(build(), stage), Alone()
    off = []
    for number in range(4):
        loss = loss_of(engine, number, rank)
        engine.backward(loss)
        if kind == "whole":
            loss_of(engine, 7, rank)
        elif kind == "part":
            engine.module[4](sample(7, rank))
        else:
            handle = engine.module[8].register_forward_pre_hook(raising)
            refused(lambda: loss_of(engine, 7, rank), ArithmeticError)
            handle.remove()
        engine.step()
        alone.step(number)
        off.append(abs(loss_of(engine, 9, rank).item() - loss_of(alone.model, 9, rank).item()))
    return off, alone.differs(engine)


def raising(*_: Any) -> None:
    raise ArithmeticError("no forward")


@pytest.mark.parametrize("kind", ["whole", "part", "error"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_forward_between_backward_and_step_has_no_effect(ranks: Ranks, stage: int, kind: str) -> None:
    for losses, weights in ranks.run(2, extra_forward, stage, kind):
        assert max(losses) < 1e-6
        assert weights < 1e-6


def late_backward(rank: int, stage: int) -> tuple[str, float]:
    engine, alone = start(build(), stage), Alone()
    kept = loss_of(engine, 5, rank)
    engine.backward(loss_of(engine, 0, rank))
    engine.step()
    said = refused(lambda: engine.backward(kept))
    engine.zero_grad()
    engine.backward(loss_of(engine, 1, rank))
    engine.step()
    alone.step(0)
    alone.step(1)
    return said, alone.differs(engine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backward_of_weights_that_are_gone_is_refused(ranks: Ranks, stage: int) -> None:
    """As torch does, whose optimizers change weights in place."""
    for said, weights in ranks.run(2, late_backward, stage):
        ours = "engine.backward: the loss is of a forward that ran before the weights changed"
        assert said.startswith(ours if stage == 3 else "one of the variables needed for gradient computation has been")
        assert weights < 1e-6


# --- errors that a script catches, and zero_grad


def caught(rank: int, stage: int, where: str) -> tuple[float, tuple[int, int, int], list[str]]:
    """Two micro-batches a step; in the second step one of them fails, and the script goes on with the next."""
    engine, alone = start(build(), stage, 2), Alone()

    def microbatch(number: int) -> None:
        engine.backward(loss_of(engine, number, rank))
        engine.step()

    for number in range(2):
        microbatch(number)
    microbatch(2)
    said = []
    if where == "forward":
        refused(lambda: engine(torch.ones(3, WIDTH + 1)))
    elif where == "backward":
        loss = loss_of(engine, 3, rank)
        handle = engine.module[4].bias.register_hook(raising)
        refused(lambda: engine.backward(loss), ArithmeticError)
        handle.remove()
        said.append(refused(lambda: microbatch(4)))
    else:
        engine.backward(loss_of(engine, 3, rank))  # and an error before the step
    with pytest.warns(UserWarning, match=r"zero_grad\(\) in the middle of a step: 1 of its 2 micro-batches"):
        engine.zero_grad()
    said.append(refused(engine.step))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(4, 8):
            microbatch(number)
            if number % 2:
                engine.zero_grad()  # of no effect
    for numbers in ((0, 1), (4, 5), (6, 7)):
        alone.step(*numbers)
    return alone.differs(engine), (engine.global_steps, engine.micro_steps, engine.global_samples), said


@pytest.mark.parametrize(
    ("stage", "where"),
    slow_but(
        [(0, "backward"), (1, "forward"), (1, "step"), (2, "backward"), (3, "forward"), (3, "backward"), (3, "step")],
        among=itertools.product((0, 1, 2, 3), ("forward", "backward", "step")),
    ),
)
def test_zero_grad_begins_the_step_anew(ranks: Ranks, stage: int, where: str) -> None:
    """In `make test` everywhere in stage 3, and in each other stage once or twice."""
    for weights, counts, said in ranks.run(2, caught, stage, where):
        assert weights < 1e-6
        assert counts == (3, 6, 36)
        assert said[-1].startswith("engine.step without engine.backward(loss)")
        if where == "backward":
            assert said[0].startswith("engine.backward: the last backward failed half-way")


def loads_in_the_middle(rank: int, module_only: bool, folder: str) -> float:
    engine, alone = start(build(), 1, 2), Alone()
    engine.save_checkpoint(folder, "first")
    engine.backward(loss_of(engine, 0, rank))
    engine.step()
    engine.load_checkpoint(folder, load_module_only=module_only)
    for number in range(2):
        engine.backward(loss_of(engine, number, rank))
        engine.step()
    alone.step(0, 1)
    return alone.differs(engine)


@pytest.mark.parametrize("module_only", [False, True])
def test_a_load_in_the_middle_of_a_step_begins_it_anew(ranks: Ranks, module_only: bool, tmp_path: Path) -> None:
    assert max(ranks.run(2, loads_in_the_middle, module_only, str(tmp_path))) < 1e-6
