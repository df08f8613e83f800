"""What-ifs on graphs written by hand, and pipelines against what is published of their schedules."""

from __future__ import annotations

import closed_form
import numpy as np
import pytest
from graphs import graph_of, steps_of

from dsprof.analyzer.graph.replay import replay
from dsprof.analyzer.graph.step_graph import Task
from dsprof.analyzer.whatif.communications import issued_earlier, transfers_scaled, with_task, without
from dsprof.analyzer.whatif.edit import edit
from dsprof.analyzer.whatif.schedule import makespan, schedule_graph
from dsprof.analyzer.whatif.work import scale
from dsprof.engine import schedule

GATHER = Task("0", "all_gather parameter", workers=1)
REDUCE = Task("0", "all_reduce gradient", gradient=True, workers=1)


def is_gather(task: Task) -> bool:
    return task.kind == "all_gather parameter"


def gathers() -> list[str]:
    """Three layers of 5 ms, whose parameters are gathered when they are needed."""
    return ["I0 W0 5 I1 W1 5 I2 W2 5"] * 2


def test_a_faster_link() -> None:
    graph = graph_of(steps_of(gathers(), [4.0] * 3, [GATHER] * 3))
    assert replay(graph).durations.tolist() == [27.0]
    assert replay(edit(graph, lambda steps: transfers_scaled(steps, is_gather, 0.5))).durations.tolist() == [21.0]


def test_gathers_that_are_not_needed() -> None:
    graph = graph_of(steps_of(gathers(), [4.0] * 3, [GATHER, REDUCE, GATHER]))
    assert replay(edit(graph, lambda steps: without(steps, is_gather))).durations.tolist() == [19.0]


def test_gathers_that_are_prefetched_by_one_layer() -> None:
    """The second is issued where the first was: it waits for the link until 4, and is there at 8, in time for 9."""
    graph = graph_of(steps_of(gathers(), [4.0] * 3, [GATHER] * 3))
    ahead = edit(graph, lambda steps: issued_earlier(steps, is_gather, 1))
    assert replay(ahead).durations.tolist() == [19.0]


def test_what_ifs_compose() -> None:
    graph = graph_of(steps_of(gathers(), [4.0] * 3, [GATHER] * 3))
    ahead = edit(graph, lambda steps: issued_earlier(steps, is_gather, 1))
    both = edit(ahead, lambda steps: transfers_scaled(steps, is_gather, 2.0))
    # 8 for the first; the second is there at 16 > 13; the third, issued at 8, at 24 > 21.
    assert replay(both).durations.tolist() == [29.0]
    assert replay(scale({"compute": 2.0})(both)).durations.tolist() == [38.0]


def test_a_norm_that_is_reduced_too() -> None:
    """All gather 4 + 5 ms a layer; then 3 ms more before the last layer's work."""
    steps = steps_of(gathers(), [4.0] * 3, [GATHER] * 3)
    last = steps.structure.plan.last
    norm = Task("1", "all_reduce norm", workers=1)
    added = with_task(steps, norm, np.array([3.0]), issued_after=last - 1, waited_before=last)
    assert replay(graph_of(added.steps)).durations.tolist() == [27.0]  # beside the gather, which takes longer
    slow = with_task(steps, norm, np.array([6.0]), issued_after=last - 1, waited_before=last)
    assert replay(graph_of(slow.steps)).durations.tolist() == [29.0]


# --- schedules ----------------------------------------------------------------------------------


def cost(forward: float, backward: float, weight: float, splits: bool) -> dict[str, float]:
    return {"F": forward, "B": backward if splits else backward + weight, "W": weight}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 4), (4, 8), (8, 16), (3, 12)])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (2.0, 3.0, 1.5), (0.7, 1.1, 0.7)])
def test_pipelines_take_what_the_papers_say(
    name: str, ranks: int, microbatches: int, times: tuple[float, float, float]
) -> None:
    forward, backward, weight = times
    virtual = 2 if name == "interleaved" and microbatches % ranks == 0 else 1
    plan = schedule.make_plan(name, ranks, microbatches, virtual)
    of = cost(*times, plan.splits)
    graph = schedule_graph(plan, lambda action: np.array([1.0, 2.0]) * of[action.op], steps=2)
    idle = closed_form.bubble_time(name, ranks, microbatches, forward, backward, weight, virtual)
    step = idle + virtual * microbatches * (forward + backward + weight)
    assert makespan(graph) == pytest.approx([step, 2 * step], rel=1e-9)
    assert makespan(graph)[0] == pytest.approx(schedule.simulate(plan, lambda action: of[action.op]).makespan, rel=1e-9)


def test_gpipe_with_stages_that_differ() -> None:
    forward, backward = [1.0, 2.5, 1.2], [2.0, 4.0, 3.0]
    plan = schedule.make_plan("gpipe", 3, 6)
    taken = {"F": forward, "B": backward}
    graph = schedule_graph(plan, lambda action: taken[action.op][action.stage])
    assert makespan(graph)[0] == pytest.approx(closed_form.gpipe_makespan(forward, backward, 6), rel=1e-9)


def test_transfers_of_a_pipeline_hold_nobody_up() -> None:
    """Two stages, one micro-batch: F, lag, F, B, lag, B."""
    graph = schedule_graph(schedule.make_plan("1f1b", 2, 1), lambda action: 3.0, lag=0.5)
    assert makespan(graph).tolist() == [13.0]
