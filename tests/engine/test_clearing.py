"""`zero_grad` of the optimizer and of the model: gradients that the engine holds are forgotten, too."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from engines import WIDTH, Layers, configuration, engine_for
from ranks import Ranks
from torch import nn


def clears(rank: int, stage: int, by: str) -> tuple[float, list[str]]:
    """Of three micro-batches, the first is forgotten: the norm of the step, and what was said."""
    with engine_for(Layers(2), configuration(stage, gradient_accumulation_steps=3)) as engine:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for number in range(3):
                engine.backward(engine(torch.full((2, WIDTH), 1.0 + number + rank)))
                engine.step()
                if number == 0:
                    (engine.optimizer if by == "optimizer" else engine.module).zero_grad()
        norm = engine.get_global_grad_norm()
        assert norm is not None
        return norm, [str(each.message) for each in said if "zero_grad" in str(each.message)]


def norm_alone() -> float:
    model = Layers(2)
    for number in (1, 2):
        for rank in (0, 1):
            (model(torch.full((2, WIDTH), 1.0 + number + rank)) / 6).backward()
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


@pytest.mark.parametrize("by", ["optimizer", "module"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_forgotten_and_the_step_goes_on(ranks: Ranks, stage: int, by: str) -> None:
    for norm, said in ranks.run(2, clears, stage, by):
        assert norm == pytest.approx(norm_alone(), rel=1e-5)
        assert said == [
            "zero_grad() of the model or the optimizer in the middle of a step: the gradients of 1 of its 3 "
            "micro-batches are forgotten. A step forgets its gradients by itself: leave it out"
        ]


def test_copies_of_the_model_and_the_model_after_the_engine_clear_their_own() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 1))
    with engine_for(model, configuration(0)) as engine:
        engine.backward(engine(torch.ones(2, WIDTH)).sum())
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(torch.ones(1, WIDTH)).sum().backward()
            other.zero_grad()
            assert all(param.grad is None for param in other.parameters())
        engine.step()  # has its gradients still
        engine.backward(engine(torch.ones(2, WIDTH)).sum())
        engine.optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"engine\.step without engine\.backward"):
            engine.step()
        optimizer = engine.optimizer
    assert "zero_grad" not in vars(model)
    assert "zero_grad" not in vars(optimizer)


def test_train_batch_takes_whole_steps_only() -> None:
    with engine_for(Layers(2), configuration(0, gradient_accumulation_steps=3)) as engine:
        engine.backward(engine(torch.ones(2, WIDTH)))
        engine.step()
        with pytest.raises(RuntimeError, match="in the middle of a step, of which 1 of 3 micro-batches are complete"):
            engine.train_batch(iter([torch.ones(2, WIDTH)] * 3))
        with pytest.warns(UserWarning, match=r"engine\.zero_grad\(\) in the middle of a step"):
            engine.zero_grad()
        engine.train_batch(iter([torch.ones(2, WIDTH)] * 3))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            engine.train_batch(iter([torch.ones(2, WIDTH), torch.ones(2, 1)]))
        engine.train_batch(iter([torch.ones(2, WIDTH)] * 3))
        assert (engine.global_steps, engine.micro_steps) == (2, 6)
