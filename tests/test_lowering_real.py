"""Lowering the plan that ran, on real pipelines of layers that sleep: the steps as they were measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from jobs import Finished, profile

from dsprof.analyzer.graph.replay import replay
from dsprof.analyzer.graph.step_graph import StepGraph
from dsprof.analyzer.study import study
from dsprof.analyzer.whatif import apply
from dsprof.analyzer.whatif.lowering import Lower, measured_plan
from dsprof.trace import load

JOB = Path(__file__).parents[1] / "benchmarks" / "structure_job.py"
LAYERS = ("--layer-ms", "4", "6", "4", "4", "8", "4", "4", "4")


def graph_of_run(finished: Finished) -> StepGraph:
    assert finished.status == 0, finished.stderr
    graph = study(load(finished.folder)).graph
    assert graph is not None
    return graph


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (2, "--stages 2 --micro-batches 4"),
        pytest.param(2, "--framework torch --stages 2 --chunks 2 --micro-batches 4", marks=pytest.mark.slow),
        pytest.param(4, "--stages 4 --schedule zero-bubble --micro-batches 6", marks=pytest.mark.slow),
        pytest.param(2, "--stages 2 --schedule interleaved --chunks 2 --micro-batches 4", marks=pytest.mark.slow),
        pytest.param(3, "--stages 3 --schedule gpipe --micro-batches 5", marks=pytest.mark.slow),
        pytest.param(4, "--stages 2 --zero-stage 1 --micro-batches 4", marks=pytest.mark.slow),
        pytest.param(4, "--stages 2 --zero-stage 2 --micro-batches 4", marks=pytest.mark.slow),
        pytest.param(4, "--framework torch --stages 4 --micro-batches 6", marks=pytest.mark.slow),
        pytest.param(3, "--framework torch --stages 3 --schedule gpipe --micro-batches 5", marks=pytest.mark.slow),
        pytest.param(4, "--framework torch --stages 2 --micro-batches 4", marks=pytest.mark.slow),
        pytest.param(4, "--framework torch --stages 2 --chunks 2 --micro-batches 4", marks=pytest.mark.slow),
        pytest.param(2, "--framework torch --stages 2 --micro-batches 3", marks=pytest.mark.slow),
    ],
)
def test_the_plan_that_ran_takes_what_was_measured(tmp_path: Path, ranks: int, arguments: str) -> None:
    """Within 1 % of the mean step."""
    graph = graph_of_run(profile(tmp_path, JOB, *arguments.split(), *LAYERS, ranks=ranks, flags=("--no-report",)))
    plans = [measured_plan(steps.structure).plan for steps in graph.templates]
    assert {plan.microbatches for plan in plans} == {int(arguments.split()[-1])}
    lowered = replay(apply(graph, [Lower()])).durations
    assert float(np.mean(lowered)) == pytest.approx(float(graph.measured.mean()), rel=0.01)
