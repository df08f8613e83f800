"""Casts to float8 by kernels of our own, on a GPU that has it: the same numbers as by torch, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsprof.engine.precision import linear
from dsprof.engine.precision.device import arithmetic
from dsprof.engine.precision.gain import CAPABILITY
from dsprof.engine.precision.scaling import E4M3, E5M2, Scaled, cast

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < CAPABILITY, reason="no GPU with float8"
)
SHAPES = [(16, 16), (48, 32), (7, 64), (64, 7), (130, 80), (1, 2048), (4096, 1024)]


def the_same(one: Scaled, other: Scaled) -> bool:
    return torch.equal(one.scale, other.scale) and torch.equal(one.data.view(torch.uint8), other.data.view(torch.uint8))


def matrix(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Of elements that differ by orders of magnitude."""
    random = torch.Generator().manual_seed(3)
    x, size = (torch.randn(shape, generator=random) for _ in range(2))
    return (x * size.exp()).to(dtype).cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("form", [E4M3, E5M2])
def test_casts_are_those_of_torch(dtype: torch.dtype, recipe: Any, form: torch.dtype) -> None:
    by = arithmetic(torch.device("cuda"), recipe)
    assert by.fused
    for shape in SHAPES:
        for x in (matrix(shape, dtype), matrix(shape, dtype).t()):
            expected = cast(x, form, recipe)
            assert the_same(by.cast(x, form, recipe), expected), shape
            assert the_same(by.cast(x, form, recipe, expected.scale), expected), shape
            if recipe == "tensorwise":
                assert the_same(by.turned(expected), expected.turned()), shape


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_found(value: float) -> None:
    x = matrix((64, 32), torch.bfloat16)
    x[3, 5] = value
    by = arithmetic(torch.device("cuda"), "tensorwise")
    assert by.cast(x, E4M3, "tensorwise").rounded().isnan().any()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_outputs_and_gradients_are_close_to_those_without(recipe: Any) -> None:
    def all_of_it(model: nn.Module) -> list[Tensor]:
        x = matrix((120, 64), torch.bfloat16).requires_grad_()
        model(x).float().square().sum().backward()
        assert x.grad is not None
        return [x.grad, *(param.grad for param in model.parameters() if param.grad is not None)]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)).to("cuda", torch.bfloat16)
    expected = all_of_it(model)
    model.zero_grad()
    linear.install(model, arithmetic(torch.device("cuda"), recipe), lambda *_: True)
    for found, true in zip(all_of_it(model), expected, strict=True):
        assert (found - true).norm() < 0.15 * true.norm()
