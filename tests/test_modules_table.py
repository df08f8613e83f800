"""What each module takes, from rows of a capture at level full."""

from __future__ import annotations

from typing import Any

import pytest
from records import Record, derive, phase

from dsprof.analyzer.modules import module_times, sum_modules
from dsprof.schema import SHARDING, Kind


def module(name: str, start: float, end: float, **more: Any) -> Record:
    return (Kind.MODULE, name, start, end, more)


def step(at: float, slower: float = 0.0) -> list[Record]:
    """Two layers in a model, the second called twice; and FSDP2's own work inside."""
    return [
        phase("forward", at, at + 10 + slower),
        module("GPT", at, at + 10 + slower),
        module("layers.0", at + 1, at + 4),
        module("layers.1", at + 4, at + 6 + slower),
        module(SHARDING, at + 4, at + 5),
        module("layers.1", at + 7 + slower, at + 9 + slower),
        phase("backward", at + 12 + slower, at + 20 + slower),
        phase("optimizer", at + 22 + slower, at + 24 + slower),
    ]


def test_own_time_is_without_the_modules_inside() -> None:
    """The first step, which warms up, does not count."""
    rows = derive(*step(0, slower=500), *step(1000), *step(2000, slower=2))
    table = module_times([sum_modules(rows)])
    assert table.to_dict("list") == {
        "module": ["layers.1", "GPT", "layers.0"],
        "calls": [2, 1, 1],
        "ms": pytest.approx([5, 11, 3]),
        "own_ms": pytest.approx([5, 3, 3]),
    }


def test_the_mean_is_over_the_ranks_that_have_the_module() -> None:
    first = sum_modules(derive(*step(0), *step(1000)))
    tail = [phase("forward", 1000, 1006), module("tail", 1000, 1006)]
    update = [phase("backward", 1007, 1009), phase("optimizer", 1009, 1010)]
    second = sum_modules(derive(*step(0), *tail, *update))
    table = module_times([first, second]).set_index("module")
    assert table["own_ms"].to_dict() == pytest.approx({"tail": 6, "layers.1": 4, "GPT": 3, "layers.0": 3})


def test_other_threads_nest_among_themselves() -> None:
    records = [*step(0), *step(1000), phase("forward", 1002, 1005, thread=8), module("side", 1002, 1005, thread=8)]
    table = module_times([sum_modules(derive(*records))]).set_index("module")
    assert table["own_ms"]["side"] == pytest.approx(3)
    assert table["own_ms"]["layers.0"] == pytest.approx(3)


def test_what_is_computed_again_and_evaluated_is_not_part_of_forward() -> None:
    again = [phase("recompute", 1013, 1016), module("layers.0", 1013, 1016)]
    evaluated = [phase("forward", 1025, 1029, flags=0), module("layers.0", 1025, 1029)]
    table = module_times([sum_modules(derive(*step(0), *step(1000), *again, *evaluated))]).set_index("module")
    assert table["calls"].to_dict() == {"layers.1": 2, "GPT": 1, "layers.0": 1}


def test_without_level_full_there_is_none() -> None:
    rows = derive(phase("forward", 0, 10), phase("backward", 12, 20), phase("optimizer", 22, 24))
    assert module_times([sum_modules(rows)]).empty
