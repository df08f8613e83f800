"""Memory that streams of a GPU share, and how often the host waits for it, on streams that are made up."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from ranks import Ranks

from dsprof.engine import initialize
from dsprof.engine.comm.comm import Comm, Rows
from dsprof.engine.comm.lane import _CudaTicket
from dsprof.engine.config import Config, ZeroConfig
from dsprof.engine.setup.initialize import warn_untried
from dsprof.engine.zero.bucket import Bucket, BucketExchange, await_host_copies
from dsprof.engine.zero.shares import Partition, equal
from dsprof.engine.zero.storage import BufferPool


class Stream:
    """Runs what it is given one after the other; `at`: when it is through with it, in ms."""

    def __init__(self) -> None:
        self.at = 0.0

    def run(self, ms: float) -> None:
        self.at += ms

    def wait_stream(self, other: Stream) -> None:
        self.at = max(self.at, other.at)

    def wait_event(self, event: Event) -> None:
        assert event.at is not None
        self.at = max(self.at, event.at)

    def synchronize(self) -> None:
        DEVICE.host = max(DEVICE.host, self.at)


class Event:
    def __init__(self) -> None:
        self.at: float | None = None

    def record(self) -> None:
        self.at = DEVICE.current.at

    def synchronize(self) -> None:
        assert self.at is not None
        DEVICE.host = max(DEVICE.host, self.at)


class Device:
    """`host`: the host's time, in ms. Its own clock and the device's began at the same moment."""

    def __init__(self) -> None:
        self.host = 0.0
        self.current = Stream()

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


DEVICE = Device()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    DEVICE.__init__()  # type: ignore[misc]
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: DEVICE.current)
    monkeypatch.setattr(torch.cuda, "stream", DEVICE.stream)
    return DEVICE


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    recorded: ClassVar[list[Stream]] = []

    def record_stream(self, stream: Any) -> None:
        self.recorded.append(stream)


def test_a_buffer_that_another_stream_takes_waits_for_what_reads_it(device: Device) -> None:
    pool = BufferPool(1)
    buffer = torch.zeros(8).as_subclass(OnGpu)
    reading, taking = device.current, Stream()
    reading.run(10)
    pool.give(buffer[:4])
    with device.stream(taking):
        again = pool.take(8, torch.float32, buffer.device)
        assert again.data_ptr() == buffer.data_ptr()
        assert taking.at == 10
    OnGpu.recorded.clear()
    pool.give(again)
    pool.give(torch.zeros(4).as_subclass(OnGpu))  # one is kept: this one is freed when the reader is through with it
    assert OnGpu.recorded == [reading]
    pool.clear()
    assert OnGpu.recorded == [reading, reading]
    assert pool.free == []


def test_gradients_in_host_memory_are_read_when_their_copy_is_over(device: Device) -> None:
    """The copy is on the stream of the backward, and who reads them on another."""
    copying = Stream()
    bucket = Bucket([], torch.float32)
    with device.stream(copying):
        copying.run(7)
        bucket.copied = torch.cuda.Event()
        bucket.copied.record()
    await_host_copies([bucket])
    assert device.host == 7
    assert bucket.copied is None


def test_gradients_go_to_host_memory_beside_the_computation(device: Device) -> None:
    param: Any = SimpleNamespace(
        device=torch.device("cuda"), master=torch.nn.Parameter(torch.zeros(3)), start=0, stop=3,
        master_shape=torch.Size((3,)), partition=Partition(6, equal(2)), place=0,
    )  # fmt: skip
    bucket = Bucket([param], torch.float32, offsets=[(0,)], widths=[3])
    bucket.reduce_into(torch.zeros(bucket.columns))
    bucket.rows = Rows(torch.zeros(2 * bucket.columns).as_subclass(OnGpu), bucket.shapes)
    bucket.landing = torch.ones(bucket.columns).as_subclass(OnGpu)
    exchange = BucketExchange(Comm(None, None), Config(zero_optimization=ZeroConfig(stage=2, overlap_comm=True)))
    lane, computing = Stream(), device.current
    with device.stream(lane):
        lane.run(5)
        end = torch.cuda.Event()
        end.record()
    computing.run(100)
    bucket.ticket = _CudaTicket(end, lambda: None)
    exchange._inflight.append(bucket)
    OnGpu.recorded.clear()
    exchange.drain(0)
    copies: Any = exchange._copies
    assert (copies.at, computing.at, device.host) == (5, 100, 0)  # behind its lane, not behind the computation
    assert OnGpu.recorded == [copies]  # the allocator gives what it copies from to nobody before
    copies.run(7)
    taking = Stream()
    with device.stream(taking):
        exchange.buffers.take(2 * bucket.columns, torch.float32, torch.device("cpu"))
    assert taking.at == 5  # the buffer was given back behind the lane's end
    await_host_copies([bucket])
    assert bucket.grads[0].tolist() == [1.0, 1.0, 1.0]


def reads_of_flags(rank: int) -> list[int]:
    """How often the flags of a step's buckets are read: on a GPU each time is a synchronization."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
    config = {
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 16},
    }  # fmt: skip
    engine = initialize(model=model, config=config)[0]
    found = []
    tolist = torch.Tensor.tolist
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 4)).sum())
        reads: list[torch.Tensor] = []
        with mock.patch.object(
            torch.Tensor, "tolist", lambda tensor, reads=reads: reads.append(tensor) or tolist(tensor)
        ):
            engine.zero.reducer.collect()
        found.append(len(reads))
        engine.step()
    assert len(engine.zero.reducer._buckets) > 3
    return found


def test_the_flags_of_all_buckets_are_read_at_once(ranks: Ranks) -> None:
    assert ranks.run(2, reads_of_flags) == [[1, 1, 1]] * 2


def test_several_gpus_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsprof.engine.setup.initialize._SAID", [])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for kind, size in (("cpu", 2), ("cuda", 1), ("cuda", 2), ("cuda", 2)):
            warn_untried(torch.device(kind), size)
    assert ["has not yet been run on several GPUs" in str(each.message) for each in caught] == [True]
