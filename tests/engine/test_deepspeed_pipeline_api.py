"""Pipelines under DeepSpeed's names: what its users pass, and what they ask of an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_models import configuration, start
from ranks import Ranks
from torch import Tensor, nn

from dsprof.engine.pipe import PipeDataParallelTopology, PipelineError, PipelineModule

mse = nn.functional.mse_loss


def data(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(2, 4, generator=generator), torch.randn(2, 4, generator=generator)) for _ in range(count)]


def deepspeed_job(rank: int) -> list[Any]:
    stretches: list[str] = []

    def called(stretch: Any, inputs: Any) -> Any:
        stretches.append(stretch.__qualname__)
        return stretch(inputs)

    layers = [nn.Linear(4, 4) for _ in range(4)]
    module = PipelineModule(
        layers, 2, loss_fn=mse, activation_checkpoint_interval=1, activation_checkpoint_func=called, dynamic_shape=False
    )
    engine = start(module, configuration())
    engine.set_batch_fn(lambda batch: (batch["x"], batch["y"]))
    engine.train_batch(iter([{"x": x, "y": y} for x, y in data()]))
    engine.destroy()
    return sorted(set(stretches))


def test_arguments_of_deepspeeds_pipeline_module_take_effect(ranks: Ranks) -> None:
    assert ranks.run(2, deepspeed_job) == [["layers 0 to 0", "layers 1 to 1"], ["layers 2 to 2", "layers 3 to 3"]]


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


def test_methods_of_deepspeeds_pipeline_engine_answer(ranks: Ranks) -> None:
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
