"""A pipeline of the engine on a device that sleeps: what waits for what there."""

from __future__ import annotations

from pathlib import Path

import pytest
from sleeping_jobs import SleepingRanks

STEPS, MICROBATCHES = 3, 4


@pytest.mark.parametrize("schedule", ["1f1b"])
def test_receives_wait_for_nothing_that_is_computed(
    sleeping_ranks: SleepingRanks, tmp_path: Path, schedule: str
) -> None:
    """A receive can begin when it is on its stream and the one before it there is over."""
    ran = sleeping_ranks.run(tmp_path, "pipeline.py", schedule, str(STEPS), "0", ranks=2, armed=False)
    assert ran.told[0]["losses"] == ran.told[1]["losses"]
    for rank in range(2):
        log = ran.log(rank)
        receives = log[log["name"] == "nccl:recv"]
        assert len(receives) == STEPS * MICROBATCHES
        before = 0
        for row in receives.itertuples():
            assert row.reached_ns <= max(row.launch_ns, before) + 1000
            before = row.end_ns
        # Their memory is the receiving stream's, and not given away while the computation's uses it.
        assert ran.told[rank]["counts"]["record_stream"] == len(receives)
        # The loss and the norm: that no rank has failed is asked on the host.
        training = log[log.index > log.index[log["name"].str.endswith(".forward")][0]]
        assert (training["name"] == "nccl:all_reduce").sum() == 2 * STEPS


def test_receives_are_posted_ahead(sleeping_ranks: SleepingRanks, tmp_path: Path) -> None:
    """The next micro-batch's before the backward of this one, where the sender has sent it: the host of the last stage
    is slow, and the first stage sends two before it waits for gradients."""
    ran = sleeping_ranks.run(tmp_path, "pipeline.py", "1f1b", str(STEPS), "50", ranks=2, armed=False)
    assert ran.told[0]["losses"] == ran.told[1]["losses"]
    log = ran.log(1)
    receives = log.loc[log["name"] == "nccl:recv", "launch_ns"].to_numpy().reshape(STEPS, MICROBATCHES)
    backwards = log.loc[log["name"] == "block3.backward", "launch_ns"].to_numpy().reshape(STEPS, MICROBATCHES)
    assert (receives[:, 1] < backwards[:, 0]).all()
