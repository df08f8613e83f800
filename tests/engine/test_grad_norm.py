"""The global norm and clipping."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import Ranks, everyone
from spans import recorded
from torch import Tensor, nn

from dsprof.engine.optim.loss_scaler import clip_coefficient, clip_on_device_, global_norm, unscale_and_clip_


def test_norm_of_several_tensors() -> None:
    grads = [torch.tensor([3.0]), torch.tensor([[0.0, 4.0]]), torch.empty(0), torch.tensor(12.0)]
    norm = global_norm(grads, [])
    assert norm.dtype is torch.float64
    assert norm.item() == 13.0
    assert global_norm([], []).item() == 0.0


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float16, 60000.0), (torch.bfloat16, 2.0**100), (torch.float32, 2.0**100)]
)
def test_finite_gradients_do_not_overflow(dtype: torch.dtype, value: float) -> None:
    grad = torch.full((1024,), value, dtype=dtype)
    assert global_norm([grad], []).item() == pytest.approx(32 * float(grad[0]))


def test_long_gradients_keep_their_digits() -> None:
    grad = torch.randn(2_000_000, generator=torch.Generator().manual_seed(5))
    assert global_norm([grad], []).item() == pytest.approx(grad.double().norm().item(), rel=1e-6)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_bad_element_shows(bad: float) -> None:
    assert not math.isfinite(global_norm([torch.ones(5), torch.tensor([1.0, bad])], []).item())


def test_clipping_is_torchs() -> None:
    torch.manual_seed(1)
    for max_norm in (0.5, 1e3):
        params = [nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(3, 2))]
        for param in params:
            param.grad = torch.randn_like(param)
        ours = [param.grad.clone() for param in params if param.grad is not None]
        norm = global_norm(ours, [])
        assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(params, max_norm).item(), rel=1e-6)
        unscale_and_clip_(ours, norm.item(), max_norm=max_norm)
        for param, grad in zip(params, ours, strict=True):
            torch.testing.assert_close(grad, param.grad, rtol=1e-6, atol=0)


def test_unscaling_and_clipping_at_once() -> None:
    # Scaled by 4, the norm is 20, that is 5 without; to 1, each element becomes its fifth.
    grads = [torch.tensor([12.0]), torch.tensor([16.0], dtype=torch.float64)]
    unscale_and_clip_(grads, global_norm(grads, []).item(), loss_scale=4.0, max_norm=1.0)
    assert [grad.item() for grad in grads] == pytest.approx([0.6, 0.8], rel=1e-6)


def test_small_gradients_are_only_unscaled() -> None:
    grads = [torch.tensor([12.0, 16.0])]
    unscale_and_clip_(grads, 20.0, loss_scale=4.0, max_norm=5.1)
    assert grads[0].tolist() == [3.0, 4.0]
    unscale_and_clip_(grads, 5.0)
    assert grads[0].tolist() == [3.0, 4.0]
    unscale_and_clip_([], 0.0, max_norm=1.0)


def test_coefficient() -> None:
    assert clip_coefficient(4.0, 1.0) == 1 / (4 + 1e-6)
    assert clip_coefficient(0.5, 1.0) == 1.0


def norm_of_shards(rank: int) -> tuple[float, list[tuple[Any, ...]]]:
    grads = [torch.tensor([3.0])] if rank == 0 else [] if rank == 1 else [torch.tensor([4.0, 12.0])]
    with recorded() as spans:
        norm = global_norm(grads, [everyone()]).item()
    return norm, [(s.kind, s.name, s.lane, s.purpose, s.bytes, s.dtype) for s in spans]


def test_shards_of_three_ranks(ranks: Ranks) -> None:
    told = [("comm", "all_reduce", "main", "norm", 8, "float64")]
    results = ranks.run(3, norm_of_shards)
    assert [spans for _, spans in results] == [told] * 3
    assert len({norm for norm, _ in results}) == 1
    assert results[0][0] == pytest.approx(13, rel=1e-6)


def overflow_on_one(rank: int) -> float:
    return global_norm([torch.tensor([float("inf") if rank == 1 else 1.0])], [everyone()]).item()


def test_an_overflow_on_one_rank_shows_on_all(ranks: Ranks) -> None:
    assert ranks.run(2, overflow_on_one) == [math.inf, math.inf]


@pytest.mark.parametrize("norm", [0.3, 80.0, float("nan"), float("inf")])
@pytest.mark.parametrize(("loss_scale", "max_norm"), [(1.0, 1.0), (8.0, 1.0), (8.0, 0.0), (1.0, 0.0)])
def test_gradients_are_clipped_alike_where_the_host_does_not_know_the_norm(
    norm: float, loss_scale: float, max_norm: float
) -> None:
    def grads() -> list[Tensor]:
        return [torch.tensor([1.0, -3.0, 0.1], dtype=dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)]

    ours, wanted = grads(), grads()
    clip_on_device_(ours, torch.tensor(norm, dtype=torch.float64), loss_scale=loss_scale, max_norm=max_norm)
    unscale_and_clip_(wanted, norm, loss_scale=loss_scale, max_norm=max_norm)
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
