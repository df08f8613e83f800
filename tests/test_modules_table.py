"""What each module takes, from rows of a capture at level full."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from records import Record, capture_of, derive, phase

from dsprof.analyzer.work.module_times import join_modules, module_times, sum_modules
from dsprof.schema import SHARDING, Kind
from dsprof.trace.capture import Gap
from dsprof.trace.derive import trace_rows


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
    table = module_times(sum_modules(rows, 0))
    assert table[["module", "calls", "ms", "own_ms"]].to_dict("list") == {
        "module": ["layers.1", "GPT", "layers.0"],
        "calls": [2, 1, 1],
        "ms": pytest.approx([5, 11, 3]),
        "own_ms": pytest.approx([5, 3, 3]),
    }


def test_steps_that_a_gap_has_cut_do_not_count() -> None:
    """Of step 2 the end is missing, of step 40 the beginning, and step 42 has no end yet."""
    parts = [step(0), step(1000), step(2000)[:4], step(40_000)[6:], step(41_000), step(42_000)[:6]]
    kept = [record for part in parts for record in part]
    capture = replace(capture_of(*kept), gaps=[Gap(len([*step(0), *step(1000)]) + 4, 40, 3, given_up=True)])
    rows = trace_rows(capture, 0, 0)
    assert sorted(rows.loc[rows["kind"] == "module", "step"].unique()) == [0, 1, 2, 41, 42]
    table = module_times(sum_modules(rows, 0)).set_index("module")
    assert table["calls"].to_dict() == {"layers.1": 2, "GPT": 1, "layers.0": 1}
    assert table["own_ms"].to_dict() == pytest.approx({"layers.1": 4, "GPT": 3, "layers.0": 3})


def test_the_mean_is_over_the_ranks_that_have_the_module() -> None:
    first = sum_modules(derive(*step(0), *step(1000)), 0)
    tail = [phase("forward", 1000, 1006), module("tail", 1000, 1006)]
    update = [phase("backward", 1007, 1009), phase("optimizer", 1009, 1010)]
    second = sum_modules(derive(*step(0), *tail, *update), 1)
    table = module_times(join_modules([first, second])).set_index("module")
    assert table["own_ms"].to_dict() == pytest.approx({"tail": 6, "layers.1": 4, "GPT": 3, "layers.0": 3})


def test_other_threads_nest_among_themselves() -> None:
    records = [*step(0), *step(1000), phase("forward", 1002, 1005, thread=8), module("side", 1002, 1005, thread=8)]
    table = module_times(sum_modules(derive(*records), 0)).set_index("module")
    assert table["own_ms"]["side"] == pytest.approx(3)
    assert table["own_ms"]["layers.0"] == pytest.approx(3)


def test_what_is_computed_again_and_evaluated_is_not_part_of_forward() -> None:
    again = [phase("recompute", 1013, 1016), module("layers.0", 1013, 1016)]
    evaluated = [phase("forward", 1025, 1029, flags=0), module("layers.0", 1025, 1029)]
    table = module_times(sum_modules(derive(*step(0), *step(1000), *again, *evaluated), 0)).set_index("module")
    assert table["calls"].to_dict() == {"layers.1": 2, "GPT": 1, "layers.0": 1}


def test_without_level_full_there_is_none() -> None:
    rows = derive(phase("forward", 0, 10), phase("backward", 12, 20), phase("optimizer", 22, 24))
    assert module_times(sum_modules(rows, 0)).empty


# --- backward -----------------------------------------------------------------------------------


def gradient(name: str, call: int, start: float, end: float) -> Record:
    return module(name, start, end, purpose="backward", corr=call)


def trained(at: float, first: int, *inside: Record, more: float = 0.0) -> list[Record]:
    """A model (call `first`) that calls two layers; then its backward, which takes `more`."""
    return [
        phase("forward", at, at + 10),
        module("GPT", at, at + 10, corr=first, value=6),
        module("layers.0", at + 1, at + 4, corr=first + 1, value=2),
        module("layers.1", at + 4, at + 9, corr=first + 2, value=2),
        phase("backward", at + 12, at + 30 + more),
        gradient("GPT", first, at + 12, at + 13),
        gradient("layers.1", first + 2, at + 13, at + 20),
        *inside,
        gradient("layers.0", first + 1, at + 21, at + 27 + more),
        phase("optimizer", at + 31 + more, at + 32 + more),
    ]


def table_of(*records: Record) -> dict[str, dict[str, float]]:
    table = module_times(sum_modules(derive(*records), 0)).set_index("module")
    columns = ["ms", "own_ms", "backward_ms", "backward_own_ms", "recompute_ms"]
    found: dict[str, dict[str, float]] = table[columns].round(6).to_dict("index")
    return found


def test_backward_of_a_module_is_with_what_it_called() -> None:
    found = table_of(*trained(0, 1, more=500), *trained(1000, 11), *trained(2000, 21, more=2))
    assert found == {
        "GPT": {"ms": 10, "own_ms": 2, "backward_ms": 1 + 7 + 7, "backward_own_ms": 1, "recompute_ms": 0},
        "layers.0": {"ms": 3, "own_ms": 3, "backward_ms": 7, "backward_own_ms": 7, "recompute_ms": 0},
        "layers.1": {"ms": 5, "own_ms": 5, "backward_ms": 7, "backward_own_ms": 7, "recompute_ms": 0},
    }


def test_what_is_computed_again_is_not_backward() -> None:
    """Layer 1 is computed again for 4 ms, when its first gradient wants what was not kept."""
    again = [phase("recompute", 1014, 1018), module("layers.1", 1014, 1018, corr=14, value=2)]
    found = table_of(*trained(0, 1), *trained(1000, 11, *again))
    assert found["layers.1"] == {
        "ms": 5, "own_ms": 5, "backward_ms": 3, "backward_own_ms": 3, "recompute_ms": 4,
    }  # fmt: skip
    assert found["GPT"]["backward_ms"] == 1 + 3 + 6


def test_a_backward_inside_of_backward_belongs_to_what_is_computed_again() -> None:
    """Re-entrant: the model's own node computes layer 1 again, and then its gradients, which the first call did not
    prepare."""
    again = [
        gradient("GPT", 11, 1020, 1021),
        phase("recompute", 1020.1, 1020.3),
        module("layers.2", 1020.1, 1020.3, corr=15, value=2),
        gradient("layers.2", 15, 1020.5, 1020.9),
    ]
    unprepared = [module("layers.2", 1009, 1009.5, corr=16, value=0)]
    found = table_of(*trained(0, 1), *trained(1000, 11, *again), *unprepared)
    assert found["layers.2"] == {
        "ms": 0.5, "own_ms": 0.5, "backward_ms": 0.4, "backward_own_ms": 0.4, "recompute_ms": 0.2,
    }  # fmt: skip
    assert found["GPT"]["backward_own_ms"] == pytest.approx(1 + 0.4)
    assert found["GPT"]["backward_ms"] == pytest.approx(1 + 7 + 6 + 0.8)


def test_a_module_that_calls_itself_counts_its_time_once() -> None:
    def step(at: float, first: int) -> list[Record]:
        return [
            phase("forward", at, at + 10),
            module("tree", at, at + 10, corr=first, value=4),
            module("tree", at + 2, at + 5, corr=first + 1, value=2),
            phase("backward", at + 12, at + 20),
            gradient("tree", first + 1, at + 12, at + 15),
            gradient("tree", first, at + 15, at + 17),
            phase("optimizer", at + 21, at + 22),
        ]

    assert table_of(*step(0, 1), *step(1000, 11)) == {
        "tree": {"ms": 10, "own_ms": 10, "backward_ms": 5, "backward_own_ms": 5, "recompute_ms": 0}
    }


def test_where_backward_was_not_seen_it_is_not_zero() -> None:
    """`frozen` made no part of the graph; `lost` did, and nothing computed it."""
    more = [module("lost", 1001, 1002, corr=14, value=3), module("frozen", 1002, 1003, corr=15, value=0)]
    found = table_of(*trained(0, 1), *trained(1000, 11), *more)
    assert math.isnan(found["lost"]["backward_ms"])
    assert found["frozen"]["backward_ms"] == 0


def test_the_slowest_rank_is_named() -> None:
    first, second = (
        sum_modules(derive(*trained(0, 1), *trained(1000, 11, more=more)), rank) for rank, more in ((3, 0), (5, 4))
    )
    table = module_times(join_modules([first, second])).set_index("module")
    assert table.loc["layers.0", "backward_own_ms"] == pytest.approx(8)
    assert (table.loc["layers.0", "slowest_rank"], table.loc["layers.0", "slowest_own_ms"]) == (5, pytest.approx(13))
