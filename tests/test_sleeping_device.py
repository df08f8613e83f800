"""What dsprof tells of a device, held against what the device did: DDP, FSDP2 and dsprof's engine on a device that
sleeps, whose host is 20 ms ahead of it and more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sleeping_jobs import Ran, SleepingRanks
from sleeping_truth import MS, assert_communications, assert_moments, assert_phases, close, waits_by_step

from dsprof.analyzer import analyze
from dsprof.analyzer.study import study
from dsprof.analyzer.work.recomputed import recomputed_ms


@pytest.fixture(scope="module")
def ddp(sleeping_ranks: SleepingRanks, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """DDP on two ranks: four buckets of 3 ms each, beside a backward of 4 ms a block."""
    return sleeping_ranks.run(tmp_path_factory.mktemp("ddp"), "ddp.py", ranks=2)


@pytest.fixture(scope="module")
def plain(sleeping_ranks: SleepingRanks, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The same job without dsprof."""
    return sleeping_ranks.run(tmp_path_factory.mktemp("plain"), "ddp.py", ranks=2, armed=False)


@pytest.fixture(scope="module")
def fsdp(sleeping_ranks: SleepingRanks, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """FSDP2 on two ranks, whose collectives run on streams of FSDP's own, without `async_op`."""
    return sleeping_ranks.run(tmp_path_factory.mktemp("fsdp"), "fsdp.py", ranks=2)


@pytest.fixture(scope="module")
def engine(sleeping_ranks: SleepingRanks, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """dsprof's engine on two ranks, whose backward and optimizer are spans of its own."""
    return sleeping_ranks.run(tmp_path_factory.mktemp("engine"), "engine_phases.py", "2", ranks=2)


@pytest.mark.parametrize("rank", [0, 1])
def test_asynchronous_collectives_last_and_arrive_as_on_the_device(ddp: Ran, rank: int) -> None:
    """From the moment that their stream got to them until they were over; the host had long gone on."""
    assert_communications(ddp, "all_reduce", "nccl:all_reduce", rank, least=20)
    told = ddp.communications("all_reduce", rank)
    ahead = told["arrival_ns"].to_numpy(np.int64) - told["issue_ns"].to_numpy(np.int64)
    assert np.median(ahead) > 10 * MS


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("job", ["ddp", "fsdp", "engine"])
def test_phases_last_and_lie_as_on_the_device(request: pytest.FixtureRequest, job: str, phase: str) -> None:
    for rank in range(2):
        assert_phases(request.getfixturevalue(job), phase, rank, least=5)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_stream_waits_as_long_as_on_the_device(ddp: Ran, rank: int) -> None:
    """For DDP's last bucket, behind the last block's backward."""
    found, true = waits_by_step(ddp, rank)
    assert len(found) >= 2
    assert close(found, true).all(), (found / MS, true / MS)
    assert true.min() > 2 * MS


def test_a_step_lasts_as_long_as_on_the_device(ddp: Ran) -> None:
    """The host is through with it long before, or, where it waits for the device, with several at once."""
    steps = analyze(ddp.trace).steps
    for rank in range(2):
        own = steps[(steps["rank"] == rank) & (steps["step"] >= 3)]
        phases = ddp.phases(rank)
        ended = phases.loc[phases["name"] == "optimizer", "end_ns"].to_numpy(np.int64)[2:]
        assert len(own) == len(ended) - 1 == 9
        assert close(own["dur_ns"].to_numpy(np.int64), np.diff(ended)).all()
        assert_moments((own["start_ns"] + own["dur_ns"]).to_numpy(np.int64), ended[1:], "steps")
    host = np.diff([end for _, end in ddp.told[0]["host"]][2:])
    assert len(host) == len(own)
    assert not close(host, own["dur_ns"].to_numpy(np.int64)).all()


def test_the_engines_backward_is_compute_where_its_host_waits_for_it_in_the_optimizer(engine: Ran) -> None:
    """Backward takes 16 ms of the device, and the host issues it in one."""
    budget = analyze(engine.trace).budget
    assert budget["compute"] > 3 * budget["optimizer"]  # 24 ms and 2: a busy machine's host is not always ahead


def test_what_is_computed_again_counts_once(sleeping_ranks: SleepingRanks, tmp_path: Path) -> None:
    """The engine's span of it holds those of the modules within: four blocks of 2 ms."""
    ran = sleeping_ranks.run(tmp_path, "engine_phases.py", "1", "full", ranks=2)
    again = recomputed_ms(study(ran.trace))
    assert again is not None
    assert np.median(again) == pytest.approx(8, rel=0.3)


def test_without_the_devices_times_the_hosts_are_not_taken_for_them(
    sleeping_ranks: SleepingRanks, tmp_path: Path
) -> None:
    """The host runs ahead and then waits for some steps at once: no pause of the job, and its communication hidden."""
    ran = sleeping_ranks.run(tmp_path, "ddp.py", ranks=2, without="device-times")
    analysis = analyze(ran.trace)
    assert [finding.code for finding in analysis.findings if finding.severity != "info"] == []
    assert analysis.verdict.status == "inconclusive"
    for code in ("comm.exposed", "pause.stop", "compute.host-sync"):
        assert "device-times" in analysis.not_judged[code], code
    assert any("the collector device-times was switched off" in warning for warning in ran.trace.run.warnings)


def test_the_job_is_not_touched(ddp: Ran, plain: Ran) -> None:
    """The same losses; nothing waits for the device; no stream waits for an event of ours; no memory is kept."""
    for rank in range(2):
        watched, bare = ddp.told[rank], plain.told[rank]
        assert watched["losses"] == bare["losses"]
        assert watched["peak"] == bare["peak"]
        for what in ("synchronize", "block", "Work.synchronize", "recordDataPtrOnStream"):
            assert watched["counts"].get(what) == bare["counts"].get(what), what
        assert watched["counts"]["record"] > bare["counts"]["record"]
        assert "query" not in bare["counts"]


def test_collectives_on_the_current_stream_end_as_on_the_device(fsdp: Ran) -> None:
    for name, ran_as in (("all_gather", "nccl:_all_gather_base"), ("reduce_scatter", "nccl:_reduce_scatter_base")):
        assert_communications(fsdp, name, ran_as, least=20)


def test_a_stream_that_waits_for_gathers_waits_as_long_as_on_the_device(fsdp: Ran) -> None:
    for rank in range(2):
        found, true = waits_by_step(fsdp, rank)
        assert len(found) >= 2  # a busy host is not ahead in every step
        assert close(found, true).all(), (found / MS, true / MS)
