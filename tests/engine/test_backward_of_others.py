"""Gradients that come by a backward which is not this engine's, or which does not come to its end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import WIDTH, configuration, engine_for, train
from ranks import Ranks
from torch import Tensor, nn

from dsprof import engine as ds

ROWS = 4


def network(seed: int, out: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, out)).double()


def samples(step: int, rank: int) -> Tensor:
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def engine_of(model: nn.Module, stage: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    return ds.initialize(model=model, config=config)[0]


def generator_and_critic(rank: int, stage: int) -> list[float]:
    """Norms of the critic's gradients: the generator's loss goes through the critic, too."""
    generator, critic = engine_of(network(1, 4), stage), engine_of(network(2, 1), stage)
    norms = []
    for step in range(3):
        x = samples(step, rank)
        critic.zero_grad()
        critic.backward(critic(x).square().mean())
        critic.step()
        norms.append(critic.get_global_grad_norm())
        generator.backward(critic(generator(x)).square().mean())
        generator.step()
    for engine in (generator, critic):
        engine.destroy()
    return norms


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_another_engines_backward_leaves_the_buckets_alone(ranks: Ranks, stage: int) -> None:
    critic = network(2, 1)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        critic(torch.cat([samples(step, rank) for rank in range(2)])).square().mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(critic.parameters(), 1e9).item())
        optimizer.step()
    for found in ranks.run(2, generator_and_critic, stage):
        assert found == pytest.approx(norms, rel=1e-9)


def square(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 4, bias=False).double()


def penalty(first: nn.Module, second: nn.Module, weights: list[Tensor], x: Tensor | None) -> Tensor:
    """A loss that needs each weight for the other's gradient; with `x`, one that the modules are called for, too."""
    loss = (weights[0] * weights[1]).square().sum()
    return loss if x is None else loss + second(torch.tanh(first(x))).square().mean()


def gathered_of_two(rank: int, calls: bool, swapped: bool) -> tuple[float, list[float], list[int]]:
    """The norm of the first engine's gradients, those of the second, and how many elements each has whole
    afterwards."""
    engines = [engine_of(square(seed), 3) for seed in (1, 2)]
    weights = [engine.module.weight for engine in engines]
    with ds.zero.GatheredParameters(weights[::-1] if swapped else weights):
        loss = penalty(*engines, weights, samples(0, rank) if calls else None)
    engines[0].backward(loss)
    other = weights[1].grad.flatten().tolist()
    engines[0].step()
    whole = [engine.zero.fetcher.live_params.live for engine in engines]
    norm = engines[0].get_global_grad_norm()
    for engine in engines:
        engine.destroy()
    return norm, other, whole


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("calls", [False, True])
def test_a_penalty_on_weights_of_two_engines_is_differentiated_after_the_block(
    ranks: Ranks, calls: bool, swapped: bool
) -> None:
    first, second = square(1), square(2)
    x = torch.cat([samples(0, rank) for rank in range(2)]) if calls else None
    penalty(first, second, [first.weight, second.weight], x).backward()
    assert first.weight.grad is not None
    assert second.weight.grad is not None
    norms, others, wholes = zip(*ranks.run(2, gathered_of_two, calls, swapped), strict=True)
    assert norms == pytest.approx([first.weight.grad.norm().item()] * 2, rel=1e-9)
    torch.testing.assert_close(torch.tensor(others, dtype=torch.float64).mean(0), second.weight.grad.flatten())
    assert wholes == ([0, 0],) * 2


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("in backward")


def forgiven(rank: int, stage: int) -> tuple[float, float]:
    model = network(1, 1)
    engine = engine_of(model, stage)
    x = samples(0, rank)
    with pytest.raises(ArithmeticError):
        engine.backward(model[2](Failing.apply(torch.tanh(model[0](x)))).mean() if stage < 3 else failing(engine, x))
    engine.zero_grad()
    engine.backward(engine(x).square().mean())
    engine.step()
    norm = engine.get_global_grad_norm()
    engine.destroy()
    other = engine_of(network(1, 1), stage)
    other.backward(other(x).square().mean())
    other.step()
    expected = other.get_global_grad_norm()
    other.destroy()
    return norm, expected


def failing(engine: Any, x: Tensor) -> Tensor:
    handle = engine.module[1].register_forward_hook(lambda module, args, output: Failing.apply(output))
    try:
        return engine(x).mean()  # type: ignore[no-any-return]
    finally:
        handle.remove()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_backward_that_failed_is_forgotten_with_its_gradients(ranks: Ranks, stage: int) -> None:
    for norm, expected in ranks.run(2, forgiven, stage):
        assert norm == expected


def unreduced(rank: int) -> str:
    engine = engine_of(network(1, 1), 0)
    with engine.no_sync():
        engine.backward(engine(samples(0, rank)).mean())
    try:
        engine.step()
    except RuntimeError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_a_step_of_gradients_that_were_not_reduced_is_refused(ranks: Ranks) -> None:
    for text in ranks.run(2, unreduced):
        assert text.startswith("engine.step: every backward of this step was inside engine.no_sync()")


# --- a backward that returns no gradient


class Detour(torch.autograd.Function):
    """A product whose backward returns None for the weight: torch calls the weight's hooks all the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grads[0] @ weight.t(), None


class Untrained(nn.Module):
    """A weight gets no gradient, a bias beside it does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = Detour.apply(self.first(x), self.second.weight)  # type: ignore[no-untyped-call]
        return (product + self.second.bias).square().mean()


def none_job(rank: int, stage: int) -> dict[str, Tensor]:
    model = Untrained()
    with engine_for(model, configuration(stage)) as engine:
        train(engine, 2)
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_function_may_return_no_gradient_for_a_weight(ranks: Ranks, stage: int) -> None:
    model = Untrained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH)).backward()
        optimizer.step()
    for found in ranks.run(2, none_job, stage):
        for name, param in model.named_parameters():
            assert torch.allclose(found[name], param, atol=1e-6), name
