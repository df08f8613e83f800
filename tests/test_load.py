"""How busy the cores are that ranks share, by their affinity masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from synthetic import Job, constant

from dsprof.analyzer.budget.host_load import Gauges, HostLoad, core_masks, measure_load
from dsprof.analyzer.price.confidence_interval import interval, intervals
from dsprof.run import RankInfo, RunInfo


def run_of(hosts: list[str], world_size: int | None = None) -> RunInfo:
    ranks = [RankInfo(r, 0, host, r, f"rank{r}", True, 0, 0, 0, 0, 0, True) for r, host in enumerate(hosts)]
    return RunInfo(id="job", name="job", command=[], world_size=world_size or len(hosts), ranks=ranks)


def bound(*masks: list[int]) -> dict[str, list[dict[str, Any]]]:
    return {"process": [{"rank": rank, "cores": len(cpus), "cpus": cpus} for rank, cpus in enumerate(masks)]}


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        ([[0, 1, 2, 3]] * 8, [((0, 1, 2, 3, 4, 5, 6, 7), 4)]),
        ([[cpu] for cpu in range(8)], [((rank,), 1) for rank in range(8)]),
        ([[0, 1], [1, 2], [2, 3], [8, 9]], [((0, 1, 2), 4), ((3,), 2)]),
        ([[0, 1], [4, 5], [1, 2, 3, 4]], [((0, 1, 2), 6)]),
    ],
)
def test_ranks_share_the_cores_of_masks_that_overlap(masks: list[list[int]], expected: list[Any]) -> None:
    assert core_masks(run_of(["host"] * len(masks)), bound(*masks)) == expected


def test_cores_of_one_number_on_two_hosts_are_not_the_same() -> None:
    assert core_masks(run_of(["a", "b"]), bound([0, 1], [0, 1])) == [((0,), 2), ((1,), 2)]


def test_a_capture_that_tells_only_how_many_cores_means_the_same_ones() -> None:
    facts = {"process": [{"rank": 0, "cores": 4}, {"rank": 1, "cores": 4}]}
    assert core_masks(run_of(["host"] * 2), facts) == [((0, 1), 4)]


def load_of(job: Job, **changed: Any) -> HostLoad:
    trace = job.trace()
    steps = trace.rows.loc[trace.rows["kind"] == "step", ["rank", "step", "start_ns", "dur_ns"]]
    steps = steps.astype({"dur_ns": "int64"}).assign(ordinary=changed.pop("ordinary", steps["step"] >= 10))
    facts = {"process": [fact for fact in trace.run.facts if fact["fact"] == "process"]}
    for name, value in changed.items():
        setattr(trace.run, name, value)
    load = measure_load(trace.run, Gauges(trace.rows, steps), facts, 126.0)
    assert load is not None
    return load


def test_the_busiest_cores_count() -> None:
    """Ranks 0 and 1 share one core, ranks 2 and 3 have eight between them: of 126 ms each computes 63."""
    job = Job(ranks=4, cpus=lambda rank: [0] if rank < 2 else list(range(8, 16)), buckets=(64 << 10,))
    load = load_of(job)
    assert [cores.ranks for cores in load.shared] == [(0, 1), (2, 3)]
    assert load.ranks_per_core == 2
    assert load.busy == pytest.approx(1.0, abs=0.02)
    assert load.idle_ms == pytest.approx(0.0, abs=1.5)
    roomy = load.of(3)
    assert roomy is not None
    assert roomy.idle_ms.mean() == pytest.approx(126 - 2 * 63 / 8, abs=2)
    assert roomy.spare_ms.mean() == pytest.approx(126 * (1 - 2 / 8), abs=2)
    assert load.of(9) is None


def test_idle_time_is_known_a_step_and_so_is_how_sure_it_is() -> None:
    load = load_of(Job(cores=2, cpu_share=0.9, jitter=0.05))
    assert load.busiest.idle_ms.shape == (30,)
    low, high = interval(load.busiest.idle_ms)
    assert low < load.idle_ms < high
    assert load.idle_in(np.array([12, 39])) == pytest.approx(load.busiest.idle_ms[[2, 29]])


def test_ordinary_steps_need_not_follow_one_another() -> None:
    trace = Job(steps=20, data=lambda rank, step: 1001 if step % 5 == 0 else 1, cpu_share=1.0, buckets=()).trace()
    steps = trace.rows.loc[trace.rows["kind"] == "step", ["rank", "step", "start_ns", "dur_ns"]]
    steps = steps.astype({"dur_ns": "int64"}).assign(ordinary=steps["step"] % 5 != 0)
    gauges = Gauges(trace.rows, steps)
    spent = gauges.spent("cpu_seconds")
    duration = (steps.loc[steps["ordinary"] & (steps["rank"] == 1), "dur_ns"] / 1e6).to_numpy()
    assert spent[1] == pytest.approx(duration, rel=1e-3)
    assert spent[1].mean() == pytest.approx(126, abs=1)
    assert np.isnan(gauges.spent("no such gauge")).all()
    assert gauges.spent("no such gauge").shape == (2, 16)


def test_a_gauge_is_read_between_its_samples_on_ranks_that_have_two() -> None:
    def table(kind: str, rank: int, start_ms: list[float], **columns: Any) -> pd.DataFrame:
        start = (np.array(start_ms) * 1e6).astype(np.int64)
        return pd.DataFrame({"kind": kind, "rank": rank, "name": "cpu_seconds", "start_ns": start, **columns})

    rows = pd.concat([
        table("gauge", 3, [20, 10, 30], value=[0.010, 0.005, 0.030]), table("gauge", 1, [10], value=[0.5]),
        table("gauge", 2, [0, 40], value=[1.0, 1.020]), table("gauge", 9, [0, 40], value=[1.0, 1.020]),
    ])  # fmt: skip
    begin = [0.0, 10, 25]
    steps = pd.concat([
        table("step", rank, begin, step=[4, 5, 6], dur_ns=10_000_000, ordinary=True) for rank in (3, 2, 1)
    ])  # fmt: skip
    gauges = Gauges(rows, steps)
    assert (gauges.ranks, gauges.steps.tolist()) == ((1, 2, 3), [4, 5, 6])
    spent = gauges.spent("cpu_seconds")
    assert np.isnan(spent[0]).all()
    assert spent[1] == pytest.approx([5, 5, 5])
    assert spent[2] == pytest.approx([7.5, 5, 10])  # from 20 to 30 of 20 to 30 ms, and nothing behind


def test_the_step_before_the_first_reading_counts_as_the_mean_of_the_others() -> None:
    load = load_of(Job(steps=3, cores=2, jitter=0), ordinary=True)
    assert load.busiest.idle_ms[0] == pytest.approx(load.busiest.idle_ms[1], abs=0.5)


def test_ranks_that_were_not_captured_may_run_on_the_same_cores() -> None:
    load = load_of(Job(ranks=1, cores=8), world_size=8)
    assert load.busiest.cores_a_rank == 1
    assert load.busiest.spare_ms.max() == 0
    assert load.busiest.idle_ms.min() > 100


def test_without_readings_the_load_is_not_known() -> None:
    trace = Job(data=constant(5)).trace()
    steps = trace.rows.loc[trace.rows["kind"] == "step", ["rank", "step", "start_ns", "dur_ns"]]
    steps = steps.astype({"dur_ns": "int64"}).assign(ordinary=True)
    facts = {"process": [fact for fact in trace.run.facts if fact["fact"] == "process"]}
    rows = trace.rows[trace.rows["kind"] != "gauge"]
    assert measure_load(trace.run, Gauges(rows, steps), facts, 130.0) is None
    assert measure_load(trace.run, Gauges(trace.rows, steps), {}, 130.0) is None
    assert measure_load(trace.run, Gauges(trace.rows, steps.assign(ordinary=False)), facts, 0.0) is None


@pytest.mark.parametrize("steps", [0, 1, 2, 7, 40, 333])
def test_intervals_of_many_series_are_those_of_each(steps: int) -> None:
    series = np.random.default_rng(steps).normal(5, 2, (3, steps))
    low, high = intervals(series)
    assert [(float(a), float(b)) for a, b in zip(low, high, strict=True)] == [interval(mine) for mine in series]
