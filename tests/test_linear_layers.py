"""The sizes of linear layers as a fact, of models as they are when their modules are named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dsprof.collectors.hooking import statements
from dsprof.collectors.loop import linear_layers
from dsprof.collectors.loop.modules import Names


@pytest.fixture
def stated(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(statements, "_sink", found.append)
    return found


def test_layers_are_stated_under_the_names_that_modules_have(stated: list[dict[str, Any]]) -> None:
    model = nn.Sequential(nn.Embedding(7, 32), nn.Linear(32, 48, dtype=torch.bfloat16), nn.LayerNorm(48))
    names: dict[int, str] = {}
    numbers: list[str] = []

    def intern(text: str) -> int:
        numbers.append(text)
        return len(numbers)

    Names(intern, lambda address, name: names.update({address: numbers[name - 1]} if name else {})).name_all(model)
    assert names[id(model[1])] == "1"
    assert stated == [{"fact": "linear_layers", "layers": [["1", 32, 48, "bfloat16"]]}]


def test_a_model_without_any_states_nothing(stated: list[dict[str, Any]]) -> None:
    linear_layers.state([("", nn.ReLU())])
    assert stated == []


def sharded(shape: tuple[int, ...], *, mesh_dims: int | None = None) -> Any:
    """A layer of 32 inputs and 48 outputs whose weight is here in another shape."""
    weight = SimpleNamespace(dtype=torch.float16, shape=shape, dim=lambda: len(shape))
    if mesh_dims is not None:
        weight.device_mesh = SimpleNamespace(ndim=mesh_dims)
    return SimpleNamespace(in_features=32, out_features=48, _parameters={"weight": weight})


PLAIN: Any = SimpleNamespace()
FULLY_SHARDED: Any = SimpleNamespace(unshard=None)


@pytest.mark.parametrize(
    ("block", "layer", "sizes"),
    [
        (PLAIN, sharded((0,)), [32, 48, "float16"]),  # flattened, as FSDP and DeepSpeed have it between uses
        (PLAIN, sharded((24, 32)), [32, 24, "float16"]),  # this rank's part of it
        (FULLY_SHARDED, sharded((48, 32), mesh_dims=1), [32, 48, "float16"]),
        (PLAIN, sharded((48, 32), mesh_dims=1), None),  # whose part a rank computes is not seen
        (FULLY_SHARDED, sharded((48, 32), mesh_dims=2), None),
        (PLAIN, sharded((8, 48, 32)), None),  # of eight experts
    ],
)
def test_a_layer_that_ranks_share(
    block: Any, layer: Any, sizes: list[Any] | None, stated: list[dict[str, Any]]
) -> None:
    linear_layers.state([("", block), ("up", layer)])
    assert [fact["layers"] for fact in stated] == ([] if sizes is None else [[["up", *sizes]]])


def test_a_layer_that_is_not_made_yet_is_left_out(stated: list[dict[str, Any]]) -> None:
    linear_layers.state([("lazy", nn.LazyLinear(8)), ("1", nn.Linear(32, 48))])
    assert stated == [{"fact": "linear_layers", "layers": [["1", 32, 48, "float32"]]}]


def test_a_module_that_raises_at_any_attribute_costs_the_fact_alone(
    stated: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hostile:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    counted: list[str] = []
    monkeypatch.setattr(linear_layers, "count_error", lambda where, error: counted.append(f"{where}: {error}"))
    linear_layers.state([("", Hostile())])
    assert (stated, counted) == ([], ["the sizes of linear layers: unshard"])
