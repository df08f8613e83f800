"""What stages of another plan take, and where the best boundaries are."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pandas as pd
import pytest

from dsprof.analyzer.rules.base import NotJudged
from dsprof.analyzer.rules.pipeline.structure_fixes import written
from dsprof.analyzer.stage_costs import UNEVEN, best_boundaries, divided_alike, of_layers, present_boundaries, stage_ms
from dsprof.analyzer.whatif import apply
from dsprof.analyzer.whatif.lowering import Lower, Stages
from dsprof.analyzer.whatif.schedule import makespan, schedule_graph
from dsprof.analyzer.work.stage_layers import StageLayer, _of_stage
from dsprof.engine.schedule import make_plan

TAKEN = {(0, "F"): 4.0, (0, "B"): 8.0, (1, "F"): 6.0, (1, "B"): 10.0}
RAN = make_plan("1f1b", 2, 4)


def layers(*ms: float, stages: tuple[int, ...]) -> list[StageLayer]:
    return [StageLayer(f"layer{i}", stage, one, 2 * one) for i, (one, stage) in enumerate(zip(ms, stages, strict=True))]


def test_stages_as_they_were_measured() -> None:
    graph = schedule_graph(RAN, lambda action: TAKEN[action.stage, action.op], steps=3)
    assert stage_ms(graph) == TAKEN
    split = schedule_graph(make_plan("zero-bubble", 2, 4), lambda action: {"F": 4.0, "B": 3.0, "W": 2.0}[action.op])
    assert stage_ms(split) == {(0, "F"): 4.0, (0, "B"): 5.0, (1, "F"): 4.0, (1, "B"): 5.0}


def test_parts_of_stages_and_several_together() -> None:
    """Of two stages of 4 and 6 ms: parts 0 and 1 of the first, 2 and 3 of the second; rank 0 has parts 0 and 2, which
    are made of its own measured stage but the last, rank 1 parts 1 and 3."""
    even, more, less = divided_alike(RAN, make_plan("interleaved", 2, 4, 2), TAKEN)
    assert [even.factors[stage, "F"] for stage in range(4)] == [2 / 4, 2 / 6, 3 / 4, 3 / 6]
    assert [more.factors[stage, "F"] for stage in (0, 1)] == pytest.approx([(1 + UNEVEN) * 2 / 4, (1 - UNEVEN) * 2 / 6])
    assert less.factors[0, "B"] == pytest.approx((1 - UNEVEN) * 4 / 8)
    four = {(stage, op): 1.0 + stage for stage in range(4) for op in "FB"}
    (joined,) = divided_alike(make_plan("interleaved", 2, 4, 2), RAN, four)
    assert joined.factors[0, "F"] == (1 + 2) / 1  # of stage 0
    assert joined.factors[1, "F"] == (3 + 4) / 4  # of the last stage
    assert divided_alike(RAN, make_plan("gpipe", 2, 9), TAKEN) == (Stages(),)
    with pytest.raises(NotJudged, match="6 stages can be told from the 4 that ran only with what each layer takes"):
        divided_alike(make_plan("interleaved", 2, 4, 2), make_plan("interleaved", 2, 4, 3), four)


def test_what_a_stage_takes_beside_its_layers_stays_with_it() -> None:
    """The last stage's loss is 1 ms of its forward, 0 of its backward."""
    found = layers(1.0, 3.0, 2.0, 3.0, stages=(0, 0, 1, 1))
    assert present_boundaries(found) == (0, 2, 4)
    same = of_layers(RAN, RAN, TAKEN, found, (0, 2, 4))
    assert same.factors == {(0, "F"): 1.0, (0, "B"): 1.0, (1, "F"): 1.0, (1, "B"): 1.0}
    moved = of_layers(RAN, RAN, TAKEN, found, (0, 3, 4))
    assert moved.factors == {(0, "F"): 6 / 4, (0, "B"): 12 / 8, (1, "F"): (3 + 1) / 6, (1, "B"): 6 / 10}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
def test_no_boundaries_are_better_in_a_replay(schedule: str) -> None:
    """Of a chain whose lightest heaviest part is no shorter step than another division."""
    chain = layers(5.0, 1.0, 1.0, 4.0, 1.0, 3.0, 2.0, stages=(0, 0, 1, 1, 2, 2, 2))
    ran, plan = make_plan("1f1b", 3, 5), make_plan(schedule, 3, 5)
    taken = {(s, op): sum(one.forward_ms if op == "F" else one.backward_ms for one in chain if one.stage == s)
             for s in range(3) for op in "FB"}  # fmt: skip
    graph = schedule_graph(ran, lambda action: taken[action.stage, action.op])

    def step_ms(bounds: tuple[int, ...]) -> float:
        return float(makespan(apply(graph, [Lower(plan, of_layers(ran, plan, taken, chain, bounds))]))[0])

    every = [(0, *inner, 7) for inner in combinations(range(1, 7), 2)]
    found = best_boundaries(chain, 3, step_ms)
    assert all(low < high for low, high in pairwise(found))
    assert step_ms(found) == min(map(step_ms, every))


def test_more_stages_than_layers() -> None:
    with pytest.raises(NotJudged, match="3 stages for 2 layers; each needs one"):
        best_boundaries(layers(1.0, 1.0, stages=(0, 0)), 3, lambda bounds: 0.0)


def test_a_fix_writes_all_of_another_schedule() -> None:
    """Of a run with two parts on each rank a schedule of one part says so: the engine refuses the two beside it."""
    one, two = make_plan("1f1b", 2, 4), make_plan("interleaved", 2, 4, 2)
    assert written(one, make_plan("zero-bubble", 2, 4), None) == {"schedule": "zero-bubble"}
    assert written(two, make_plan("zero-bubble", 2, 4), (0, 3, 8)) == {
        "schedule": "zero-bubble", "virtual_stages": 1, "partition_method": [0, 3, 8],
    }  # fmt: skip
    assert written(one, two, (0, 1, 3, 5, 8)) == {
        "schedule": "interleaved", "virtual_stages": 2, "partition_method": [0, 1, 3, 5, 8],
    }  # fmt: skip


def test_layers_of_a_stage_whose_modules_were_timed() -> None:
    """As torch's pipelines are at level full: the outermost module is the stage, those below it are its layers, and
    what is below these is not; 2 and 4 ms of a forward of 7, of whose backward of 14 they have as much."""
    call = [("module", "Sequential", 1, 7), ("module", "0", 1, 2), ("module", "0.linear", 1, 1), ("module", "1", 4, 4)]
    acted = [("pipe", "F", 1, 7), ("pipe", "B", 10, 14)]
    rows = pd.DataFrame(
        [
            {"step": 5, "kind": kind, "name": name, "lane": "main", "stage": 1 if kind == "pipe" else None,
             "start_ns": (100 * time + at) * 1_000_000, "dur_ns": ms * 1_000_000}
            for time in range(3) for kind, name, at, ms in [*acted, *call]
        ]
    )  # fmt: skip
    found = _of_stage(rows, 1, np.array([5]))
    assert [(one.name, one.stage, one.forward_ms, one.backward_ms) for one in found] == [
        ("0", 1, 2.0, pytest.approx(4.0)), ("1", 1, 4.0, pytest.approx(8.0)),
    ]  # fmt: skip
    assert _of_stage(rows[rows["kind"] == "pipe"], 1, np.array([5])) == []
    assert _of_stage(rows, 0, np.array([5])) == []
