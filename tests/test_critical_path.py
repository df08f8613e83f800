"""Critical paths of made-up jobs, where they are known, and of any: what is on them is what the step's length is."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from graphs import graph_of, steps_of
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_device import DeviceJob, always

from dsprof.analyzer.graph.chains import DEPENDS, LAUNCH, SYNC
from dsprof.analyzer.graph.critical_path import critical_path, critical_path_within
from dsprof.analyzer.graph.link import Link
from dsprof.analyzer.graph.path_operations import (
    ACROSS,
    COMMUNICATION,
    JOIN,
    MESSAGE,
    ON_LINK,
    PROGRAM,
    SHARED,
    WAIT,
    CriticalPath,
)
from dsprof.analyzer.graph.path_summary import PathPart, summarize_path
from dsprof.analyzer.graph.replay import moments, replay, replay_all
from dsprof.analyzer.graph.step_graph import CrossStepEdges, StepGraph, Steps, Task
from dsprof.analyzer.study import study
from dsprof.analyzer.whatif import apply
from dsprof.analyzer.whatif.rebucket import Rebucket
from dsprof.analyzer.whatif.schedule import schedule_graph
from dsprof.engine import schedule
from dsprof.importers import import_trace

REAL = Path(os.environ.get("DSPROF_REAL_TRACES", Path(__file__).parents[2] / "shared" / "data" / "traces"))
REDUCE = Task("0", "all_reduce gradient", gradient=True, workers=1)


def told(path: CriticalPath) -> list[tuple[object, ...]]:
    return [(one.rank, one.kind, one.start_ms, one.ms, one.edge) for one in path.operations]


def check_sums(path: CriticalPath) -> None:
    """One after the other, from the beginning to the end, and what each consists of."""
    assert path.operations[0].start_ms == pytest.approx(path.begin_ms, abs=1e-6)
    for one, following in zip(path.operations, path.operations[1:], strict=False):
        assert following.start_ms == pytest.approx(one.end_ms, abs=1e-6)
    assert path.operations[-1].end_ms == pytest.approx(path.end_ms, abs=1e-6)
    for sums in (path.by_kind.values(), path.by_rank.values(), [one.ms for one in path.operations]):
        assert sum(sums) == pytest.approx(path.ms, abs=1e-6)


# --- jobs whose critical path is known ----------------------------------------------------------


def test_a_late_rank_and_the_collective_that_it_is_last_to_join() -> None:
    graph = graph_of(steps_of(["5 I0 W0 1", "9 I0 W0 2"], [4.0], [REDUCE]))
    path = critical_path(graph, 0)
    assert told(path) == [
        (1, "compute", 0.0, 9.0, ACROSS), (SHARED, COMMUNICATION, 9.0, 4.0, JOIN), (1, "compute", 13.0, 2.0, WAIT),
    ]  # fmt: skip
    assert [(one.chain, one.name) for one in path.operations][1] == ("0", "all_reduce gradient")
    assert path.by_kind == {"compute": 11.0, COMMUNICATION: 4.0}
    assert path.by_rank == {1: 11.0, SHARED: 4.0}


def test_a_collective_that_is_hidden_is_not_on_it() -> None:
    graph = graph_of(steps_of(["5 I0 8 W0 1"] * 2, [4.0], [REDUCE]))
    assert critical_path(graph, 0).by_kind == {"compute": 14.0}


def test_collectives_that_queue_for_the_only_worker() -> None:
    graph = graph_of(steps_of(["5 I0 1 I1 W0,1 1"] * 2, [4.0, 4.0], [REDUCE] * 2))
    assert [(one.ms, one.edge) for one in critical_path(graph, 0).operations] == [
        (5.0, ACROSS), (4.0, JOIN), (4.0, PROGRAM), (1.0, WAIT),
    ]  # fmt: skip


def test_a_step_begins_when_the_last_rank_is_through_with_the_one_before() -> None:
    """Two ranks with nothing between them: rank 1 takes 8 ms a step and is always the last."""
    graph = graph_of(steps_of(["5", "8"], steps=3))
    assert told(critical_path(graph, 2)) == [(1, "compute", 16.0, 8.0, ACROSS)]
    assert told(critical_path(graph, 2, since=1)) == [
        (1, "compute", 8.0, 8.0, ACROSS), (1, "compute", 16.0, 8.0, ACROSS)
    ]  # fmt: skip
    with pytest.raises(ValueError, match="step 3 is not one of the steps of the graph"):
        critical_path(graph, 3)
    with pytest.raises(ValueError, match="steps 0 to 2 do not follow one another in the graph"):
        critical_path(graph_of(steps_of(["5", "8"], steps=3), follow=False), 2, since=0)


def test_what_another_step_supplies() -> None:
    """Rank 0 waits in each step for what rank 1 issued in the one before, which takes 20 ms."""
    task = Task("0", "broadcast parameter", workers=None)
    steps = steps_of(["1 O0 2", "3 I0 1"], [20.0], [task], steps=2, outside=1)
    place, zero, one = steps.structure.segments, np.array([0]), np.array([1])
    path = critical_path(graph_of(steps, CrossStepEdges(zero, zero + place, zero, zero, zero, one)), 1)
    # Issued at 3 in the step before, which is over at 4; there at 23; then 2 ms more.
    assert (path.begin_ms, path.end_ms) == (4.0, 25.0)
    assert told(path) == [(SHARED, COMMUNICATION, 4.0, 19.0, JOIN), (0, "compute", 23.0, 2.0, WAIT)]
    assert [one.step for one in path.operations] == [0, 1]


def test_a_pipeline_is_as_long_as_its_first_micro_batch_down_and_the_slow_stage() -> None:
    """1F1B of two stages and three micro-batches: F takes 1 and 2 ms, B as long; stage 1 is never idle once begun."""
    graph = schedule_graph(schedule.make_plan("1f1b", 2, 3), lambda action: np.array([1.0 + action.stage]))
    path = critical_path(graph, 0)
    check_sums(path)
    assert [(one.rank, one.name, one.ms) for one in path.operations] == [
        (0, "F", 1.0), *[(1, "F", 2.0), (1, "B", 2.0)] * 3, (0, "B", 1.0),
    ]  # fmt: skip
    assert [one.edge for one in path.operations][1] == MESSAGE


def test_steps_that_follow_one_another_in_few_numbers() -> None:
    """Rank 1 comes last to the collective; step 3 is not judged, so that steps 0 to 2 are the longest stretch."""
    graph = graph_of(steps_of(["5 I0 W0 1", "9 I0 W0 2"], [4.0], [REDUCE], steps=5))
    found = summarize_path(replace(graph, judged=np.arange(5) != 3))
    assert found is not None
    assert found.steps == (0, 2)
    assert (found.ms, found.by_kind, found.by_rank) == (
        15.0,
        {"compute": 11.0, COMMUNICATION: 4.0},
        {1: 11.0, None: 4.0},
    )
    assert found.parts == (
        PathPart(1, "host", "compute", "", 11.0, 2.0),
        PathPart(None, "0", COMMUNICATION, "all_reduce gradient", 4.0, 1.0),
    )
    assert found.to_dict()["by_rank"] == {"1": 11.0, "together": 4.0}


def test_no_judged_step_has_no_path() -> None:
    assert summarize_path(replace(graph_of(steps_of(["5"], steps=2)), judged=np.zeros(2, bool))) is None


def flows(*kinds: str) -> list[Task]:
    return [Task(kind, kind, workers=None) for kind in kinds]


def with_a_device(host: str, device: str, transfers: list[float], tasks: list[Task], steps: int = 1) -> StepGraph:
    graph = graph_of(steps_of([device, host], transfers, tasks, steps=steps))
    return replace(graph, ranks=(0, 0), leads=1, chain_names=("cuda.7", "host"))


def test_a_device_that_is_launch_bound() -> None:
    """Three kernels of 1 ms, launched every 4 ms, each 0.5 ms on its way: all but the last are hidden by launching."""
    graph = with_a_device("4 I0 4 I1 4 I2 0", "W0 1 W1 1 W2 1", [0.5] * 3, flows(LAUNCH, LAUNCH, LAUNCH))
    path = critical_path(graph, 0)
    assert [(one.chain, one.kind, one.ms, one.edge) for one in path.operations] == [
        ("host", "compute", 4.0, ACROSS), ("host", "compute", 4.0, PROGRAM), ("host", "compute", 4.0, PROGRAM),
        ("cuda.7", LAUNCH, 0.5, LAUNCH), ("cuda.7", "compute", 1.0, LAUNCH),
    ]  # fmt: skip
    assert path.by_kind == {"compute": 13.0, LAUNCH: 0.5}


def test_a_device_that_is_behind_is_all_of_it() -> None:
    graph = with_a_device("1 I0 1 I1 1 I2 0", "W0 6 W1 6 W2 6", [0.5] * 3, flows(LAUNCH, LAUNCH, LAUNCH), steps=3)
    path = critical_path(graph, 2)
    assert [(one.chain, one.ms) for one in path.operations] == [("cuda.7", 6.0)] * 3
    assert path.operations[0].edge == ACROSS


def test_a_host_that_waits_for_its_device() -> None:
    """The second kernel is launched when the first is over: device, host, device."""
    graph = with_a_device("1 I0 W2 3 I1 0", "W0 6 I2 W1 5", [0.0] * 3, flows(LAUNCH, LAUNCH, SYNC))
    assert [(one.chain, one.ms, one.edge) for one in critical_path(graph, 0).operations] == [
        ("host", 1.0, ACROSS), ("cuda.7", 6.0, LAUNCH), ("host", 3.0, SYNC), ("cuda.7", 5.0, LAUNCH),
    ]  # fmt: skip


def test_of_a_part_of_a_step() -> None:
    """As above: from 0.5 ms, in which the host launches, to 9, in which it has waited and launches the second kernel;
    and to 4, when it is waiting."""
    graph = with_a_device("1 I0 W2 3 I1 0", "W0 6 I2 W1 5", [0.0] * 3, flows(LAUNCH, LAUNCH, SYNC))
    path = critical_path_within(graph, 0, 0.5, 9.0, rank=0)
    check_sums(path)
    assert [(one.chain, one.ms) for one in path.operations] == [("host", 0.5), ("cuda.7", 6.0), ("host", 2.0)]
    path = critical_path_within(graph, 0, 0.5, 4.0, rank=0)
    check_sums(path)
    assert [(one.chain, one.ms) for one in path.operations] == [("host", 0.5), ("cuda.7", 3.0)]
    with pytest.raises(ValueError, match="rank 1 has nothing from 0 to 4 ms of step 0"):
        critical_path_within(graph, 0, 0.0, 4.0, rank=1)


def test_a_stream_that_waits_for_another() -> None:
    steps = steps_of(["W1 2", "4 I1 0"], [0.0, 0.0], flows(LAUNCH, DEPENDS))
    graph = replace(graph_of(steps), ranks=(0, 0), leads=1, chain_names=("cuda.7", "cuda.20"))
    assert [(one.chain, one.ms, one.edge) for one in critical_path(graph, 0).operations] == [
        ("cuda.20", 4.0, ACROSS), ("cuda.7", 2.0, DEPENDS),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("job", "most"),
    [
        (DeviceJob(), ("cuda.0", "compute")),
        (DeviceJob(load=always(120.0), item_every=100), ("host", "data")),
        (DeviceJob(late=lambda rank, step: 100.0 * (rank == 0)), ("host", "other")),
    ],
)
def test_of_recorded_steps_on_devices(job: DeviceJob, most: tuple[str, str]) -> None:
    found = study(job.run()[0])
    assert found.graph is not None
    replayed = moments(found.graph)
    steps = found.graph.judged_steps.tolist()
    paths = [critical_path(found.graph, step, replayed=replayed) for step in steps]
    for path in paths:
        check_sums(path)
    assert np.mean([path.ms for path in paths[1:]]) == pytest.approx(found.step_ms, rel=0.01)
    whole = critical_path(found.graph, steps[-1], since=steps[0], replayed=replayed)
    check_sums(whole)
    spent: dict[tuple[str, str], float] = {}
    for one in whole.operations:
        for kind, ms in one.parts.items():
            spent[one.chain, kind] = spent.get((one.chain, kind), 0.0) + ms
    assert max(spent, key=lambda one: spent[one]) == most
    assert spent[most] > 0.8 * whole.ms


# --- any job ------------------------------------------------------------------------------------

EPS = 1e-3


def varied(graph: StepGraph, seed: int) -> StepGraph:
    """Other costs for each operation and step, none of which are alike."""
    draw = np.random.default_rng(seed)

    def of(steps: Steps) -> Steps:
        return steps.with_costs(
            work=steps.work * draw.uniform(0.3, 2.0, (*steps.work.shape[:2], 1)),
            transfer=steps.transfer * draw.uniform(0.3, 2.0, steps.transfer.shape),
            wire=steps.wire * draw.uniform(0.3, 2.0, steps.wire.shape),
        )

    return graph.with_templates(tuple(of(steps) for steps in graph.templates))


def data_parallel() -> StepGraph:
    """Three ranks, gloo: buckets whose lane runs two at once, and a norm."""
    program = "2 B 3 I0 4 I1 2 I2 1 I3 W0,1,2,3 1 I4 W4 2"
    bucket, norm = Task("0", "all_reduce gradient", gradient=True), Task("1", "all_reduce norm", workers=1)
    return graph_of(steps_of([program] * 3, [6, 7, 5, 8, 1], [bucket] * 4 + [norm], steps=4, sizes=[8, 8, 8, 8, 1]))


def other_buckets() -> StepGraph:
    return apply(data_parallel(), [Rebucket((8, 8, 16), Link(0.5, 0.3, True))])


def pipeline() -> StepGraph:
    plan = schedule.make_plan("zero-bubble", 3, 5)
    graph = schedule_graph(plan, lambda action: np.full(4, 1.0 + action.stage), lag=0.3, steps=4)
    return replace(graph, follows=np.arange(4) > 0)


def on_a_device() -> StepGraph:
    host = "2 I0 2 I1 1 W3 2 I2 1"
    tasks = [*flows(LAUNCH, LAUNCH, LAUNCH, SYNC), REDUCE]
    return with_a_device(host, "W0 4 W1 4 I3 W2 4 I4 W4 1", [0.2] * 4 + [3.0], tasks, steps=4)


@pytest.mark.parametrize("make", [data_parallel, other_buckets, pipeline, on_a_device])
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 20))
def test_what_takes_longer_on_it_makes_the_step_longer_by_as_much(make: Callable[[], StepGraph], seed: int) -> None:
    graph = varied(make(), seed)
    for since in (3, 0):
        path = critical_path(graph, 3, since=since)
        check_sums(path)
        end = replay(graph).end[: graph.leads, 3].max()
        assert path.end_ms == pytest.approx(end, abs=1e-6)
        if since == 0:
            assert path.ms == pytest.approx(end, abs=1e-6)
        (steps,) = graph.templates
        changed = []
        for one in path.operations:
            for eps in (EPS, -EPS):
                costs = {name: getattr(steps, name).copy() for name in ("work", "transfer", "wire")}
                place = one.operation - steps.structure.segments
                if place >= 0:
                    costs["wire" if one.name.endswith(ON_LINK) else "transfer"][place, one.step] += eps
                else:
                    costs["work"][one.operation, one.step, 0] += eps
                changed.append(graph.with_templates((steps.with_costs(**costs),)))
        ends = np.array([one.end[: graph.leads, 3].max() for one in replay_all(changed)])
        assert ends[0::2] - end == pytest.approx(np.full(len(path.operations), EPS), rel=1e-3)
        assert (ends[1::2] - end >= -EPS - 1e-6).all()
        assert (ends[1::2] - end <= 1e-9).all()


# --- recordings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "launches", "syncs"), [("alexnet", 98, 17), ("simple_add", 98, 16), ("cuda_event_sync", 5, 1)]
)
def test_of_recordings(name: str, launches: int, syncs: int) -> None:
    """HTA's tests of these traces have the edge between streams from the FFT to the kernel after it, which had to wait
    for it; and the launch of each kernel."""
    path = REAL / "critical_path" / f"{name}.json.gz"
    if not path.exists():
        pytest.skip(f"{path}: not here; DSPROF_REAL_TRACES names the folder of real traces")
    trace = import_trace(path)
    found = study(trace)
    assert found.graph is not None
    (steps,) = found.graph.templates
    kinds = [task.kind for task in steps.structure.tasks]
    assert (kinds.count(LAUNCH), kinds.count(SYNC)) == (launches, syncs)
    critical = critical_path(found.graph, int(found.graph.numbers[0]))
    check_sums(critical)
    assert critical.ms == pytest.approx(found.step_ms, abs=1e-4)
    assert {LAUNCH, SYNC} <= {one.edge for one in critical.operations}
    if name == "cuda_event_sync":
        return
    # The second span that is annotated [param|pytorch.model.alex_net|0|0|0|measure|forward].
    begun_ms, span = {"alexnet": (43313.521, 36.356), "simple_add": (40898.446, 243.351)}[name]
    critical = critical_path_within(found.graph, int(found.graph.numbers[0]), begun_ms, begun_ms + span, rank=0)
    check_sums(critical)
    assert critical.ms == pytest.approx(span, abs=1e-6)
    assert sum(one.ms for one in critical.operations) == pytest.approx(span, abs=1e-6)
    waits = {"alexnet": True, "simple_add": False}[name]  # the device of the other is over before its host asks
    assert {one.chain for one in critical.operations} >= ({"host", "cuda.7"} if waits else {"host"})
    assert (SYNC in {one.edge for one in critical.operations}) == waits
    kernels = trace.rows[trace.rows["kind"] == "kernel"].set_index("corr")
    source, target = kernels.loc[5606], kernels.loc[5629]
    assert (source["lane"], target["lane"]) == ("cuda.20", "cuda.7")
    first = int(trace.rows.loc[trace.rows["kind"] == "step", "start_ns"].iloc[0])
    ended, begun = int(source["start_ns"] + source["dur_ns"]) - first, int(target["start_ns"]) - first
    between = {
        (found.graph.chain_names[steps.structure.thread[segment]], round(float(steps.ended[task, 0]), 3),
         round(float(steps.began[segment, 0]), 3))
        for task, segment in steps.structure.waits.tolist() if kinds[task] == DEPENDS
    }  # fmt: skip
    assert ("cuda.7", round(ended / 1e6, 3), round(begun / 1e6, 3)) in between
