"""Keys of `pipeline` and `tensor_parallel`: two values of each, and what runs then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from alive import alive
from pipelines import MICROBATCHES, batches, configuration, examples, layers, loss_of, start
from ranks import Ranks
from recording import recorded

from dsprof.engine.pipe import PipelineModule
from dsprof.engine.pipe.measure import measure


def pipeline_job(rank: int, keys: dict[str, Any]) -> tuple[list[int], list[tuple[str, int, int]], int]:
    """The bounds of the stages, what this rank did in a step, and how often it recomputed."""
    engine = start(PipelineModule(layers(), loss_fn=loss_of), configuration(pipeline=keys))
    with recorded() as spans:
        engine.train_batch(iter(examples(batches(1)[0][:, 0])))
    bounds = engine.module.bounds
    engine.destroy()
    actions = [(span.name, span.stage, span.microbatch) for span in spans if span.kind == "pipe"]
    return bounds, actions, sum(span.name == "recompute" for span in spans)


def first_rank(ranks: Ranks, **keys: Any) -> tuple[list[int], list[tuple[str, int, int]], int]:
    found = ranks.run(2, pipeline_job, {"stages": 2, **keys})[0]
    assert isinstance(found, tuple)
    return found


@alive("pipeline.stages")
def test_stages(ranks: Ranks) -> None:
    (whole,) = ranks.run(1, pipeline_job, {"stages": 1})
    assert whole[0] == [0, len(layers())]
    assert len(first_rank(ranks)[0]) == 3


@alive("pipeline.schedule")
def test_schedule(ranks: Ranks) -> None:
    assert [op for op, _, _ in first_rank(ranks, schedule="gpipe")[1]] == ["F"] * MICROBATCHES + ["B"] * MICROBATCHES
    assert [op for op, _, _ in first_rank(ranks, schedule="1f1b")[1]] == ["F", "F", "B", "F", "B", "F", "B", "B"]
    assert sum(op == "W" for op, _, _ in first_rank(ranks, schedule="zero-bubble")[1]) == MICROBATCHES


@alive("pipeline.virtual_stages")
def test_virtual_stages(ranks: Ranks) -> None:
    for virtual, stages in ((1, {0}), (2, {0, 2})):
        found = first_rank(ranks, schedule="interleaved", virtual_stages=virtual)
        assert {stage for _, stage, _ in found[1]} == stages


@alive("pipeline.partition_method")
def test_partition_method(ranks: Ranks) -> None:
    count = len(layers())
    assert first_rank(ranks, partition_method="uniform")[0] == [0, 6, count]
    assert first_rank(ranks, partition_method=[0, 2, count])[0] == [0, 2, count]
    assert first_rank(ranks, partition_method="type:embedding")[0][1] > 6


@alive("pipeline.layer_costs")
def test_layer_costs(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    for heavy, bound in ((0, 1), (len(layers()) - 1, len(layers()) - 1)):
        file.write_text(json.dumps([100.0 if at == heavy else 0.001 for at in range(len(layers()))]))
        found = first_rank(ranks, partition_method="measured", layer_costs=str(file))
        assert found[0][1] == bound


def test_measured_costs_are_such_a_file(tmp_path: Path) -> None:
    whole = PipelineModule(layers(), loss_fn=loss_of)
    inputs, _ = examples(batches(1)[0][:, 0])[0]
    found = measure(whole, inputs, tmp_path / "costs.json", repeats=1)
    assert [layer["name"] for layer in found["layers"]] == [str(number) for number in range(len(layers()))]
    assert all(layer["forward_s"] > 0 for layer in found["layers"])
    assert all(layer["backward_s"] > 0 for layer in found["layers"][:-2])
    assert json.loads((tmp_path / "costs.json").read_text()) == found
    whole.arrange(2, 0, None, "measured", tmp_path / "costs.json")
    assert all(param.grad is None for param in whole.parameters())


@alive("pipeline.activation_checkpoint_interval")
def test_activation_checkpoint_interval(ranks: Ranks) -> None:
    assert first_rank(ranks, partition_method="uniform")[2] == 0
    assert first_rank(ranks, partition_method="uniform", activation_checkpoint_interval=2)[2] == 3 * MICROBATCHES
