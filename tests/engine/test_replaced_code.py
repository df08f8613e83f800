"""Stage 3, where torch's own code is replaced by a script's: a function that keeps a weight for its backward itself,
which nothing announces, finds it there."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from slow_cases import slow_but
from squared import Squared
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dsprof import engine as ds
from dsprof.engine.comm import deadlock

WIDTH = 6


class Keeps(torch.autograd.Function):
    """A linear layer that keeps its weight as no autograd does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C.DisableTorchFunctionSubclass():
            return grad @ ctx.weight, grad.t() @ ctx.x, grad.sum(0)


def of_layer(layer: nn.Linear, x: Tensor) -> Tensor:
    y: Tensor = Keeps.apply(x, layer.weight, layer.bias)
    return y


@contextlib.contextmanager
def replaced(kind: str, model: nn.Sequential) -> Iterator[None]:
    """Some code that the model runs, after it was given to an engine."""
    with contextlib.ExitStack() as stack:
        if kind == "parametrization":
            with ds.zero.GatheredParameters(model[2].parameters(), modifier_rank=0):
                parametrize.register_parametrization(model[2], "weight", Squared())
        elif kind == "function":
            stack.enter_context(mock.patch.object(F, "linear", Keeps.apply))
        elif kind == "class":
            stack.enter_context(mock.patch.object(nn.Linear, "forward", of_layer))
        else:
            layer: Any = model[2]
            layer.forward = lambda x: of_layer(layer, x)
        yield


def build() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))).double()


def sample(number: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank)).double()


def trained(rank: int, kind: str, first: int, before: bool) -> float:
    """How far the weights are from one process's. The code is replaced before the step `first`, or before the engine
    is made."""
    model, expected = build(), build()
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    config = {
        "train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": zero,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        if before:
            stack.enter_context(replaced(kind, model))
        engine = ds.initialize(model=model, config=config)[0]
        optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
        for number in range(4):
            if number == first and not before:
                stack.enter_context(replaced(kind, model))
            if number == first and kind == "parametrization":
                parametrize.register_parametrization(expected[2], "weight", Squared())
            engine.backward(engine(sample(number, rank)).square().mean())
            engine.step()
            optimizer.zero_grad()
            torch.stack([expected(sample(number, other)).square().mean() for other in range(2)]).mean().backward()
            optimizer.step()
        with ds.zero.GatheredParameters(model.parameters()):
            wanted = {name.replace(".original", ""): value for name, value in expected.named_parameters()}
            found = {name.replace(".original", ""): value for name, value in model.named_parameters()}
            off = max((found[name] - wanted[name]).abs().nan_to_num(9.0).max().item() for name in wanted)
        engine.destroy()
    return off


@pytest.mark.parametrize(
    ("kind", "first", "before"),
    slow_but(
        [("parametrization", 2, False), ("function", 0, False), ("class", 2, False), ("instance", 0, False),
         ("class", 0, True)],
        among=[*itertools.product(("parametrization", "function", "class", "instance"), (0, 2), (False,)),
               ("function", 0, True), ("class", 0, True)],
    ),
)  # fmt: skip
def test_what_replaces_torchs_code_has_its_weights_in_backward(
    ranks: Ranks, kind: str, first: int, before: bool
) -> None:
    """In `make test` each kind once, and one that was there before the engine."""
    assert max(ranks.run(2, trained, kind, first, before)) < 1e-9


def on_one_rank(rank: int) -> str:
    model = build()
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": zero,
    }  # fmt: skip
    engine = ds.initialize(model=model, config=config)[0]
    with ds.zero.GatheredParameters(model[2].parameters(), modifier_rank=0):
        if rank == 1:
            parametrize.register_parametrization(model[2], "weight", Squared())
    with pytest.raises(RuntimeError) as caught:
        engine.backward(engine(sample(0, rank)).square().mean())
    return str(caught.value)


def test_a_parametrization_on_one_rank_is_refused(ranks: Ranks) -> None:
    for said in ranks.run(2, on_one_rank):
        assert said.startswith("ZeRO stage 3: the ranks ran different modules, and now wait for each other")


def function_on_one_rank(rank: int) -> str:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    config = {
        "train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": zero,
    }  # fmt: skip
    engine = ds.initialize(model=build(), config=config)[0]
    with (
        replaced("function", build()) if rank == 1 else contextlib.nullcontext(),
        mock.patch.object(deadlock, "PATIENCE_S", 0.3),
        pytest.raises(RuntimeError) as caught,
    ):
        engine.backward(engine(sample(0, rank)).square().mean())
    return str(caught.value)


def test_a_function_that_is_replaced_on_one_rank_is_refused_by_name(ranks: Ranks) -> None:
    for said in ranks.run(2, function_on_one_rank):
        assert said.startswith("ZeRO stage 3: the ranks ran different modules, and now wait for each other")
        assert "; on rank 1 torch.nn.functional.linear was replaced. Every rank" in said
