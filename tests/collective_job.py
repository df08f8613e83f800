"""The job of test_collectives.py: two gloo ranks call everything once while a recorder is on.

python collective_job.py native|python RANK FOLDER
Each section is announced by a mark, so that the test can take the rows of one.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from captures import open_recorder
from torch._C._distributed_c10d import FileStore
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dsprof.collectors.communication import collectives
from dsprof.collectors.loop import modules
from dsprof.collectors.recorder.record import CALLS, CALLS_AND_WAITS, NOTHING, Recorder
from dsprof.collectors.recorder.wait_targets import WeakStorage
from dsprof.ondisk import Flag
from dsprof.schema import Kind

warnings.simplefilter("ignore")


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def every_collective(rank: int, async_op: bool) -> None:
    """Once each; 4-byte elements, S bytes as the test has them."""

    def run(function: Callable[..., Any], *args: Any) -> None:
        work = function(*args, async_op=async_op)
        if async_op:
            work.wait()

    t = torch.ones(100)
    halves = [torch.ones(50), torch.ones(50)]
    parts = [torch.empty(100), torch.empty(100)]
    run(dist.all_reduce, t)
    run(dist.broadcast, t, 0)
    run(dist.reduce, t, 0)
    run(dist.all_gather, parts, t)
    run(dist.all_gather_into_tensor, torch.empty(200), t)
    run(dist.reduce_scatter, torch.empty(50), halves)
    run(dist.reduce_scatter_tensor, torch.empty(50), t)
    run(dist.all_to_all_single, torch.empty(100), t)
    run(dist.gather, t, parts if rank == 0 else None, 0)
    run(dist.scatter, t, parts if rank == 0 else None, 0)
    run(dist.all_reduce, torch.ones(8, dtype=torch.int64))
    dist.barrier(async_op=async_op)


def overlapping(rank: int) -> None:
    works = [dist.all_reduce(torch.ones(10 * (i + 1)), async_op=True) for i in range(6)]
    for work in reversed(works):
        work.wait()


def issued_first(rank: int, key: str, issue: Callable[[], Any]) -> Any:
    """What `issue` returns. Rank 1 calls it once rank 0 has, and has marked it."""
    assert RECORDER is not None
    store = distributed_c10d._get_default_store()
    if rank == 1:
        store.wait([key])
    result = issue()
    if rank == 0:
        RECORDER.mark(Kind.MARK, RECORDER.intern("issued"))
        store.set(key, "")
    return result


def queued(rank: int) -> None:
    def issue() -> list[Any]:
        return [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(4)]

    for work in issued_first(rank, "queued", issue):
        work.wait()


def queued_behind_unrecorded(rank: int, collective: Callable[..., Any], *tensors: torch.Tensor) -> None:
    recorder = RECORDER
    assert recorder is not None

    def issue() -> tuple[Any, list[Any]]:
        recorder.pass_over(CALLS)
        unrecorded = [collective(*tensors, async_op=True) for _ in range(2)]
        recorder.pass_over(NOTHING)
        return dist.all_reduce(torch.ones(10), async_op=True), unrecorded

    recorded, unrecorded = issued_first(rank, f"behind {collective.__name__}", issue)
    recorded.wait()
    recorder.pass_over(CALLS_AND_WAITS)
    for work in unrecorded:
        work.wait()
    recorder.pass_over(NOTHING)


def coalesced(rank: int) -> None:
    with distributed_c10d._coalescing_manager():
        dist.all_reduce(torch.ones(10))
        dist.all_reduce(torch.ones(20))
    with distributed_c10d._coalescing_manager():
        dist.all_gather_into_tensor(torch.empty(20), torch.ones(10))
        dist.all_gather_into_tensor(torch.empty(20), torch.ones(10))
    with distributed_c10d._coalescing_manager():
        dist.reduce_scatter_tensor(torch.empty(5), torch.ones(10))
        dist.reduce_scatter_tensor(torch.empty(5), torch.ones(10))


def p2p(rank: int) -> None:
    t = torch.ones(25)
    for tag in (0, 7, 7):
        if rank == 0:
            dist.send(t, 1, tag=tag)
        else:
            dist.recv(t, 0, tag=tag)
    works = [dist.isend(t, 1 - rank), dist.irecv(torch.empty(25), 1 - rank)]
    for work in works:
        assert work is not None
        work.wait()
    if rank == 0:
        dist.send(t, 1, tag=9)
    else:
        dist.recv(t, tag=9)


def ddp(rank: int) -> None:
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Linear(10, 1)))
    for _ in range(2):
        model(torch.ones(4, 10)).sum().backward()


def ddp_buffers(rank: int) -> None:
    """The parameters and buffers when it wraps, and the buffers again in each forward, are sent inside C++."""
    model = DistributedDataParallel(torch.nn.BatchNorm1d(4))
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()


def ddp_late_peer(rank: int) -> None:
    """Rank 1 computes its gradients 0.5 s late; the reducer of rank 0 waits in C++."""
    model = DistributedDataParallel(torch.nn.Linear(10, 1))
    loss = model(torch.ones(4, 10)).sum()
    loss.register_hook(lambda gradient: time.sleep(0.5 * rank))
    dist.barrier()
    loss.backward()


class Reentrant(torch.nn.Module):
    """Its first gradients are made in the outer backward, its last in one inside, on rank 1 after 0.5 s."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.first, self.last = rank, torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = checkpoint(self.slowly, x, use_reentrant=True)
        out: torch.Tensor = self.last(hidden)
        return out

    def slowly(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: time.sleep(0.5 * self.rank))
        return out


def ddp_reentrant(rank: int) -> None:
    """The reducer waits at the end of the inner backward; in the second step for two buckets."""
    model = DistributedDataParallel(Reentrant(rank), bucket_cap_mb=1e-5)
    for _ in range(2):
        loss = model(torch.ones(2, 4, requires_grad=True)).sum()
        dist.barrier()
        loss.backward()


def ddp_static(rank: int) -> None:
    """The first backward issues its collectives among the callbacks at its end."""
    model = DistributedDataParallel(torch.nn.Linear(10, 1), static_graph=True)
    for _ in range(2):
        model(torch.ones(4, 10)).sum().backward()


def ddp_several(rank: int) -> None:
    """Two reducers in one backward."""
    one, two = (DistributedDataParallel(torch.nn.Linear(10, 10)) for _ in range(2))
    two(one(torch.ones(4, 10))).sum().backward()


def ddp_join(rank: int) -> None:
    """Rank 0 runs out of input first; from then on it waits in Python for the future of each bucket."""
    model = DistributedDataParallel(torch.nn.Linear(10, 1))
    with model.join():
        for _ in range(1 + 2 * rank):
            model(torch.ones(4, 10)).sum().backward()


def all_reduce_gradient(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)


def retained(rank: int) -> None:
    """Two backwards through one graph, with two collectives each and no DDP."""
    model = torch.nn.Linear(4, 4)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(all_reduce_gradient)
    loss = model(torch.ones(2, 4)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def reentrant(rank: int) -> None:
    """Each checkpointed part has a backward of its own inside the outer one; gradients are reduced in all three, in the
    outer one at first."""
    layers = [torch.nn.Linear(4, 4) for _ in range(3)]
    for layer in layers:
        layer.bias.register_post_accumulate_grad_hook(all_reduce_gradient)
    x = torch.ones(2, 4, requires_grad=True)
    x = checkpoint(layers[0], x, use_reentrant=True)
    x = checkpoint(layers[1], x, use_reentrant=True)
    layers[2](x).sum().backward()


def no_gradients(rank: int) -> None:
    """A backward without a collective, and a collective without a backward."""
    torch.nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(torch.ones(4))


def waits(rank: int) -> None:
    """Late, twice, in other orders; for batches, for futures, and for objects."""
    first = dist.all_reduce(torch.ones(4), async_op=True)
    second = dist.broadcast(torch.ones(4), 1, async_op=True)
    assert first is not None
    assert second is not None
    second.wait()
    time.sleep(0.02)
    first.wait()
    second.wait()
    ends = [
        dist.P2POp(dist.irecv, torch.empty(4), 1 - rank, tag=3),
        dist.P2POp(dist.isend, torch.ones(4), 1 - rank, tag=3),
    ]
    for work in dist.batch_isend_irecv(ends):
        work.wait()
    with distributed_c10d._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(torch.ones(10))
        dist.all_reduce(torch.ones(20))
    manager.wait()
    reduced = dist.all_reduce(torch.ones(4), async_op=True)
    assert reduced is not None
    reduced.get_future().then(lambda future: future.value()[0]).wait()
    found: list[object] = [None, None]
    dist.all_gather_object(found, rank)
    dist.broadcast_object_list(found, src=1)


def reused(rank: int) -> None:
    """Works are freed, and others take their addresses."""
    for number in range(200):
        works = [dist.all_reduce(torch.ones(1 + number % 7), async_op=True) for _ in range(3)]
        for at in (1, 0, 2):
            work = works[at]
            assert work is not None
            work.wait()


def let_go(rank: int) -> None:
    """Tensors that the job drops, with the work, which it may not have waited for. Those that are kept all the same are
    written down."""
    storages: dict[str, WeakStorage] = {}

    def call(name: str, size: int, function: Callable[[torch.Tensor], Any]) -> Any:
        tensor = torch.ones(size)
        storages[name] = WeakStorage(tensor.untyped_storage())
        return function(tensor)

    call("reduced", 10, dist.all_reduce)
    call("gathered", 10, lambda tensor: dist.all_gather_into_tensor(tensor, torch.ones(5)))
    call("gathered from", 10, lambda tensor: dist.all_gather_into_tensor(torch.ones(20), tensor))
    call("scattered", 10, lambda tensor: dist.reduce_scatter_tensor(tensor, torch.ones(20)))
    call("scattered from", 10, lambda tensor: dist.reduce_scatter_tensor(torch.ones(5), tensor))
    call("waited for", 10, lambda tensor: dist.all_reduce(tensor, async_op=True)).wait()
    call("not waited for", 10, lambda tensor: dist.all_reduce(tensor, async_op=True))
    call("functional", 10, lambda tensor: functional.all_reduce(tensor, "sum", world())).tolist()
    message = (dist.isend, dist.irecv)[rank]
    work = call("message", 10, lambda tensor: message(tensor, 1 - rank))
    if rank == 1:
        work.wait()
    dist.barrier()  # so that it has arrived
    del work
    dist.barrier()
    until = time.monotonic() + 30
    while (kept := [name for name, storage in storages.items() if not storage.gone]) and time.monotonic() < until:
        time.sleep(0.01)
    (FOLDER / f"rank{rank}-kept.json").write_text(json.dumps(kept))


def roots(rank: int) -> None:
    """Named by their rank in the group, which is the other way round."""
    group = dist.new_group([0, 1])
    t, parts = torch.ones(4), [torch.ones(4), torch.ones(4)]
    dist.broadcast(t, 1, group=group)
    dist.reduce(t, 1, group=group)
    dist.gather(t, parts if rank == 1 else None, 1, group=group)
    dist.scatter(t, parts if rank == 1 else None, 1, group=group)
    alone = dist.new_group([1])
    if rank == 1:
        dist.broadcast(t, 1, group=alone)


def functional_waits(rank: int) -> None:
    """Of several tensors, in another order than that of issue, and again."""
    one = functional.all_reduce(torch.ones(3), "sum", world())
    several = functional.all_gather_into_tensor_coalesced([torch.ones(2), torch.ones(5)], world())
    two = functional.reduce_scatter_tensor(torch.ones(4), "sum", 0, world())
    assert two.tolist() == [2, 2]
    assert [each.tolist() for each in several] == [[1] * 4, [1] * 10]
    assert one.tolist() == [2, 2, 2]
    torch.ops._c10d_functional.wait_tensor(torch.ones(4))  # nobody's


def functional_messages(rank: int) -> None:
    """The send's result is a placeholder; both receives have one storage, and one wait."""
    ops, group = torch.ops._c10d_functional, world().group_name
    if not hasattr(ops, "isend"):  # torch 2.11
        return
    both = torch.ones(2, 8)
    if rank == 0:
        ops.wait_tensor(ops.isend(torch.ones(8), 1, 0, group))
        for tag in range(2):
            ops.irecv(both[tag], 1, tag, group)
        ops.wait_tensor(both)
    else:
        ops.wait_tensor(ops.irecv(torch.ones(8), 0, 0, group))
        for tag in range(2):
            dist.send(both[tag], 0, tag=tag)


def many_messages(rank: int) -> None:
    """Under way at once."""
    tensor = torch.ones(1)
    works = [dist.isend(tensor, 1) if rank == 0 else dist.irecv(torch.empty(1), 0) for _ in range(6000)]
    for work in works:
        assert work is not None
        work.wait()


def profiled_messages(rank: int) -> None:
    """Somebody else listens to gloo's scopes: both see the end."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        messages(rank)
    name = ("gloo:send", "gloo:recv")[rank]
    assert [event.name for event in profiler.events() if event.name.startswith("gloo:")] == [name]


def dropped_messages(rank: int) -> None:
    """Nobody waits for the send."""
    if rank == 0:
        work = dist.isend(torch.ones(1), 1)
        dist.barrier()
        del work
    else:
        dist.recv(torch.empty(1), 0)
        dist.barrier()


def messages(rank: int) -> None:
    work = dist.isend(torch.ones(1), 1) if rank == 0 else dist.irecv(torch.empty(1), 0)
    assert work is not None
    work.wait()


def told(rank: int) -> None:
    """While the engine tells of a communication, the wait for what it calls is for what it told."""
    recorder = RECORDER
    assert recorder is not None
    recorder.pass_over(CALLS)
    group, now = recorder.group("0"), time.perf_counter_ns()
    number, name = recorder.number("0"), recorder.intern("all_reduce")
    flags = int(Flag.ENGINE)
    handle = recorder.comm(int(Kind.COMM), name, now, 0, now, 16, group, number, -1, 0, flags, 0, 0, 0, 0)
    dist.all_reduce(torch.ones(4))
    recorder.pass_over(NOTHING)
    recorder.span_end(handle, now, time.perf_counter_ns(), -1)
    dist.all_reduce(torch.ones(4))


def subgroups(rank: int) -> None:
    one, two, alone = dist.new_group([0, 1]), dist.new_group([0, 1]), [dist.new_group([0]), dist.new_group([1])][rank]
    t = torch.ones(4)
    for group in (one, two, one, alone):
        dist.all_reduce(t, group=group)
    dist.destroy_process_group(one)
    three = dist.new_group([0, 1])
    dist.all_reduce(t, group=three)


def functional_collectives(rank: int) -> None:
    reduced = functional.all_reduce(torch.ones(3), "sum", world())
    assert reduced.tolist() == [2, 2, 2]


def threads(rank: int) -> None:
    """One group a thread, as a group's collectives need an order."""
    groups = [dist.new_group([0, 1]) for _ in range(3)]

    def run(group: dist.ProcessGroup) -> None:
        for _ in range(20):
            dist.all_reduce(torch.ones(5), group=group)

    workers = [threading.Thread(target=run, args=(group,)) for group in groups]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def failing(rank: int) -> None:
    """The call raises (no such root), and the wait does (gloo has no int16), like without hooks; no record ends."""
    options = dist.BroadcastOptions()
    options.rootRank = 9
    broadcast: Any = world().broadcast
    with pytest.raises((RuntimeError, ValueError), match="root rank"):
        broadcast([torch.ones(4)], options)
    work = dist.all_reduce(torch.ones(4, dtype=torch.int16), async_op=True)
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        work.wait()


def late_peer(rank: int) -> None:
    """Rank 1 comes 0.2 s late."""
    dist.barrier()
    time.sleep(0.2 * rank)
    dist.all_reduce(torch.ones(4))
    dist.barrier()
    time.sleep(0.2 * rank)
    dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4))


def renewed(rank: int) -> None:
    """The second world of the process has groups of the same names."""
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
    init(rank, "second")
    dist.all_reduce(torch.ones(4))


def lost_peer(rank: int) -> None:
    """Rank 1 leaves; rank 0's all-reduce fails after it was issued, and its receive in the wait."""
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group()
        return
    time.sleep(0.1)
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(torch.ones(4), async_op=True),
        lambda: dist.irecv(torch.ones(4), 1),
    ]
    for call in calls:
        with pytest.raises(RuntimeError):
            call().wait()


SECTIONS: dict[str, Callable[[int], None]] = {
    "sync": lambda rank: every_collective(rank, async_op=False),
    "async": lambda rank: every_collective(rank, async_op=True),
    "overlapping": overlapping,
    "queued": queued,
    "queued_behind_unrecorded": lambda rank: queued_behind_unrecorded(rank, dist.all_reduce, torch.ones(10)),
    "queued_behind_unrecorded_scatter": lambda rank: queued_behind_unrecorded(
        rank, dist.reduce_scatter_tensor, torch.empty(5), torch.ones(10)
    ),
    "coalesced": coalesced,
    "monitored": lambda rank: dist.monitored_barrier(),
    "p2p": p2p,
    "ddp": ddp,
    "ddp_buffers": ddp_buffers,
    "ddp_late_peer": ddp_late_peer,
    "ddp_reentrant": ddp_reentrant,
    "ddp_static": ddp_static,
    "ddp_several": ddp_several,
    "ddp_join": ddp_join,
    "retained": retained,
    "reentrant": reentrant,
    "no_gradients": no_gradients,
    "waits": waits,
    "reused": reused,
    "let_go": let_go,
    "roots": roots,
    "functional_waits": functional_waits,
    "functional_messages": functional_messages,
    "many_messages": many_messages,
    "profiled_messages": profiled_messages,
    "dropped_messages": dropped_messages,
    "told": told,
    "subgroups": subgroups,
    "functional": functional_collectives,
    "threads": threads,
    "failing": failing,
    "late_peer": late_peer,
    "renewed": renewed,
    "lost_peer": lost_peer,
}

FOLDER = Path()
RECORDER: Recorder | None = None


def init(rank: int, store: str) -> None:
    dist.init_process_group("gloo", store=FileStore(str(FOLDER / store), 2), rank=rank, world_size=2)


def main(kind: str, rank: int, folder: Path) -> None:
    global FOLDER, RECORDER
    FOLDER = folder
    torch.set_num_threads(1)
    RECORDER = recorder = open_recorder(kind, folder / f"rank{rank}")
    uninstall = [collectives.watch(recorder), modules.watch(recorder)]
    init(rank, "first")
    for name, section in SECTIONS.items():
        time.sleep(0.02)  # let the thread see the last ends
        recorder.mark(Kind.MARK, recorder.intern(f"section {name}"))
        section(rank)
    for undo in uninstall:
        undo()
    recorder.close()
    counters = {"records": recorder.records, "dropped": recorder.dropped, "errors": recorder.errors}
    (folder / f"rank{rank}.json").write_text(json.dumps(counters))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    os._exit(0)  # gloo jobs sometimes abort on their way out, with any profiler or none
