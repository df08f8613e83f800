"""What a configuration is said to hold, against what the engine's tensors take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks
from test_memory_held import COLUMNS, ROWS, trained
from torch import nn

from dsprof import engine as ds
from dsprof.engine.config import as_far_as_known, held
from dsprof.engine.hooks import Span, subscribe

LAYER = {"optimizer": {"type": "Adam"}}
SMALL = 1024
"""Bytes: flags of buckets, Adam's count of steps, an element that stands in for a parameter."""


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_is_what_the_engine_holds(stage: int, bf16: bool, ranks: Ranks) -> None:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config: dict[str, Any] = {"zero_optimization": zero, "bf16": {"enabled": bf16}}
    said = held(as_far_as_known({**LAYER, **config}), ROWS * COLUMNS, 1 / 2, 2, deepspeed=False)
    for measured in ranks.run(2, trained, config):
        assert measured["parameters"] == pytest.approx(said.parameters + said.gathered, abs=SMALL)
        assert measured["gradients"] == pytest.approx(said.gradients + said.buckets, abs=SMALL)
        assert measured["optimizer_states"] == pytest.approx(said.optimizer_states, abs=SMALL)


@pytest.mark.parametrize("stage", [1, 3])
def test_it_is_what_ranks_of_unequal_memory_hold(stage: int, ranks: Ranks) -> None:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config: dict[str, Any] = {"zero_optimization": zero, "heterogeneous": {"memory": [1, 3]}}
    known = as_far_as_known({**LAYER, **config})
    for rank, measured in enumerate(ranks.run(2, trained, config)):
        share = known.held_share(rank, 2)
        assert share == (0.25, 0.75)[rank]
        said = held(known, ROWS * COLUMNS, share, 2, deepspeed=False)
        assert measured["gradients"] == pytest.approx(said.gradients + said.buckets, abs=SMALL)
        assert measured["optimizer_states"] == pytest.approx(said.optimizer_states, abs=SMALL)


LAYERS, WIDTH = 8, 100
EACH = WIDTH * WIDTH


def most_live(rank: int, zero: dict[str, int]) -> int:
    """The most elements that are whole at once in the third step of eight layers in stage 3."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
    }
    engine = ds.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    live: list[float] = []

    class Releases:
        def begin(self, span: Span) -> None: ...

        def end(self, span: Span) -> None:
            if span.name == "release" and span.value is not None:
                live.append(span.value + EACH)  # before it was released

    for step in range(3):
        stop = subscribe(Releases()) if step == 2 else None
        engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
        engine.step()
    assert stop is not None
    stop()
    engine.destroy()
    return int(max(live))


@pytest.mark.parametrize(
    "zero",
    [
        {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0},
        {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 2 * EACH},
        {"stage3_max_reuse_distance": 6 * EACH, "stage3_prefetch_bucket_size": 2 * EACH},
        {"stage3_max_reuse_distance": 10**9, "stage3_prefetch_bucket_size": 0},
        {"stage3_max_reuse_distance": 10**9, "stage3_max_live_parameters": 4 * EACH},
    ],
)
def test_what_is_whole_at_once_is_what_stays_for_its_backward(zero: dict[str, int], ranks: Ranks) -> None:
    """To a module: it is computing, and its neighbours have not gone."""
    known = as_far_as_known({"zero_optimization": {"stage": 3, **zero}})
    said = held(known, LAYERS * EACH, 1 / 2, 2, deepspeed=False, largest=EACH).whole / 4
    for measured in ranks.run(2, most_live, zero):
        assert measured == pytest.approx(said, abs=EACH)


def test_a_single_rank_has_no_buffers_and_one_with_all_memory_has() -> None:
    """Two ranks, of which the first has all that is sharded: what they send each other still arrives somewhere."""
    known = as_far_as_known({"zero_optimization": {"stage": 3, "reduce_bucket_size": 100, "overlap_comm": False}})
    alone = held(known, 1000, 1.0, 1, deepspeed=False, on_host=True)
    assert (alone.buckets, alone.gathered, alone.whole, alone.scratch) == (0, 0, 0, 0)
    first, second = (held(known, 1000, share, 2, deepspeed=False, on_host=True) for share in (1.0, 0.0))
    assert (first.buckets, second.buckets) == (400, 400)
    assert (first.scratch, second.scratch) == (800, 0)  # two rows as large as the bucket
    assert first.whole == second.whole == 4000


def test_micro_batches_that_follow_from_the_batch_are_added_up() -> None:
    sizes = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}
    known = as_far_as_known({**sizes, "bf16": {"enabled": True}})
    assert held(known, 1000, 1 / 2, 2, deepspeed=False).sums == 4000  # three micro-batches
    assert held(known, 1000, 1 / 6, 6, deepspeed=False).sums == 0
    short = {**sizes, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    assert held(as_far_as_known(short), 1000, 1 / 2, 2, deepspeed=False).sums == 2000


def test_sums_in_half_precision_are_as_wide_as_that(ranks: Ranks) -> None:
    zero = {"stage": 2}
    config: dict[str, Any] = {
        "zero_optimization": zero, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"},
    }  # fmt: skip
    said = held(as_far_as_known({**LAYER, **config}), ROWS * COLUMNS, 1 / 2, 2, deepspeed=False)
    assert said.gradients == ROWS * COLUMNS
    for measured in ranks.run(2, trained, config):
        assert measured["gradients"] == pytest.approx(said.gradients + said.buckets, abs=SMALL)


def test_what_is_not_trained_is_sharded_in_stage_3_too() -> None:
    config = {"bf16": {"enabled": True}}
    two, three = (
        held(as_far_as_known({**config, "zero_optimization": {"stage": stage}}), 10, 1 / 2, 2, deepspeed=False,
             frozen=1000)
        for stage in (2, 3)
    )  # fmt: skip
    assert (two.parameters, three.parameters) == (2020, 1010)
    assert (two.whole, three.whole) == (0, 2020)
    assert two.optimizer_states == three.optimizer_states == 60


def sizes_of(rank: int) -> list[tuple[int, bool]]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 3, bias=False))
    model[0].weight.requires_grad_(False)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}}
    engine = ds.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    found = list(engine.zero.sizes())
    engine.destroy()
    return found


def test_parameters_that_are_frozen_are_told_apart(ranks: Ranks) -> None:
    assert ranks.run(2, sizes_of) == [[(EACH, False), (3 * WIDTH, True)]] * 2


def test_small_parameters_of_stage_3_are_whole_all_the_time() -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 100, "stage3_prefetch_bucket_size": 0}
    known = as_far_as_known({"zero_optimization": {**zero, "overlap_comm": False}})
    sizes = [1000, 60, 40, 900]
    said = held(known, 2000, 1 / 2, 2, deepspeed=False, largest=1000, sizes=sizes)
    assert said.parameters == 4 * (100 + 1900 / 2)
    assert said.gathered == 4 * 100  # what they are gathered into after a step
    assert said.whole == 4 * 1900
    of_adapters = held(known, 100, 1 / 2, 2, deepspeed=False, largest=60, frozen=9000, sizes=[60, 40])
    assert of_adapters.parameters == 4 * (100 + 9000 / 2)  # however large the frozen parameters are, they are sharded
    with_parts = held(known, 2000, 1 / 2, 2, sizes=sizes)  # DeepSpeed keeps each rank's part beside them
    assert with_parts.parameters == 4 * (100 + 100 / 2 + 1900 / 2)


def test_a_model_of_small_parameters_is_gathered_after_a_step_and_never_for_its_modules() -> None:
    known = as_far_as_known({"zero_optimization": {"stage": 3, "allgather_bucket_size": 100, "overlap_comm": False}})
    said = held(known, 180, 1 / 2, 2, deepspeed=False, largest=60, sizes=[60, 40, 60, 20])
    assert (said.parameters, said.gathered, said.whole) == (4 * 180, 4 * 100, 0)


def test_no_more_stays_whole_than_a_model_may_have() -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 100, "stage3_model_persistence_threshold": 70}
    known = as_far_as_known({"zero_optimization": zero})
    said = held(known, 200, 1 / 2, 2, deepspeed=False, largest=100, sizes=[60, 40, 100])
    assert said.parameters == 4 * (60 + 140 / 2)
