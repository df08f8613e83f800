"""Steps on devices, replayed: what is said of made-up jobs is what the same job takes less without its fault."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from made_up_device import DeviceJob, always

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.effect import Fewer
from dsprof.analyzer.finding import Finding
from dsprof.analyzer.graph.chains import SYNC
from dsprof.analyzer.graph.link import fit_link
from dsprof.analyzer.judge import judge
from dsprof.analyzer.price.contention import busy, freed_ms, kept_of_overlap, lost_by_waiting_less
from dsprof.analyzer.price.effects import replayed
from dsprof.analyzer.price.gains import mean_gain
from dsprof.analyzer.price.unseen_idle import with_unseen_idle
from dsprof.analyzer.study import study
from dsprof.analyzer.whatif.without_flows import WithoutFlows
from dsprof.analyzer.work.device_idle import idle_of_early_devices_ms, unseen_idle_ms

HEALTHY = DeviceJob()


def judged(job: DeviceJob) -> tuple[Analysis, float]:
    trace, step_ms = job.run()
    analysis = analyze(trace)
    assert analysis.step_ms is not None
    assert analysis.step_ms.mean == pytest.approx(step_ms, rel=0.01)
    return analysis, step_ms


def first_of(analysis: Analysis, code: str) -> Finding:
    problems = [finding for finding in analysis.findings if finding.is_problem]
    assert [finding.code for finding in problems][:1] == [code]
    return problems[0]


def test_steps_are_replayed_as_they_were_measured() -> None:
    """20 ms of forward and 40 of backward, whose last bucket takes 2 ms more, and 2 of the optimizer: 64."""
    found = study(HEALTHY.run()[0])
    assert found.step_ms == pytest.approx(64.0, abs=0.1)
    assert found.graph is not None
    assert (found.graph.leads, found.graph.ranks) == (2, (0, 1, 0, 1))
    assert found.checked is not None
    assert (found.checked.error, found.checked.contradicted) == (pytest.approx(0.0, abs=1e-9), 0.0)
    assert found.chains_unknown == ""


def test_a_job_whose_host_is_ahead_is_healthy() -> None:
    analysis, _ = judged(HEALTHY)
    assert analysis.verdict.status == "healthy"
    assert {"rank.straggler", "pause.gc", "comm.exposed", "compute.host-sync"} <= set(analysis.passed)


def test_a_device_that_takes_longer() -> None:
    analysis, step_ms = judged(HEALTHY.with_(backward=lambda rank, step: 60.0 if rank == 1 else 40.0))
    late = first_of(analysis, "rank.straggler")
    assert late.where.ranks == (1,)
    assert late.title == "the device of rank 1 is 20.0 ms late in every step and the other ranks wait"
    assert late.gain.ms == pytest.approx(step_ms - HEALTHY.run()[1], abs=0.2)


def test_a_late_host_costs_what_its_device_stands_idle_for() -> None:
    """It launches for 7 ms and does nothing for 100: of its step of 107 ms the device is busy for 64."""
    analysis, step_ms = judged(HEALTHY.with_(late=lambda rank, step: 100.0 * (rank == 0)))
    late = first_of(analysis, "rank.straggler")
    assert late.where.ranks == (0,)
    assert late.title == "the host of rank 0 is 100 ms late in every step and the other ranks wait"
    assert late.gain.ms == pytest.approx(step_ms - HEALTHY.run()[1], rel=0.05)


def test_a_late_host_that_is_ahead_of_its_device_costs_nothing() -> None:
    analysis, _ = judged(HEALTHY.with_(late=lambda rank, step: 30.0 * (rank == 0), item_every=100))
    assert not [finding for finding in analysis.findings if finding.is_problem]


@pytest.mark.parametrize("load", [20.0, 120.0])
def test_a_loader_costs_what_the_device_waits_for_it(load: float) -> None:
    """Of 64 ms a step; a loader that takes 20 is hidden."""
    job = HEALTHY.with_(load=always(load), item_every=100)
    trace, step_ms = job.run()
    saved = step_ms - job.with_(load=always(0.5)).run()[1]
    analysis = analyze(trace)
    found = [finding for finding in analysis.findings if finding.code == "data.stall" and finding.is_problem]
    if load == 20.0:
        assert saved < 1.0
        assert not found
    else:
        assert found[0].gain.ms == pytest.approx(saved, rel=0.1)


def test_as_many_workers_as_load_a_batch_while_the_device_computes_one() -> None:
    """A batch takes 120 ms to load and 64 to compute: two workers keep up, and one more has some to spare. The host's
    own part of a step takes 7."""
    (fix,) = first_of(analyze(HEALTHY.with_(load=always(120.0), item_every=100).run()[0]), "data.stall").fixes
    assert "num_workers=3" in fix.title


@pytest.mark.parametrize(("item_every", "costs"), [(1, True), (100, False)])
def test_a_collection_costs_what_the_host_was_not_ahead(item_every: int, costs: bool) -> None:
    collect = HEALTHY.with_(collect=lambda rank, step: 45.0 if step % 2 else 0.0, item_every=item_every)
    analysis, step_ms = judged(collect)
    saved = step_ms - HEALTHY.with_(item_every=item_every).run()[1]
    if costs:
        (found,) = [finding for finding in analysis.findings if finding.code == "pause.gc"]
        assert found.is_problem
        assert found.gain.ms == pytest.approx(saved, abs=0.5)
    else:
        assert abs(saved) < 0.5
        assert "pause.gc" in analysis.passed


def test_asking_for_the_loss_in_each_step_costs_what_the_device_runs_dry_for() -> None:
    job = HEALTHY.with_(load=always(25.0))
    analysis, step_ms = judged(job.with_(item_every=1))
    saved = step_ms - job.with_(item_every=100).run()[1]
    assert saved > 20
    sync = first_of(analysis, "compute.host-sync")
    assert sync.gain.ms == pytest.approx(saved, rel=0.05)
    assert sync.gain.method == "replay"


@pytest.mark.parametrize(("launch", "late", "saved_ms"), [(20.0, 60.0, 23.0), (20.0, 30.0, 23.0), (40.0, 30.0, 3.0)])
def test_idle_time_that_was_not_seen_does_not_matter_where_the_host_is_waited_for(
    launch: float, late: float, saved_ms: float
) -> None:
    """The host launches for most of the step, and may have let the device stand idle in all of that: 40 or 80 ms. But
    with the loss left on the device the step still lasts as long as the host takes for its own work."""
    job = HEALTHY.with_(launch=always(launch), late=always(late))
    trace, step_ms = job.with_(item_every=1).run()
    saved = step_ms - job.with_(item_every=100).run()[1]
    assert saved == pytest.approx(saved_ms, abs=0.1)
    found = study(trace)
    assert unseen_idle_ms(found) == pytest.approx(2 * launch, abs=1)
    assert idle_of_early_devices_ms(found) == 0.0
    sync = first_of(analyze(trace), "compute.host-sync")
    assert sync.gain.ms == pytest.approx(saved, abs=0.1)
    assert sync.gain.high - sync.gain.low < 0.1 * step_ms


def test_idle_time_that_was_not_seen_may_go_where_the_device_is_waited_for() -> None:
    """The host loads for 25 ms and launches each phase in 20; the device takes 30 and 40 for them, of which it may have
    been idle while the host launched: 20 of the forward, and 10 of the backward, to which it comes 10 late. With the
    loss left on the device, a step takes the device 74. Was it idle for these 30, it takes what the host does, 65; and
    coming early to the backward, it may have to wait for its launches there for 10."""
    job = HEALTHY.with_(load=always(25.0), forward=always(30.0), launch=always(20.0), item_every=1)
    found = study(job.run()[0])
    before, change = replayed(found), WithoutFlows(SYNC)
    gain = mean_gain(found, before - replayed(found, change))
    assert gain.ms == pytest.approx(99 - 74, abs=0.1)
    assert (unseen_idle_ms(found), idle_of_early_devices_ms(found)) == (
        pytest.approx(30, abs=1),
        pytest.approx(10, abs=1),
    )
    gain = with_unseen_idle(found, found.need_graph(), before, change, gain)
    assert gain.unseen == (pytest.approx(10, abs=1), pytest.approx(74 - 65, abs=1))


def test_two_faults_that_hide_each_other_are_told_together() -> None:
    """A device that takes 30 ms longer, and another rank's host that is late by as much."""
    both = HEALTHY.with_(
        backward=lambda rank, step: 80.0 if rank == 0 else 40.0, load=lambda rank, step: 96.0 if rank == 1 else 0.5,
        item_every=100,
    )  # fmt: skip
    analysis, step_ms = judged(both)
    worst = next(finding for finding in analysis.findings if finding.is_problem)
    assert worst.together is not None
    assert worst.together.gain.ms == pytest.approx(step_ms - HEALTHY.run()[1], rel=0.1)


def test_launches_that_hold_the_device_up_ask_for_a_deeper_capture() -> None:
    analysis, _ = judged(HEALTHY.with_(launch=always(70.0)))
    assert "dsprof run --deep 10:13" in analysis.not_judged["compute.launch-bound"]
    assert analysis.verdict.status == "inconclusive"
    assert "--deep" in analysis.verdict.headline


def test_cores_that_the_hosts_use_up_take_nothing_of_what_is_gained_on_devices() -> None:
    """What communication costs cores was fitted where CPUs communicate. Small buckets and a late host gain the same of
    hosts whose cores are all used."""
    job = HEALTHY.with_(buckets=24, transfer=4.0, late=lambda rank, step: 60.0 * (rank == 0), item_every=1)
    found = study(job.run()[0])
    used_up = SimpleNamespace(busy=1.0, beside_ms=30.0, ranks_per_core=2.0, of=lambda rank: None)
    crowded = replace(found, load=used_up)
    assert (busy(crowded), kept_of_overlap(crowded), lost_by_waiting_less(crowded, 20.0)) == (0.0, 1.0, 0.0)
    assert freed_ms(crowded, np.zeros(len(crowded.replayed_steps)), Fewer(1.0, moved_bytes=1e6)) == 0.0
    gains = [{one.code: one.gain for one in judge(of).findings} for of in (found, crowded)]
    assert gains[0] == gains[1]
    assert {"comm.small-messages", "rank.straggler"} <= gains[0].keys()


def test_rare_collections_are_priced_although_their_cost_depends_on_the_steps_before() -> None:
    """A collection of 300 ms in one of four steps of 64: the host is ahead by up to as many steps as since it asked
    for the loss last, and the device stands still for the rest."""
    job = HEALTHY.with_(steps=32)
    trace, step_ms = job.with_(collect=lambda rank, step: 300.0 if step % 4 == 2 else 0.0).run()
    found = first_of(analyze(trace), "pause.gc")
    assert found.gain.ms == pytest.approx(step_ms - job.run()[1], rel=0.05)


def test_kernels_of_a_few_steps_bound_what_was_not_seen_in_the_others() -> None:
    """The device is in phases that its host still launches for 18 ms of a step. In two steps whose kernels were traced
    it stood idle for 0.3 and 0.5."""
    found = study(HEALTHY.with_(launch=always(9.0), item_every=1).run()[0])
    assert unseen_idle_ms(found) > 5
    traced = SimpleNamespace(steps=pd.DataFrame({"idle_ms": [0.3, 0.5]}))
    assert unseen_idle_ms(replace(found, device=SimpleNamespace(ranks={0: traced}))) == pytest.approx(0.4)


@pytest.mark.parametrize(("on_device", "spread"), [(True, 0.1), (False, 0.5)])
def test_transfers_of_one_size_tell_more_where_devices_took_them(on_device: bool, spread: float) -> None:
    """Those of a host's threads are longer where these want a core."""
    alike = pd.DataFrame({"bytes": [4096] * 8, "transfer_ns": [2_000_000, 2_100_000] * 4})
    link = fit_link(alike, on_device=on_device)
    assert (link.fitted, link.spread) == (False, spread)
    assert link.transfer_ms(np.array(4096.0)) == pytest.approx(2.05, abs=0.01)
