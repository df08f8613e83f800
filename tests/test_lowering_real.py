"""Real pipelines of layers that sleep: the plan that ran, lowered, takes what was measured; what is said of others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from jobs import Finished, profile

from dsprof.analyzer.ask import Misasked, Scaled, ask
from dsprof.analyzer.graph.replay import replay
from dsprof.analyzer.graph.step_graph import StepGraph
from dsprof.analyzer.judge import judge
from dsprof.analyzer.rules.base import NotJudged
from dsprof.analyzer.rules.pipeline.structure_fixes import boundaries_fix
from dsprof.analyzer.structure import AUTO, PipelineStructure, pipeline_that_ran
from dsprof.analyzer.study import Study, study
from dsprof.analyzer.whatif import apply
from dsprof.analyzer.whatif.lowering import Lower, measured_plan
from dsprof.analyzer.work.stage_layers import stage_layers
from dsprof.knobs.questions import read_questions
from dsprof.trace import Trace, load

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
        pytest.param(2, "--stages 2 --micro-batches 4", marks=pytest.mark.slow),
        pytest.param(2, "--framework torch --stages 2 --chunks 2 --micro-batches 4", marks=pytest.mark.slow),
        pytest.param(4, "--stages 4 --schedule zero-bubble --micro-batches 6", marks=pytest.mark.slow),
        pytest.param(2, "--stages 2 --schedule interleaved --chunks 2 --micro-batches 4", marks=pytest.mark.slow),
        pytest.param(3, "--stages 3 --schedule gpipe --micro-batches 5", marks=pytest.mark.slow),
        pytest.param(4, "--stages 2 --zero-stage 1 --micro-batches 4", marks=pytest.mark.slow),
        pytest.param(4, "--stages 2 --zero-stage 2 --micro-batches 4", marks=pytest.mark.slow),
        pytest.param(4, "--framework torch --stages 4 --micro-batches 6", marks=pytest.mark.slow),
        pytest.param(3, "--framework torch --stages 3 --schedule gpipe --micro-batches 5", marks=pytest.mark.slow),
        pytest.param(4, "--framework torch --stages 2 --micro-batches 4", marks=pytest.mark.slow),
        # Not torch's: its DDP stops under an interleaved schedule, with any profiler or none.
        pytest.param(4, "--stages 2 --schedule interleaved --chunks 2 --micro-batches 4", marks=pytest.mark.slow),
        pytest.param(2, "--framework torch --stages 2 --micro-batches 3", marks=pytest.mark.slow),
        pytest.param(
            2, "--framework torch --stages 2 --schedule dualpipe-v --chunks 2 --micro-batches 5", marks=pytest.mark.slow
        ),
    ],
)
def test_the_plan_that_ran_takes_what_was_measured(tmp_path: Path, ranks: int, arguments: str) -> None:
    """Within 1 % of the mean step."""
    graph = graph_of_run(profile(tmp_path, JOB, *arguments.split(), *LAYERS, ranks=ranks, flags=("--no-report",)))
    plans = [measured_plan(steps.structure).plan for steps in graph.templates]
    assert {plan.microbatches for plan in plans} == {int(arguments.split()[-1])}
    lowered = replay(apply(graph, [Lower()])).durations
    assert float(np.mean(lowered)) == pytest.approx(float(graph.measured.mean()), rel=0.01)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Two stages of the engine, of 24 and 36 ms a forward; a boundary one layer later makes them equal."""
    where = tmp_path_factory.mktemp("uneven")
    words = ["--stages", "2", "--micro-batches", "4", "--layer-ms", "6", "6", "6", "6", "6", "12", "12", "6"]
    finished = profile(where, JOB, *words, flags=("--no-report",))
    assert finished.status == 0, finished.stderr
    return study(load(finished.folder))


def test_the_plan_of_the_engine_and_its_layers(uneven: Study) -> None:
    plan = pipeline_that_ran(uneven)
    assert (plan.schedule, plan.ranks, plan.microbatches, plan.virtual_stages) == ("1f1b", 2, 4, 1)
    layers = stage_layers(uneven)
    assert layers is not None
    assert [layer.stage for layer in layers] == [0] * 4 + [1] * 4
    assert all(layer.forward_ms >= 6 for layer in layers)
    graph = uneven.need_graph()
    lowered = replay(apply(graph, [Lower()])).durations
    assert float(np.mean(lowered)) == pytest.approx(float(graph.measured.mean()), rel=0.01)


def test_what_another_structure_would_save(uneven: Study) -> None:
    asked = [
        PipelineStructure(boundaries=AUTO),
        PipelineStructure(boundaries=(0, 1, 8)),
        PipelineStructure(schedule="ZB-H1"),
        PipelineStructure(schedule="zero-bubble", microbatches=8, boundaries=AUTO),
    ]
    rows = ask(uneven, [[one] for one in asked]).rows
    best, worst, split, all_of_it = (row.gain for row in rows)
    assert best is not None
    assert worst is not None
    assert split is not None
    assert all_of_it is not None
    assert worst.high < 0 < best.ms
    assert 0 < split.ms < all_of_it.ms
    # Nothing tells whether these layers have weights.
    assert split.low < 0.01 * uneven.step_ms < split.ms < split.high
    assert rows[0].notes[0].endswith("boundaries 0,5,8")
    assert [note.partition(":")[0] for note in rows[3].notes][-2:] == [
        "how long weight gradients take was not measured",
        "activations that the ranks hold at once, in micro-batches of now",
    ]  # fmt: skip
    together = read_questions([], [], ["pipeline.schedule=zero-bubble", "gradient_accumulation_steps=8"], [], "RUN")
    row = ask(uneven, together[-1:]).rows[0]
    assert row.gain is not None
    assert any("the batch is 2.00 times as large" in note for note in row.notes)


def test_a_larger_batch_of_faster_stages(uneven: Study) -> None:
    """Nearly all of a step is computing: half as long, whatever the batch."""
    twice, half = PipelineStructure(microbatches=8), Scaled("compute", 0.5)
    alone, both = (row.gain for row in ask(uneven, [[twice], [twice, half]]).rows)
    assert alone is not None
    assert both is not None
    assert uneven.step_ms - both.ms == pytest.approx((uneven.step_ms - alone.ms) / 2, rel=0.1)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (
            PipelineStructure(schedule="zero-buble"),
            "no schedule of this name can be predicted; did you mean zero-bubble?",
        ),
        (
            PipelineStructure(schedule="gpipe", chunks=2),
            "2 parts of the model on each rank need the schedule interleaved",
        ),
        (PipelineStructure(chunks=2), "and this is of 1f1b, which has one; ask for --schedule interleaved, too"),
        (PipelineStructure(boundaries=(0, 4, 6, 8)), "do not divide 8 layers into 2 stages; write 3 rising numbers"),
        (PipelineStructure(schedule="interleaved", chunks=5), "10 stages for 8 layers; each needs one"),
    ],
)
def test_structures_that_cannot_be(uneven: Study, wanted: PipelineStructure, says: str) -> None:
    (row,) = ask(uneven, [[wanted]]).rows
    assert row.gain is None
    assert says in row.reason


def test_two_schedules_at_once(uneven: Study) -> None:
    with pytest.raises(Misasked, match="schedule=gpipe and schedule=1f1b do not go together: write one of them"):
        ask(uneven, [[PipelineStructure(schedule="gpipe"), PipelineStructure(schedule="1f1b")]])


def test_one_stage_of_two(uneven: Study) -> None:
    alone = study(Trace.of(uneven.run, uneven.trace.read(0)))
    with pytest.raises(NotJudged, match="only stage 0 of the pipeline was captured: what the others take is needed"):
        pipeline_that_ran(alone)


def test_findings_name_boundaries_and_schedule(uneven: Study) -> None:
    fixes = [fix.knobs for one in judge(uneven).findings for fix in one.fixes if one.code.startswith("pipeline.")]
    assert (("pipeline.schedule", "zero-bubble"),) in fixes
    exact = boundaries_fix(uneven, None, None)
    assert exact is not None
    assert exact.knobs == (("pipeline.partition_method", [0, 5, 8]),)
    assert exact.patch[0]["path"] == "/pipeline/partition_method"
