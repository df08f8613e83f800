"""Communication of every kind on a device that sleeps: what dsprof tells of it is what the device did, or nothing."""

from __future__ import annotations

import pytest
from sleeping_jobs import Ran, SleepingRanks
from sleeping_truth import assert_communications


@pytest.fixture(scope="module")
def watched(sleeping_ranks: SleepingRanks, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return sleeping_ranks.run(tmp_path_factory.mktemp("watched"), "communications.py", ranks=2)


@pytest.fixture(scope="module")
def bare(sleeping_ranks: SleepingRanks, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return sleeping_ranks.run(tmp_path_factory.mktemp("bare"), "communications.py", ranks=2, armed=False)


KINDS = {
    "all_reduce": "nccl:all_reduce",
    "all_gather": "nccl:_all_gather_base",
    "reduce_scatter": "nccl:_reduce_scatter_base",
    "all_reduce_coalesced": "nccl:allreduce_coalesced",
    "barrier": "nccl:all_reduce_barrier",
}
"""The name in the trace, and the device's."""


@pytest.mark.parametrize("name", KINDS)
def test_collectives_last_and_arrive_as_on_the_device(watched: Ran, name: str) -> None:
    """Asynchronous and not."""
    for rank in range(2):
        assert_communications(watched, name, KINDS[name], rank, least=6)


@pytest.mark.parametrize("name", ["send", "recv"])
def test_how_messages_end_is_not_told(watched: Ran, name: str) -> None:
    """Of a message by itself NCCL calls the end of its scope on the job's stream, of a batch nowhere: neither is a
    length."""
    for rank in range(2):
        told = watched.communications(name, rank)
        assert len(told) >= 6
        assert told["dur_ns"].isna().all()
        assert told["arrival_ns"].isna().all()


def test_the_job_is_not_touched(watched: Ran, bare: Ran) -> None:
    for rank in range(2):
        with_it, without = watched.told[rank], bare.told[rank]
        assert with_it["losses"] == without["losses"]
        assert with_it["peak"] == without["peak"]
        for what in ("synchronize", "block", "Work.synchronize", "recordDataPtrOnStream"):
            assert with_it["counts"].get(what) == without["counts"].get(what), what
    assert not [warning for warning in watched.trace.run.warnings if "error" in warning]
