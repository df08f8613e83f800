"""Keys of `pipeline` and `tensor_parallel`: two values of each, and what runs then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from config_coverage import alive
from pipeline_models import (
    MICROBATCHES,
    VOCABULARY,
    WIDTH,
    Block,
    batches,
    configuration,
    examples,
    layers,
    loss_of,
    start,
)
from ranks import RankFailed, Ranks
from spans import recorded
from torch import Tensor, nn

from dsprof.engine.pipe import PipelineModule
from dsprof.engine.pipe.layer_costs import measure


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
def test_stages_divide_the_layers(ranks: Ranks) -> None:
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
    whole.partition_method, whole.costs = "measured", tmp_path / "costs.json"
    whole.arrange(2, 0)
    assert all(param.grad is None for param in whole.parameters())


@alive("pipeline.activation_checkpoint_interval")
def test_activation_checkpoint_interval(ranks: Ranks) -> None:
    assert first_rank(ranks, partition_method="uniform")[2] == 0
    assert first_rank(ranks, partition_method="uniform", activation_checkpoint_interval=2)[2] == 3 * MICROBATCHES


# --- tensor parallelism


def cut_job(rank: int, keys: dict[str, Any]) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Shapes of this rank's parameters, and the collectives that tensor parallelism ran in a step."""
    engine = start(PipelineModule(layers(), 1, loss_fn=loss_of, seed_layers=True), configuration(tensor_parallel=keys))
    with recorded() as spans:
        engine.train_batch(iter(examples(batches(1)[0][:, 0])))
    shapes = {param.name: tuple(param.shape) for param in engine.zero.params}
    engine.destroy()
    return shapes, {span.name for span in spans if span.purpose == "tensor-parallel" and span.module is not None}


def cut(ranks: Ranks, **keys: Any) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    found = ranks.run(2, cut_job, keys)[0]
    assert isinstance(found, tuple)
    return found


@alive("tensor_parallel.autotp_size")
def test_autotp_size(ranks: Ranks) -> None:
    for size, rows in ((1, 2 * WIDTH), (2, WIDTH)):
        shapes, collectives = cut(ranks, autotp_size=size)
        assert shapes["1.up.weight"] == (rows, WIDTH)
        assert shapes["tied_modules.embedding.weight"] == (VOCABULARY // size, WIDTH)
        assert collectives == ({"all_reduce", "all_gather"} if size == 2 else set())


class Blocks(nn.Module):
    """An ordinary model: an embedding, and a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, attention=True) for _ in range(2)))

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.blocks(self.embedding(ids))
        return y


def sequence_job(rank: int, sequence_parallel: bool) -> set[str]:
    keys = {"autotp_size": 2, "sequence_parallel": sequence_parallel}
    engine = start(Blocks(), configuration(tensor_parallel=keys, gradient_accumulation_steps=1))
    with recorded() as spans:
        engine.backward(engine(batches(1)[0, 0, 0, :, :4]).square().mean())
    engine.destroy()
    within = [span for span in spans if span.kind == "comm" and (span.module or "").startswith("blocks.")]
    return {span.name for span in within if span.purpose == "tensor-parallel"}


@alive("tensor_parallel.sequence_parallel")
def test_sequence_parallel(ranks: Ranks) -> None:
    assert ranks.run(2, sequence_job, False)[0] == {"all_reduce"}
    assert ranks.run(2, sequence_job, True)[0] == {"all_gather", "reduce_scatter"}


@alive("tensor_parallel.plan")
def test_plan(ranks: Ranks) -> None:
    shapes, _ = cut(ranks, autotp_size=2, plan={"*.up": "column", "*.down": "row"})
    assert shapes["1.up.weight"] == (WIDTH, WIDTH)
    assert shapes["1.attention.query.weight"] == (WIDTH, WIDTH)  # what the plan does not name stays whole


def stages_job(rank: int, plan: dict[str, str]) -> dict[str, tuple[int, ...]]:
    keys = {"autotp_size": 2, "plan": plan}
    engine = start(PipelineModule(layers(), 2, loss_fn=loss_of), configuration(tensor_parallel=keys))
    shapes = {param.name: tuple(param.shape) for param in engine.zero.params}
    engine.destroy()
    return shapes


def test_a_plan_names_layers_on_any_stage(ranks: Ranks) -> None:
    first, _, last, _ = ranks.run(4, stages_job, {"2.up": "column", "2.down": "row"})
    assert first["2.up.weight"] == (WIDTH, WIDTH)
    assert last["6.up.weight"] == (2 * WIDTH, WIDTH)
    with pytest.raises(RankFailed) as refused:
        ranks.run(4, stages_job, {"2.upp": "column"})
    assert str(refused.value).count("no stage has a module '2.upp'; did you mean '2.up'?") == 4


def other_data_job(rank: int, differs: bool) -> str:
    engine = start(PipelineModule(layers(), 1, loss_fn=loss_of), configuration(tensor_parallel={"autotp_size": 2}))
    data = examples(batches(1)[0][:, 0] + rank * differs)
    try:
        engine.train_batch(iter(data))
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_that_share_layers_must_get_the_same_data(ranks: Ranks) -> None:
    assert ranks.run(2, other_data_job, False) == ["", ""]
    for said in ranks.run(2, other_data_job, True):
        assert "differs in its values from that of the others in its tensor-parallel group of 2" in said
