"""Defects that a review of tensor parallelism found, each held by a test."""

from __future__ import annotations

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn

from dsprof import engine
from dsprof.engine.tensor import PlanError, plan_for


class Remembers(nn.Module):
    """Counts its calls, and keeps a mask of the first one's length."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.calls = 0
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.mask is None:
            self.mask = torch.ones(x.shape[1], 1)
            self.register_buffer("table", torch.ones(x.shape[1], 1))
        return self.down(self.up(x * self.mask).relu())


def test_planning_leaves_what_a_forward_keeps_as_it_was() -> None:
    model = Remembers()
    model.down.eval()

    plan_for(model, 2)

    assert (model.calls, model.mask, list(model.buffers())) == (0, None, [])
    assert not hasattr(model, "table")
    assert (model.training, model.up.training, model.down.training) == (True, True, False)
    model(torch.ones(1, 40, 8))


def refused_again(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    config = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}}
    first, *_ = engine.initialize(model=model, config=config)
    first.destroy()
    before = [param.detach().clone() for param in model.parameters()]
    for size in (1, 2):
        config["tensor_parallel"] = {"autotp_size": size}
        with pytest.raises(ValueError, match=r"initialize: 0\.weight is cut over tensor-parallel ranks already"):
            engine.initialize(model=model, config=config)
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, value)


def test_a_model_that_is_cut_is_refused_before_anything_is_done_to_it(ranks: Ranks) -> None:
    ranks.run(2, refused_again)


class OfADict(nn.Module):
    """Takes its inputs in a way that cannot be made up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        y: Tensor = self.down(self.up(batch["x"]).relu())
        return y


def cut_by_example(rank: int, example: bool) -> str | tuple[tuple[int, ...], float]:
    config = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}}
    batch = {"x": torch.ones(1, 3, 8)}
    try:
        made, *_ = engine.initialize(model=OfADict(), config=config, example=(batch,) if example else None)
    except PlanError as error:
        return str(error)
    return tuple(made.module.up.weight.shape), made(batch).sum().item()


def test_initialize_takes_an_example_of_what_cannot_be_made_up(ranks: Ranks) -> None:
    for said in ranks.run(2, cut_by_example, False):
        assert "Pass example= (what its forward takes) to initialize or plan_for" in said
    expected = OfADict()({"x": torch.ones(1, 3, 8)}).sum().item()
    for shape, total in ranks.run(2, cut_by_example, True):
        assert shape == (16, 8)
        assert total == pytest.approx(expected, abs=1e-5)
