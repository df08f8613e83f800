"""Jobs of which a rank has no trace: what is common to all ranks is told to save as much as where all have one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from graphs import graph_of, steps_of

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from made_up_run import Plant, Timeline, make_run

from dsprof import trace
from dsprof.analyzer import analyze
from dsprof.analyzer.graph.replay import replay
from dsprof.analyzer.graph.step_graph import Task
from dsprof.analyzer.whatif import apply
from dsprof.analyzer.whatif.uncaptured import waits_for_uncaptured
from dsprof.analyzer.whatif.work import Change, LessWork
from dsprof.run import RunFolder

RANKS, STEPS, ROWS, SEED = 32, 14, 50, 5


def lengths() -> tuple[Plant, Plant]:
    elements = 512.0 * np.random.default_rng(SEED).integers(2, 16, (RANKS, STEPS))
    equal = np.broadcast_to(elements.mean(axis=0), elements.shape)
    planted, mended = (Plant(work=each / elements.mean(), elements=each) for each in (elements, equal))
    return planted, mended


def slow_loader() -> tuple[Plant, Plant]:
    healthy = Plant(work=np.ones((RANKS, STEPS)))
    return Plant(work=healthy.work, data_ms=np.full((1, 1), 60.0)), healthy


@pytest.mark.parametrize("missing", [(), (3, 21)], ids=["whole", "two without a trace"])
@pytest.mark.parametrize(
    ("plants", "code"), [(lengths, "data.imbalance"), (slow_loader, "data.stall")], ids=["lengths", "loader"]
)
def test_the_gain_is_the_true_one(tmp_path: Path, plants: object, code: str, missing: tuple[int, ...]) -> None:
    assert callable(plants)
    planted, mended = plants()
    make_run(tmp_path / "run", RANKS, STEPS, ROWS, SEED, planted, missing)
    analysis = analyze(trace.load(RunFolder(tmp_path / "run")))
    steps = np.sort(analysis.steps["step"][analysis.steps["ordinary"]].unique())
    now, then = (Timeline(RANKS, STEPS, ROWS, SEED, plant).lasted_ms()[steps].mean() for plant in (planted, mended))
    assert analysis.findings[0].code == code
    assert analysis.findings[0].gain.ms == pytest.approx(now - then, rel=0.05)


def test_only_what_is_longer_than_usual_of_whole_groups_has_waited() -> None:
    """Of four groups of two ranks each, the last two lack a rank; the transfers of one of these took 8 ms more."""
    transfers = [2.0, 2.2, 2.1, 10.0]
    tasks = [Task(group, "all_reduce tensor-parallel") for group in ("a", "b", "c", "d")]
    programs = [f"5 I{c} 0 W{c} 1" for c in range(4)]
    graph = graph_of(steps_of(programs, transfers, tasks))
    (waits,) = waits_for_uncaptured(graph, lambda group: group in ("a", "b"))
    assert waits[:, 0] == pytest.approx([0, 0, 0, 7.9])
    (of_none,) = waits_for_uncaptured(graph, lambda group: False)
    assert not of_none.any()

    less = LessWork("data.imbalance", Change({"compute": np.full((4, 1), 1.0)}, waits=(waits,)), [np.ones(4, bool)])
    took = replay(apply(graph, [less]))
    assert (took.end - took.start)[:, 0] == pytest.approx([7.0, 7.2, 7.1, 7.1])
