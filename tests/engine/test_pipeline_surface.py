"""What scripts pass to pipelines and ask of them: forms of outputs, names of layers, DeepSpeed's surface."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import configuration, start, weights
from ranks import Ranks
from torch import Tensor, nn

from dsprof.engine.pipe import LayerSpec, PipeDataParallelTopology, PipelineError, PipelineModule, treespec
from dsprof.engine.pipe.layer_costs import measure

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


def test_outputs_arrive_in_the_form_they_had(ranks: Ranks) -> None:
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


def test_a_form_is_text() -> None:
    a, b = torch.ones(1), torch.ones(2)
    assert treespec.of(a) == ('"tensor"', [a])
    assert treespec.of((a, b)) == ('"tuple"', [a, b])
    assert treespec.of([a]) == ('{"list": ["tensor"]}', [a])
    assert treespec.of({"a": a, 2: ("tensor", None)}) == (
        '{"dict": [["a", "tensor"], [2, {"tuple": [{"value": "tensor"}, {"value": null}]}]]}', [a],
    )  # fmt: skip
    odd: list[tuple[Any, str]] = [
        (torch.ones(2, 2).max(0), "a max"),
        ([a, {a}], "a list with a set in it"),
        ({a: 1}, "a dict with a Tensor as a key"),
    ]
    for output, says in odd:
        with pytest.raises(TypeError, match=says):
            treespec.of(output)


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


# --- checkpoints


def muon_job(rank: int, stages: int, folder: str, save: bool) -> list[float]:
    torch.manual_seed(0)
    layers = [nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False), torch.tanh]
    bounds = [0, 1, 4] if stages == 2 else [0, 4]
    module = PipelineModule(layers, stages, loss_fn=mse, partition_method=bounds)
    optimizer = {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 0.001}}
    engine = start(module, configuration(optimizer=optimizer))
    if save:
        engine.train_batch(iter(data()))
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    losses = [engine.train_batch(iter(data())).item(), *engine.get_lr()]
    engine.destroy()
    return losses


def test_checkpoints_of_muon_load_on_other_stages(ranks: Ranks, tmp_path: Path) -> None:
    """The first stage has no matrix, and a group for them all the same."""
    first, last = ranks.run(2, muon_job, 2, str(tmp_path), True)
    (whole,) = ranks.run(1, muon_job, 1, str(tmp_path), False)
    assert first == last == [pytest.approx(whole[0], abs=1e-6), 0.02, 0.001]
    assert whole[1:] == [0.02, 0.001]


# --- what an engine answers


def asked_job(rank: int) -> dict[str, Any]:
    engine = start(PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh()], 2, loss_fn=mse), configuration())
    module, grid = engine.module, engine.grid
    found: dict[str, Any] = {"places": (module.num_pipeline_stages(), module.parts, module.stage_id, engine.next_stage)}
    found["owners"] = [module.stage_owner(layer) for layer in range(3)]
    found["parallel"] = (engine.is_pipe_parallel, engine.is_data_parallel, engine.is_model_parallel)
    same = module.topology().mapping == PipeDataParallelTopology(2, 1).mapping == grid.topology().mapping
    found["grid"] = (same, grid.stage_to_global(1), grid.pp_group, grid.is_last_stage, module.mpu() is grid)
    engine.reset_activation_shape()
    engine.set_has_attention_mask(True)
    loss = engine.train_batch(iter(data(12)))
    found["loss"] = engine.agg_train_loss is loss
    each = engine.eval_batch(iter(data()), reduce_output=None, bcast_loss=False)
    mean = engine.eval_batch(iter(data()), bcast_loss=False)
    found["eval"] = (each is None, mean is None) if rank == 0 else (len(each), (torch.stack(each).mean() - mean).item())
    found["planned once"] = engine._planned(4, forward_only=True) is engine._planned(4, forward_only=True)
    engine.set_train_batch_size(6)
    engine.train_batch(iter(data(3)))
    found["sizes"] = (engine.micro_batches, engine.train_batch_size(), engine.global_samples)
    found["refused"] = []
    for ask in (
        lambda: engine.set_train_batch_size(7),
        lambda: engine.eval_batch(iter(data()), reduce_output=None),
        lambda: engine.eval_batch(iter(data()), num_micro_batches=0),
        lambda: engine.log_for_device("x"),
        lambda: module.ckpt_layer_path("x", 0),
        lambda: engine.backward(loss),
    ):
        try:
            ask()
        except (ValueError, AttributeError, PipelineError) as error:
            found["refused"].append(str(error))
    engine.destroy()
    return found


def test_the_surface_that_scripts_of_deepspeed_use(ranks: Ranks) -> None:
    first, last = ranks.run(2, asked_job)
    assert [found["places"] for found in (first, last)] == [(2, [0, 1, 3], 0, 1), (2, [0, 1, 3], 1, 2)]
    assert (first["grid"], last["grid"]) == ((True, 1, [0, 1], False, True), (True, 1, [0, 1], True, True))
    assert first["eval"] == (True, True)
    assert last["eval"] == (4, pytest.approx(0, abs=1e-6))
    for found in (first, last):
        assert (found["owners"], found["parallel"]) == ([0, 1, 1], (True, False, False))
        assert (found["loss"], found["planned once"], found["sizes"]) == (True, True, (3, 6, 14))
        starts = [
            "set_train_batch_size: 7 samples are no multiple of the 2", "eval_batch: with reduce_output=None",
            "eval_batch: num_micro_batches=0", "the engine has no 'log_for_device': print",
            "PipelineModule.ckpt_layer_path: dsprof's engine does not have it: engine.save_checkpoint",
            "a pipeline trains by engine.train_batch",
        ]  # fmt: skip
        assert [text[: len(begin)] for text, begin in zip(found["refused"], starts, strict=True)] == starts
