"""What a configuration is said to hold, against what the engine's tensors take."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import Ranks
from test_memory_held import COLUMNS, ROWS, trained

from dsprof.engine.config import as_far_as_known, held

LAYER = {"optimizer": {"type": "Adam"}}
SMALL = 1024
"""Bytes: flags of buckets, Adam's count of steps, an element that stands in for a parameter."""


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_is_what_the_engine_holds(stage: int, bf16: bool, ranks: Ranks) -> None:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config: dict[str, Any] = {"zero_optimization": zero, "bf16": {"enabled": bf16}}
    said = held(as_far_as_known({**LAYER, **config}), ROWS * COLUMNS, 1 / 2, deepspeed=False)
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
        said = held(known, ROWS * COLUMNS, share, deepspeed=False)
        assert measured["gradients"] == pytest.approx(said.gradients + said.buckets, abs=SMALL)
        assert measured["optimizer_states"] == pytest.approx(said.optimizer_states, abs=SMALL)
