"""Communication of every kind on a device that sleeps: what dsprof tells of it is what the device did, or nothing."""

from __future__ import annotations

import pytest
from sleeping_jobs import Ran, SleepingRanks
from sleeping_truth import assert_communications


@pytest.fixture(scope="module")
def watched(sleeping_ranks: SleepingRanks, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return sleeping_ranks.run(tmp_path_factory.mktemp("watched"), "communications.py", ranks=2, without="nvml")


@pytest.fixture(scope="module")
def bare(sleeping_ranks: SleepingRanks, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return sleeping_ranks.run(tmp_path_factory.mktemp("bare"), "communications.py", ranks=2, armed=False)


EACH, FIRST, SECOND = slice(None), slice(0, None, 2), slice(1, None, 2)
KINDS = {
    "all-reduce, asynchronous": ("all_reduce", slice(0, None, 4), "nccl:all_reduce", FIRST),
    "all-reduce": ("all_reduce", slice(1, None, 4), "nccl:all_reduce", SECOND),
    "coalesced by torch, asynchronous": ("all_reduce", slice(2, None, 4), "nccl:allreduce_coalesced", FIRST),
    "coalesced by torch": ("all_reduce", slice(3, None, 4), "nccl:allreduce_coalesced", SECOND),
    "all-gather, asynchronous": ("all_gather", slice(0, None, 3), "nccl:_all_gather_base", EACH),
    "coalesced by the backend": ("all_gather", slice(2, None, 3), "nccl:coalesced", slice(1, None, 3)),
    "reduce-scatter": ("reduce_scatter", EACH, "nccl:_reduce_scatter_base", EACH),
    "barrier, asynchronous": ("barrier", FIRST, "nccl:all_reduce_barrier", FIRST),
    "barrier": ("barrier", SECOND, "nccl:all_reduce_barrier", SECOND),
}
"""What dsprof calls it, which of those in a step it is, and the same of the device."""


@pytest.mark.parametrize("kind", KINDS)
def test_collectives_last_and_arrive_as_on_the_device(watched: Ran, kind: str) -> None:
    name, told_at, ran_as, did_at = KINDS[kind]
    for rank in range(2):
        assert_communications(watched, name, ran_as, rank, least=3, told_at=told_at, did_at=did_at)


def test_how_coalesced_works_end_that_are_asynchronous_is_not_told(watched: Ran) -> None:
    """NCCL calls the end of their scope nowhere."""
    for rank in range(2):
        told = watched.communications("all_gather", rank)[1::3]
        assert len(told) >= 6
        assert told["dur_ns"].isna().all()
        assert told["arrival_ns"].isna().all()


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
