"""What scripts have pipelines made of: layers and models of any kind, outputs of any form."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
import torch
from pipeline_models import MICROBATCHES, configuration, start, weights
from ranks import Ranks
from torch import Tensor, nn

from dsprof.engine.pipe import LayerSpec, PipelineError, PipelineModule
from dsprof.engine.pipe.layer_costs import measure
from dsprof.engine.tree import form_of

mse = nn.functional.mse_loss


def data(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(2, 4, generator=generator), torch.randn(2, 4, generator=generator)) for _ in range(count)]


# --- forms


class Nested(nn.Module):
    """Takes what it returns, and sees that it is that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: Any) -> Any:
        if isinstance(inputs, Tensor):
            inputs = [{"h": inputs, 1: (inputs, None)}, (3, "x"), inputs > 0]
        assert [type(inputs), *(type(item) for item in inputs)] == [list, dict, tuple, Tensor]
        first, rest, mask = inputs
        assert (list(first), type(first[1]), first[1][1], rest) == (["h", 1], tuple, None, (3, "x"))
        h = self.linear(first["h"]) * mask + first[1][0]
        return [{"h": h, 1: (h * 2, None)}, rest, mask]


def last_of(inputs: Any) -> Tensor:
    output: Tensor = inputs[0]["h"] + inputs[0][1][0]
    return output


def nested_loss(output: Tensor, labels: dict[str, Any]) -> Tensor:
    return mse(output, labels["y"])


def nested() -> list[Any]:
    torch.manual_seed(0)
    return [Nested(), Nested(), Nested(), last_of]


def nested_job(rank: int) -> list[dict[str, Tensor]]:
    found = []
    for schedule, every in (("1f1b", 1), ("zero-bubble", 0)):
        module = PipelineModule(
            nested(), 2, loss_fn=nested_loss, partition_method="uniform", activation_checkpoint_interval=every
        )
        engine = start(module, configuration(pipeline={"schedule": schedule}))
        engine.train_batch(iter([(x, {"y": y, "more": None}) for x, y in data()]))
        found.append(weights(engine))
        engine.destroy()
    return found


def test_outputs_arrive_in_the_structure_they_had(ranks: Ranks) -> None:
    """With dicts as labels, and recomputed too."""
    whole = nn.Sequential(*nested()[:3])
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.1)
    for x, y in data():
        (mse(last_of(whole(x)), y) / 4).backward()
    torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    optimizer.step()
    for first, last in zip(*ranks.run(2, nested_job), strict=True):
        found = first | last
        for name, param in whole.named_parameters():
            assert (found[name] - param).abs().max().item() < 1e-6


def test_the_structure_of_outputs_is_described_in_text() -> None:
    a, b = torch.ones(1), torch.ones(2)
    assert form_of(a) == ('"tensor"', [a])
    assert form_of((a, b)) == ('"tuple"', [a, b])
    assert form_of([a]) == ('{"list": ["tensor"]}', [a])
    assert form_of({"a": a, 2: ("tensor", None)}) == (
        '{"dict": [["a", "tensor"], [2, {"tuple": [{"value": "tensor"}, {"value": null}]}]]}', [a],
    )  # fmt: skip
    odd: list[tuple[Any, str]] = [
        (torch.ones(2, 2).max(0), "a max"),
        ([a, {a}], "a list with a set in it"),
        ({a: 1}, "a dict with a Tensor as a key"),
    ]
    for output, says in odd:
        with pytest.raises(TypeError, match=says):
            form_of(output)


# --- layers


def double(x: Tensor) -> Tensor:
    return 2 * x


def test_functions_are_known_by_their_names() -> None:
    layers = [nn.Tanh(), double, functools.partial(double), nn.Tanh(), torch.relu, LayerSpec(nn.Linear, 1, 1)]
    for method, bounds in (("type:double", [0, 2, 6]), ("type:RELU|linear", [0, 5, 6])):
        module = PipelineModule(layers, partition_method=method)
        module.arrange(2, 0)
        assert module.bounds == bounds


class Slow(nn.Module):
    def forward(self, inputs: Any) -> list[Any]:
        time.sleep(0.01)
        return [inputs, {"more": 2 * inputs}]


def together(inputs: list[Any]) -> Tensor:
    return inputs[0] + inputs[1]["more"]  # type: ignore[no-any-return]


def test_layers_of_any_kind_are_measured() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    writing = nn.ReLU(inplace=True)
    layers = [nn.Embedding(5, 4).requires_grad_(False), writing, nn.Linear(4, 4), writing, Slow(), together, frozen]
    module = PipelineModule(layers)
    with torch.no_grad():
        found = measure(module, torch.tensor([[1, 2]]), repeats=1)["layers"]
    backward = [layer["backward_s"] > 0 for layer in found]
    assert backward == [False, False, True, True, True, True, True]  # from the first that is trained
    assert found[4]["forward_s"] > 0.01 > found[4]["backward_s"]
    with pytest.raises(PipelineError, match="measure: layer 2 failed: RuntimeError: mat1 and mat2"):
        measure(PipelineModule([nn.ReLU(), nn.ReLU(), nn.Linear(3, 3)]), torch.ones(2, 2))
    with pytest.raises(PipelineError, match="measure: layer 0 is on meta, and what it gets on cpu"):
        measure(PipelineModule([nn.Linear(2, 2, device="meta")]), torch.ones(2, 2))


# --- models as users write them


def writing() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 4))


def repeated() -> nn.Sequential:
    torch.manual_seed(0)
    act = nn.Tanh()
    return nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act, nn.Linear(4, 4))


MODELS = {"writing": (writing, [0, 1, 4]), "repeated": (repeated, [0, 2, 5])}


def model_job(rank: int, name: str) -> dict[str, Tensor]:
    make, bounds = MODELS[name]
    engine = start(PipelineModule(make(), 2, loss_fn=mse, partition_method=bounds), configuration())
    engine.train_batch(iter(data()))
    found = weights(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("name", list(MODELS))
def test_stages_that_write_to_their_input_and_modules_that_are_called_twice(ranks: Ranks, name: str) -> None:
    first, last = ranks.run(2, model_job, name)
    whole = MODELS[name][0]()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.1)
    for x, y in data():
        (mse(whole(x), y) / MICROBATCHES).backward()
    torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    optimizer.step()
    found = first | last
    assert found.keys() == dict(whole.named_parameters()).keys()
    for key, param in whole.named_parameters():
        assert (found[key] - param).abs().max().item() < 1e-6


class Own(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)  # type: ignore[no-any-return]


def test_a_sequential_with_a_forward_of_its_own_is_one_layer() -> None:
    model = nn.Module()
    model.body = Own(nn.Linear(2, 2), nn.Linear(2, 2))
    model.head = nn.Linear(2, 2)
    part = PipelineModule(["body", "head"], model=model)
    part.arrange(1, 0)
    assert part.bounds == [0, 2]


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        return (self.weight * (output - labels) ** 2).mean()


def loss_job(rank: int) -> tuple[list[str], bool, bool]:
    module = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], 2, loss_fn=Weighted())
    engine = start(module, configuration())
    loss, outputs = engine.eval_batch(iter(data()), return_logits=True)
    same = bool(engine.eval_batch(iter(data()), reduce_output="avg") == loss)
    engine.destroy()
    return [name for name, _ in module.named_parameters()], outputs is not None, same


def test_a_loss_that_is_a_module_is_on_the_last_stage(ranks: Ranks) -> None:
    assert ranks.run(2, loss_job) == [
        (["0.weight", "0.bias"], False, True),
        (["loss_fn.weight", "1.weight", "1.bias"], True, True),
    ]
