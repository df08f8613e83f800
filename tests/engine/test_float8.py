"""Float8: what a cast rounds, a linear layer's numbers, what it takes, and which layers take it."""

from __future__ import annotations

import copy
import math
import re
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from float8_models import RECIPES, counted, far, in_float8
from ranks import Ranks
from torch import Tensor, nn

from dsprof.engine.config.config import Fp8Config
from dsprof.engine.precision import device as devices
from dsprof.engine.precision.choose import Choice
from dsprof.engine.precision.gain import Rates, layer_time, listed_rates
from dsprof.engine.precision.linear import Arithmetic
from dsprof.engine.precision.scaling import E4M3, E5M2, cast, padded

torch.set_num_threads(1)


# --- numbers


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cast_is_within_its_formats_rounding(recipe: Any, dtype: torch.dtype) -> None:
    x = (torch.randn(40, 33, generator=torch.Generator().manual_seed(0)) * 3e-3).to(dtype)
    for form, rounding in ((E4M3, 2**-4), (E5M2, 2**-3)):
        found = cast(x, form, recipe)
        normal = x.float().abs() > 2**-4 * x.float().abs().amax(-1, keepdim=True)
        error = (found.rounded() - x.float()).abs() / x.float().abs()
        assert error[normal].max().item() <= rounding
        assert found.data.float().abs().max().item() > torch.finfo(form).max / 2  # the range is used
        assert torch.equal(torch.frexp(found.scale)[0], torch.full_like(found.scale, 0.5))  # a power of two


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_finite_is_seen(recipe: Any) -> None:
    """Or an overflow would train on."""
    for bad in (math.inf, -math.inf, math.nan):
        x = torch.ones(4, 16)
        x[2, 3] = bad
        found = cast(x, E5M2, recipe).rounded()
        assert found.isnan().any()
        assert recipe == "tensorwise" or not found[[0, 1, 3]].isnan().any()
    assert not cast(torch.zeros(4, 16), E4M3, recipe).rounded().any()


def test_a_transpose_is_padded_with_zeros() -> None:
    x = cast(torch.randn(5, 32), E4M3, "tensorwise")
    turned = x.turned()
    assert turned.data.shape == (32, 16)
    assert torch.equal(turned.rounded()[:, :5], x.rounded().t())
    assert not turned.rounded()[:, 5:].any()
    assert padded(x.data).data_ptr() == x.data.data_ptr()


class Conv1D(nn.Module):
    """As transformers has it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.GELU(), Conv1D(48, 32), nn.Tanh(), nn.Linear(32, 16, bias=False))


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_and_gradients_are_close_to_those_without(recipe: Any, dtype: torch.dtype, emulated: bool) -> None:
    def all_of_it(model: nn.Module) -> list[Tensor]:
        x = torch.randn(3, 7, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        y = model(x)
        y.float().square().sum().backward()
        assert x.grad is not None
        return [y.detach(), x.grad, *(param.grad for param in model.parameters() if param.grad is not None)]

    plain = network().to(dtype)
    expected = all_of_it(plain)
    model = copy.deepcopy(network().to(dtype))
    with in_float8(model, Arithmetic(recipe, emulated=emulated)):
        found = all_of_it(model)
    assert [one.dtype for one in found] == [dtype] * 7
    assert [far(a, b) < 0.15 for a, b in zip(found, expected, strict=True)] == [True] * 7
    assert far(found[0], expected[0]) > 0.01  # it is float8
    model.zero_grad()
    assert [torch.equal(a, b) for a, b in zip(all_of_it(model), expected, strict=True)] == [True] * 7


def test_rows_are_more_exact_than_tensors() -> None:
    """Where some rows are much smaller than others, as tokens' activations are."""
    sizes = torch.logspace(-7, 0, 64).unsqueeze(1)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)) * sizes

    def error(recipe: Any) -> float:
        model = nn.Linear(64, 64)
        expected = model(x) - model.bias
        with in_float8(model, Arithmetic(recipe)):
            found = model(x) - model.bias
        distances: Tensor = (found - expected).norm(dim=1) / expected.norm(dim=1)
        return distances.max().item()

    assert error("rowwise") < 0.1 < error("tensorwise")


def test_autocast_says_what_comes_out() -> None:
    model, x = nn.Linear(32, 16), torch.randn(4, 32, requires_grad=True)
    with in_float8(model, Arithmetic("tensorwise")), counted() as counter, torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype is torch.bfloat16
    y.sum().backward()
    assert counter.products == 1
    assert x.grad is not None
    assert model.weight.grad is not None
    assert (x.grad.dtype, model.weight.grad.dtype) == (torch.float32, torch.float32)


def test_layers_without_rows_and_layers_of_other_types_stay() -> None:
    """As an expert has that no token is sent to."""
    model = nn.Linear(32, 16)
    with in_float8(model, Arithmetic("tensorwise")), counted() as counter:
        assert model(torch.zeros(0, 32)).shape == (0, 16)
        assert model(torch.zeros(32)).shape == (16,)
        assert copy.deepcopy(model).double()(torch.zeros(2, 32, dtype=torch.float64)).dtype is torch.float64
    assert counter.products == 0


@pytest.mark.parametrize("shape", [(4, 32), (2, 3, 32)])
def test_outputs_may_be_written_to(shape: tuple[int, ...]) -> None:
    """As by `nn.ReLU(inplace=True)`, and by what adds a residual."""

    def gradient(x: Tensor, inplace: bool) -> Tensor:
        model.zero_grad()
        y = model(x)
        y = y.add_(1).relu_() if inplace else (y + 1).relu()
        y.square().sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad

    model, x = nn.Linear(32, 16), torch.randn(shape, generator=torch.Generator().manual_seed(7))
    with in_float8(model, Arithmetic("tensorwise")), counted() as counter:
        assert torch.equal(gradient(x, inplace=True), gradient(x, inplace=False))
    assert counter.products == 2 * 2


def test_what_torch_refuses_or_transforms_stays() -> None:
    model = nn.Linear(32, 16)
    with in_float8(model, Arithmetic("tensorwise")), counted() as counter:
        with pytest.raises(RuntimeError, match="must have the same dtype"):
            model(torch.randn(4, 32).bfloat16())
        x = torch.randn(4, 6, 32)
        expected = nn.functional.linear(x, model.weight, model.bias)
        torch.testing.assert_close(torch.func.vmap(model)(x), expected)
        torch.testing.assert_close(torch.func.grad(lambda x: model(x).sum())(x[0, 0]), model.weight.sum(0))
    assert counter.products == 0


# --- which layers

QUICK: Final = Rates(flops=1e14, float8=4e14, bytes=1e12, launch=1e-7)
SLOW: Final = Rates(flops=4e14, float8=1e14, bytes=1e12, launch=1e-7)


def test_auto_takes_layers_that_gain_at_the_rows_they_get() -> None:
    told: list[str] = []
    choice = Choice(Fp8Config(enabled=True, skip=("head",)), QUICK, warn=told.append)
    assert choice("up", 4096, 1024, 1024)
    assert not choice("up", 16, 1024, 1024)  # casts of its weight take longer than its products
    assert not choice("head", 4096, 1024, 1024)
    assert choice("up", 4096, 1024, 1024)
    assert told == []


def test_auto_says_where_nothing_gains() -> None:
    told: list[str] = []
    choice = Choice(Fp8Config(enabled=True), SLOW, warn=told.append)
    assert [choice(name, 4096, 1024, 1024) for name in ("up", "down", "up", "down", "up")] == [False] * 5
    (text,) = told
    assert text.startswith(
        "fp8: no linear layer is faster in float8 on this device, so none takes it: up, of 4096 rows"
    )
    quiet = Choice(Fp8Config(enabled=True), SLOW, says=False, warn=told.append)
    assert [quiet("up", 64, 64, 64), quiet("up", 64, 64, 63)] == [False, False]
    assert len(told) == 1


def test_a_layer_that_gains_at_more_rows_later_is_no_reason_to_say_so() -> None:
    told: list[str] = []
    choice = Choice(Fp8Config(enabled=True), QUICK, warn=told.append)
    assert [choice("up", rows, 1024, 1024) for rows in (16, 4096, 16, 4096)] == [False, True, False, True]
    assert told == []


def test_auto_measures_the_device() -> None:
    by = devices.arithmetic(torch.device("cpu"), "tensorwise")
    comm: Any = type("Alone", (), {"rank": 0, "group": None})()
    found = devices.rates(torch.device("cpu"), torch.bfloat16, by, comm)
    assert all(value > 0 for value in (found.flops, found.float8, found.bytes, found.launch))
    assert (found.item_bytes, found.fused) == (2, False)


def rates_of_two_devices(rank: int) -> Rates:
    """As of a job on an H100, which is listed, and on a device that is not."""
    comm: Any = type("Everyone", (), {"rank": rank, "group": dist.group.WORLD})()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "_name", lambda device: ("NVIDIA H100 80GB HBM3", "Some GPU")[rank])
        return devices.rates(torch.device("cuda"), torch.bfloat16, Arithmetic("tensorwise"), comm)


def test_ranks_of_several_devices_choose_alike(ranks: Ranks) -> None:
    one, other = ranks.run(2, rates_of_two_devices)
    listed = listed_rates("NVIDIA H100 80GB HBM3", "bfloat16", fused=False)
    assert listed is not None
    assert one == other == listed[1]


@pytest.mark.parametrize(
    ("capability", "hip", "says"),
    [
        ((8, 0), None, "fp8: Some GPU has no float8, which begins at capability 8.9"),
        ((9, 4), "6.2", "fp8: CPUs and NVIDIA's devices compute float8 here, and this is Some GPU"),
    ],
)
def test_a_device_without_float8_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None, says: str
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    with pytest.raises(ValueError, match=re.escape(says) + '.*; write "fp8": {"enabled": false}$'):
        devices.arithmetic(torch.device("cuda"), "tensorwise")


def test_a_torch_that_cannot_multiply_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("aten::_scaled_mm")

    assert not devices.arithmetic(torch.device("cpu"), "rowwise").emulated
    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    assert devices.arithmetic(torch.device("cpu"), "rowwise").emulated


# --- what it takes


def test_large_layers_gain_and_small_ones_lose() -> None:
    """torchao's table, on an H100: 1.39 times as fast, and 0.80."""
    listed = listed_rates("NVIDIA H100 80GB HBM3", "bfloat16")
    assert listed is not None
    least, expected, most = ((t := layer_time(4096, 8192, 16384, rates)).as_is / t.float8 for rates in listed)
    assert least < 1.39 < most
    assert expected == pytest.approx(1.39, rel=0.07)
    assert all(layer_time(1024, 2048, 1024, rates).saved < 0 for rates in listed)
    rowwise, unfused = layer_time(8192, 4096, 4096, listed[1], "rowwise"), listed_rates(
        "NVIDIA H100 80GB HBM3", "bfloat16", fused=False
    )  # fmt: skip
    assert unfused is not None
    assert rowwise.float8 > layer_time(8192, 4096, 4096, listed[1]).float8
    assert layer_time(8192, 4096, 4096, unfused[1]).casts > layer_time(8192, 4096, 4096, listed[1]).casts


def test_a_layer_takes_what_its_parts_take() -> None:
    """Counted by hand: M, K, N = 2, 3, 5 at one operation a second, two in float8, and memory that costs nothing."""
    rates = Rates(flops=1.0, float8=2.0, bytes=math.inf, launch=0.0)
    found = layer_time(2, 3, 5, rates)
    assert (found.as_is, found.products, found.casts, found.saved) == (180.0, 90.0, 0.0, 90.0)
    memory = layer_time(2, 3, 5, Rates(flops=math.inf, float8=math.inf, bytes=1.0, launch=0.0))
    assert memory.as_is == 2 * 3 * (6 + 15 + 10)  # each product reads two of them, and writes the third
    assert memory.products == (6 + 15 + 20) + (10 + 15 + 12) + (10 + 6 + 30)
    assert memory.casts == (6 + 15) * (2 + 3 + 3) + 10 * (2 + 3 + 2)


@pytest.mark.parametrize("device", ["NVIDIA A100-SXM4-80GB", "Some GPU"])
def test_devices_without_float8_have_no_rates(device: str) -> None:
    assert listed_rates(device, "bfloat16") is None
