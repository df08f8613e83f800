"""What the engine does on a GPU, on one that is made up: streams and events on a clock that is set."""

from __future__ import annotations

import contextlib
import gc
import importlib
import struct
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from spans import recorded

from dsprof.engine.comm.lane import CudaLane
from dsprof.engine.hooks import FAILURES, Attributes, Hooks, Span
from dsprof.engine.monitors.comms_logger import CommsLogger, LoggedMessage
from dsprof.engine.monitors.wall_clock import CudaTimer, WallClock, timer_for
from dsprof.engine.pipe.p2p import Arrival, Message
from dsprof.engine.planner.example_inputs import given_inputs
from dsprof.engine.zero.shard import ShardedParam


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
    def __init__(self, enable_timing: bool = False) -> None:
        self.timed = enable_timing
        self.at: float | None = None

    def record(self) -> None:
        self.at = DEVICE.current.at

    def query(self) -> bool:
        return self.at is None or self.at <= DEVICE.host

    def synchronize(self) -> None:
        assert self.at is not None
        DEVICE.host = max(DEVICE.host, self.at)

    def elapsed_time(self, end: Event) -> float:
        """In ms, as a float of four bytes."""
        assert self.timed
        assert end.timed
        assert self.query()
        assert end.query(), "cudaErrorNotReady"
        assert self.at is not None
        assert end.at is not None
        rounded: float = struct.unpack("f", struct.pack("f", end.at - self.at))[0]
        return rounded


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
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    DEVICE.__init__()  # type: ignore[misc]
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: DEVICE.current)
    monkeypatch.setattr(torch.cuda, "stream", DEVICE.stream)
    monkeypatch.setattr("dsprof.engine.comm.lane.time", SimpleNamespace(monotonic_ns=lambda: round(1e6 * DEVICE.host)))
    yield DEVICE
    assert FAILURES == []


@pytest.fixture
def hooks() -> Hooks:
    return Hooks(clock=lambda: round(1e6 * DEVICE.host))


def comms(spans: list[Span]) -> list[tuple[float, float, int]]:
    """Start and end, in ms, and bytes."""
    return [(s.start_ns / 1e6, (s.end_ns or 0) / 1e6, s.bytes or 0) for s in spans if s.kind == "comm"]


def about(size: int = 8) -> Attributes:
    return {"purpose": "gradient", "bytes": size, "group": "dp", "seq": 0}


def test_a_lane_waits_for_the_computation_and_runs_beside_it(device: Device, hooks: Hooks) -> None:
    with recorded(hooks) as spans:
        lane = CudaLane("gradients", hooks)
        computing = device.current
        computing.run(10)
        first = lane.submit(lambda: device.current.run(5), "all_reduce", **about(8))
        computing.run(2)
        second = lane.submit(lambda: device.current.run(4), "all_reduce", **about(16))
        assert (computing.at, device.host) == (12, 0)  # neither the host nor the computation has waited
        assert not first.done
        lane.poll()
        assert comms(spans) == []  # neither has ended
        device.host = 16
        assert first.done
        assert not second.done
        lane.poll()
        assert comms(spans) == [(10, 15, 8)]
        second.wait()
        assert (computing.at, device.host) == (19, 16)
        lane.close()
        assert comms(spans) == [(10, 15, 8), (15, 19, 16)]
        assert [span.name for span in spans if span.kind == "launch"] == ["all_reduce"] * 2


def test_communications_from_before_anybody_listened_are_passed_over(device: Device, hooks: Hooks) -> None:
    lane = CudaLane("gradients", hooks)
    ticket = lane.submit(lambda: device.current.run(5), "all_reduce", **about())
    with recorded(hooks) as spans:  # from now on
        lane.submit(lambda: device.current.run(3), "all_reduce", **about(16))
        lane.close()
        assert comms(spans) == [(5, 8, 16)]
        assert ticket.done


def test_times_are_as_exact_after_a_day(device: Device, hooks: Hooks) -> None:
    """The device tells the time since an event in a float, which at a day's end goes in steps of 8 ms."""
    with recorded(hooks) as spans:
        lane = CudaLane("gradients", hooks)
        for _ in range(24 * 60):
            device.current.run(60_000)
            lane.submit(lambda: device.current.run(0.125), "all_reduce", **about()).wait()
            device.host = device.current.at
            lane.poll()
        start, end, _ = comms(spans)[-1]
        assert end - start == pytest.approx(0.125, abs=1e-3)
        assert end == pytest.approx(device.host, abs=1)


def test_memory_is_kept_until_its_communication_is_waited_for(device: Device, hooks: Hooks) -> None:
    lane = CudaLane("gradients", hooks)

    def send() -> tuple[Any, weakref.ref[torch.Tensor]]:
        sent = torch.ones(2)
        return lane.submit(lambda: sent.sum(), "all_reduce", **about()), weakref.ref(sent)

    ticket, memory = send()
    gc.collect()
    assert memory() is not None
    ticket.wait()
    gc.collect()
    assert memory() is None


def test_phases_are_timed_by_the_device(device: Device, hooks: Hooks) -> None:
    """The host is through with them at once."""
    lines: list[str] = []
    told: list[tuple[str, float]] = []
    timer = timer_for(torch.device("cuda"))
    assert isinstance(timer, CudaTimer)
    hooks.subscribe(WallClock(2, lines.append, lambda name, ms: told.append((name, ms)), timer))
    for hooks.step in range(2):
        for hooks.microbatch in range(2):
            with hooks.span("phase", "forward"):
                device.current.run(10)
            with hooks.span("phase", "backward"):
                with hooks.span("phase", "recompute", lane="autograd"):
                    device.current.run(4)
                device.current.run(16)
        with hooks.span("phase", "step"):
            device.current.run(5 * (1 + hooks.step))
        assert device.host == device.current.at  # waited for, since the curves are wanted of each step
    assert lines == ["[step 2] time (ms) | fwd: 20.00 | bwd: 40.00 | step: 7.50 | recompute: 8.00 | reduce: 0.00"]
    assert told == [
        (f"elapsed_time_ms_{name}", ms)
        for step in (5, 10)
        for name, ms in (("forward", 20), ("backward", 40), ("step", step))
    ]


def test_nothing_is_waited_for_between_lines(device: Device, hooks: Hooks) -> None:
    lines: list[str] = []
    hooks.subscribe(WallClock(3, lines.append, None, CudaTimer()))
    for hooks.step in range(3):
        assert device.host == 0
        with hooks.span("phase", "step"):
            device.current.run(6 + hooks.step)
    assert lines == ["[step 3] time (ms) | fwd: 0.00 | bwd: 0.00 | step: 7.00 | recompute: 0.00 | reduce: 0.00"]


def test_what_the_host_alone_timed_has_no_bandwidth(hooks: Hooks) -> None:
    """On a GPU it has only been handed over."""
    lines: list[str] = []
    logger = CommsLogger(rank=0, group_size=lambda group: 2, lanes_alone=True, verbose=True, show=lines.append)
    logger.end(Span("comm", "all_reduce", "main", 0, 0, 0, 0, 1000, bytes=4, group="tp", seq=0))
    logger.end(Span("comm", "all_reduce", "comm.gradients", 0, 0, 0, 0, 2000, bytes=4000, group="dp", seq=0))
    assert lines == [
        "comm op: all_reduce | time (ms): - | msg size: 4 B | algbw (GB/s): - | busbw (GB/s): -",
        "comm op: all_reduce | time (ms): 0.00 | msg size: 3.906 KB | algbw (GB/s): 2.00 | busbw (GB/s): 2.00",
    ]
    assert logger.tallies()[LoggedMessage("all_reduce", 2, 4)].count == 1


@pytest.mark.parametrize("on_gpu", [False, True])
def test_weights_that_come_to_the_host_are_there(on_gpu: bool) -> None:
    """A copy from the device to pinned memory that nobody waits for would not be."""
    shard = mock.Mock(is_cuda=on_gpu)
    param: Any = SimpleNamespace(store=None, shard=shard, secondary=None)
    piece = torch.ones(2)
    ShardedParam.write_shard(param, piece)
    shard.copy_.assert_called_once_with(piece, non_blocking=on_gpu)


def test_a_receive_into_memory_of_its_own_does_not_wait_for_the_computation(device: Device, hooks: Hooks) -> None:
    with recorded(hooks) as spans:
        lane = CudaLane("pipe.recv_F", hooks)
        computing = device.current
        computing.run(10)
        lane.submit(lambda: device.current.run(3), "recv", fresh=True, **about())
        later = lane.submit(lambda: device.current.run(2), "recv", fresh=True, **about())
        assert computing.at == 10
        later.wait()  # it had come long before
        assert computing.at == 10
        lane.close()
        assert comms(spans) == [(0, 3, 8), (3, 5, 8)]


def test_what_was_received_is_not_given_to_the_next_receive_while_it_is_used(device: Device) -> None:
    tensor = mock.Mock(is_cuda=True)
    arrival = Arrival(mock.Mock(), [Message([tensor], [True])])
    assert arrival.take().tensors == [tensor]
    tensor.record_stream.assert_called_once_with(device.current)


@pytest.mark.parametrize(("local_rank", "visible", "number"), [("3", 8, 3), ("3", 1, 0), ("0", 1, 0)])
def test_the_engines_gpu_becomes_the_current_one(
    monkeypatch: pytest.MonkeyPatch, local_rank: str, visible: int, number: int
) -> None:
    """A rank that sees its own GPU alone has number 0, whatever its local rank."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    launch = importlib.import_module("dsprof.engine.comm.launch")
    assert launch.local_device() == torch.device("cuda", number)
    assert chosen == [torch.device("cuda", number)]


def test_a_local_rank_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "5")
    launch = importlib.import_module("dsprof.engine.comm.launch")
    with pytest.raises(RuntimeError, match="LOCAL_RANK is 5, and this process sees 4 GPUs"):
        launch.local_device()


def test_an_example_may_be_on_a_device() -> None:
    """Models are tried on the CPU."""
    tensor = mock.Mock(spec=torch.Tensor)
    inputs = given_inputs({"ids": tensor})
    tensor.cpu.assert_called_once_with()
    assert inputs.kwargs["ids"] is tensor.cpu.return_value
