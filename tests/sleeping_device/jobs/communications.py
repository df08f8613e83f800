"""Two ranks that communicate in all ways there are, asynchronously and not, while the device is 10 ms behind the host.
Each kind has a length of its own."""

from __future__ import annotations

from collections.abc import Callable

import common
import sleeping_device as device
import torch
from torch import distributed
from torch.distributed import P2POp
from torch.distributed.distributed_c10d import _coalescing_manager

common.join()
model = common.model(1, 16, 3, 5)
optimizer = common.Sgd(model.parameters(), 0.01)
data = torch.ones(4, 16, device="cuda")
peer = 1 - common.RANK
small, large = torch.ones(8, device="cuda"), torch.ones(16, device="cuda")
others = [torch.ones(8, device="cuda") for _ in range(3)]


def coalesced(asynchronous: bool) -> None:
    """By torch, into one collective."""
    with _coalescing_manager(async_ops=asynchronous) as work:
        for tensor in others:
            distributed.all_reduce(tensor)
    if asynchronous:
        work.wait()


def grouped(asynchronous: bool) -> None:
    """By the backend, which begins them together."""
    with _coalescing_manager(device=torch.device("cuda:0"), async_ops=asynchronous) as work:
        for _ in range(2):
            distributed.all_gather_into_tensor(large, small)
    if asynchronous:
        work.wait()


def exchange() -> None:
    operations = [P2POp(distributed.isend, small, peer), P2POp(distributed.irecv, others[0], peer)]
    for work in distributed.batch_isend_irecv(operations):
        work.wait()


def send_and_receive(asynchronous: bool) -> None:
    if asynchronous:
        work = distributed.isend(small, 1) if common.RANK == 0 else distributed.irecv(small, 0)
        assert work is not None
        work.wait()
    elif common.RANK == 0:
        distributed.send(small, 1)
    else:
        distributed.recv(small, 0)


def wait_for(work: distributed.Work | None) -> None:
    assert work is not None
    device.kernel("meanwhile", 1)
    work.wait()


calls: list[tuple[float, Callable[[], object]]] = [
    (2.0, lambda: wait_for(distributed.all_reduce(small, async_op=True))),
    (2.5, lambda: distributed.all_reduce(small)),
    (3.0, lambda: wait_for(distributed.all_gather_into_tensor(large, small, async_op=True))),
    (3.5, lambda: distributed.reduce_scatter_tensor(small, large)),
    (4.0, lambda: coalesced(True)),
    (4.5, lambda: coalesced(False)),
    (4.2, lambda: grouped(True)),
    (4.7, lambda: grouped(False)),
    (5.0, lambda: wait_for(distributed.barrier(async_op=True))),
    (2.2, lambda: distributed.barrier()),
    (2.4, exchange),
    (2.6, lambda: send_and_receive(True)),
    (2.8, lambda: send_and_receive(False)),
]


def step(number: int) -> torch.Tensor:
    loss = common.plain_step(model, optimizer, data)
    for ms, call in calls:
        device.set_link(ms * 1000, 1000)
        device.kernel("computing", 2)
        call()
    return loss


common.train(step, 8, head_start_ms=10)
torch.distributed.destroy_process_group()
