"""What dsprof tells of a device, held against what the device did: jobs on a device that sleeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sleeping_jobs import Ran, SleepingRanks

from dsprof.analyzer import analyze

MS = 1_000_000
WITHIN_MS, WITHIN = 0.2, 0.01
"""Of a length: the larger one of the two."""
CLOCKS_MS = 2.0
"""How far two clocks that are compared on a busy machine may lie apart."""


@pytest.fixture(scope="module")
def ddp(sleeping_ranks: SleepingRanks, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """DDP on two ranks: four buckets of 3 ms each, beside a backward of 4 ms a block. The host waits for the device
    every fourth step only, so it is ahead by tens of ms."""
    return sleeping_ranks.run(tmp_path_factory.mktemp("ddp"), "ddp.py", ranks=2)


@pytest.fixture(scope="module")
def plain(sleeping_ranks: SleepingRanks, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The same job without dsprof."""
    return sleeping_ranks.run(tmp_path_factory.mktemp("plain"), "ddp.py", ranks=2, armed=False)


def communications(ran: Ran, rank: int = 0) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rank's all-reduces of gradients in steps that are whole, as dsprof tells them, and what its device did."""
    rows = ran.rows(rank)
    told = rows[(rows["kind"] == "comm") & (rows["name"] == "all_reduce") & (rows["step"] >= 2)]
    log = ran.log(rank)
    did = log[log["name"] == "nccl:all_reduce"].iloc[-len(told) :]
    return told.reset_index(drop=True), did.reset_index(drop=True)


def close(found: np.ndarray, true: np.ndarray, least_ms: float = WITHIN_MS) -> np.ndarray:
    return np.abs(found - true) <= np.maximum(least_ms * MS, WITHIN * true)


@pytest.mark.parametrize("rank", [0, 1])
def test_asynchronous_collectives_last_as_long_as_on_the_device(ddp: Ran, rank: int) -> None:
    """From the moment that their stream got to them until they were over; the host had long gone on."""
    told, did = communications(ddp, rank)
    assert len(told) == len(did) == 40
    assert told["dur_ns"].notna().all()
    took = told["dur_ns"].to_numpy(np.int64)
    assert close(took, (did["end_ns"] - did["arrival_ns"]).to_numpy()).all()
    arrived = told["start_ns"].to_numpy(np.int64)
    assert (np.abs(arrived - did["arrival_ns"].to_numpy()) < CLOCKS_MS * MS).all()
    # Not when the host had put it on the stream: it was ahead of its device.
    ahead = arrived - told["issue_ns"].to_numpy(np.int64)
    assert np.median(ahead) > 5 * MS


def test_the_job_is_not_touched(ddp: Ran, plain: Ran) -> None:
    """The same losses; nothing waits for the device; no stream waits for an event of ours; no memory is kept."""
    for rank in range(2):
        watched, bare = ddp.told[rank], plain.told[rank]
        assert watched["losses"] == bare["losses"]
        assert watched["peak"] == bare["peak"]
        for what in ("synchronize", "block", "recordDataPtrOnStream"):
            assert watched["counts"].get(what) == bare["counts"].get(what), what
        assert watched["counts"]["record"] > bare["counts"]["record"]
        assert "query" not in bare["counts"]


def test_phases_last_as_long_as_on_the_device(ddp: Ran) -> None:
    """Four blocks of 2 ms in forward and of 4 ms in backward, which the last transfer follows."""
    rows = ddp.rows(0)
    kernels = rows[(rows["kind"] == "kernel") & (rows["step"] >= 2) & rows["dur_ns"].notna()]
    log = ddp.log(0)
    for phase, kernel in (("forward", "block0.forward"), ("backward", "block3.backward")):
        spans = kernels[kernels["name"] == phase].sort_values("start_ns")
        begins = log.loc[log["name"] == kernel, "begin_ns"].to_numpy()[-len(spans) :]
        assert len(spans) >= 9, phase
        late = spans["start_ns"].to_numpy(np.int64) - begins
        assert (np.abs(late) < CLOCKS_MS * MS).mean() > 0.8, phase
    forward = kernels.loc[kernels["name"] == "forward", "dur_ns"].to_numpy(np.int64)
    assert forward.min() >= 8 * MS - WITHIN_MS * MS


def test_an_arrival_is_the_streams_and_not_the_hosts(ddp: Ran) -> None:
    told, _ = communications(ddp)
    assert (told["arrival_ns"] == told["start_ns"]).all()
    assert (told["arrival_ns"] > told["issue_ns"]).all()


@pytest.fixture(scope="module")
def fsdp(sleeping_ranks: SleepingRanks, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """FSDP2 on two ranks, whose collectives run on streams of FSDP's own, without `async_op`."""
    return sleeping_ranks.run(tmp_path_factory.mktemp("fsdp"), "fsdp.py", ranks=2)


def test_collectives_on_the_current_stream_last_as_long_as_on_the_device(fsdp: Ran) -> None:
    rows, log = fsdp.rows(0), fsdp.log(0)
    for name, ran_as in (("all_gather", "nccl:_all_gather_base"), ("reduce_scatter", "nccl:_reduce_scatter_base")):
        told = rows[(rows["kind"] == "comm") & (rows["name"] == name) & (rows["step"] >= 2)].sort_values("issue_ns")
        did = log[log["name"] == ran_as].sort_values("launch_ns").iloc[-len(told) :]
        assert len(told) >= 40, name
        assert told["dur_ns"].notna().all(), name
        took = told["dur_ns"].to_numpy(np.int64)
        # A stream may have got to it before the communicator was free.
        assert (took >= (did["end_ns"] - did["arrival_ns"]).to_numpy() - WITHIN_MS * MS).all(), name
        ended = (told["start_ns"] + told["dur_ns"]).to_numpy(np.int64)
        assert (np.abs(ended - did["end_ns"].to_numpy()) < CLOCKS_MS * MS).all(), name


@pytest.mark.parametrize("first", [0, 3])
def test_a_step_that_is_captured_into_a_graph_is_left_alone(
    sleeping_ranks: SleepingRanks, tmp_path: Path, first: int
) -> None:
    """Also where the capture of the run opens in the middle of the graph's, since the optimizer's step is in it."""
    watched = sleeping_ranks.run(tmp_path / "watched", "graph.py", str(first), ranks=2, without="nvml")
    bare = sleeping_ranks.run(tmp_path / "bare", "graph.py", str(first), ranks=2, armed=False)
    for rank in range(2):
        assert watched.told[rank]["losses"] == bare.told[rank]["losses"]
    log, plain = watched.log(), bare.log()
    assert (log["name"] == "nccl:all_reduce").sum() == (plain["name"] == "nccl:all_reduce").sum() == 4 * (first + 10)
    trace = watched.trace()
    assert not [warning for warning in trace.run.warnings if "error" in warning]
    hidden = [fact["communications"] for fact in trace.run.facts if fact["fact"] == "cuda_graph"]
    assert hidden == [4 if first else None] * 2  # of a graph whose capture had begun before it is not known
    assert "CUDA graph" in analyze(trace).not_judged["comm.exposed"]
