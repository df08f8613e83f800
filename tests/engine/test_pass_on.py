"""What ranks send each other over gloo, of a device whose memory gloo cannot read: by way of the host's."""

from __future__ import annotations

from unittest import mock

import torch
from ranks import Ranks

from dsprof.engine.comm import comm as comm_module
from dsprof.engine.comm.comm import open_comm
from dsprof.engine.comm.lane import Inline
from dsprof.engine.hooks import Hooks


def gathered_and_summed(rank: int, by_host: bool) -> tuple[list[float], list[float], int]:
    """Of two ranks: all rows, this rank's sum, and how many buffers of the job itself were given to gloo."""
    comm = open_comm([range(2)], lambda: Inline(Hooks()))
    rows = torch.zeros(2, 3)
    rows[rank] = torch.arange(3.0) + 10 * rank
    parts, mine = torch.full((2, 3), 1.0 + rank), torch.zeros(3)
    own = 0
    real = comm_module.dist.irecv

    def irecv(tensor: torch.Tensor, **how: object) -> object:
        nonlocal own
        own += tensor.data_ptr() == rows[1 - rank].data_ptr()
        return real(tensor, **how)

    with (
        mock.patch.object(comm_module, "_by_host", return_value=by_host),
        mock.patch.object(comm_module.dist, "irecv", irecv),
    ):
        comm.all_gather(rows, "gradient").wait()
        comm.reduce_scatter(parts, mine, "gradient", accumulate=False).wait()
    comm.close()
    return rows.flatten().tolist(), mine.tolist(), own


def test_what_gloo_cannot_read_goes_through_the_host(ranks: Ranks) -> None:
    for by_host, own in ((False, 1), (True, 0)):
        for rows, mine, given in ranks.run(2, gathered_and_summed, by_host):
            assert rows == [0, 1, 2, 10, 11, 12]
            assert mine == [3.0] * 3
            assert given == own
