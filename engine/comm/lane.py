"""A lane runs communications, or reads and writes of a disk, in order, beside the computation: on CPU a thread, on a
GPU a stream.

Each lane has a process group of its own, so the collectives of two lanes never have to agree on an order between them,
and each reports when its work truly began and ended, which c10d does not on CPU.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, Protocol, Unpack

import torch
import torch.distributed as dist

from ..hooks import Attributes, Hooks, Position

Work = Callable[[], object]
"""A blocking communication, read or write; what it returns is dropped."""

Waiter = Callable[[Callable[[float], bool]], None]
"""Waits: it is given what waits for at most so many seconds and says whether that was enough. May raise instead."""

AMOUNTS: Final = ("bytes", "dtype", "value")
"""Attributes of a communication that are not those of a wait for it."""


class Ticket(Protocol):
    """A communication that was submitted to a lane."""

    @property
    def done(self) -> bool:
        """Whether its result may be read without waiting."""

    def wait(self) -> None:
        """Return when the result may be read by what the caller does next; raises what the communication raised."""


class Lane(Protocol):
    """Where communications run, one after the other."""

    name: str

    def submit(
        self, work: Work, name: str, at: Position | None = None, *, fresh: bool = False,
        **attributes: Unpack[Attributes],
    ) -> Ticket:  # fmt: skip
        """Run `work` after what was submitted before. It must not touch what the caller still writes.

        It is reported under `name`, with these attributes, as of where training stands now, or of `at`. `fresh`: it
        reads and writes only memory that it allocates itself, so on a device it need not wait for the computation. Who
        uses that memory afterwards says so by `Tensor.record_stream`.
        """

    def poll(self) -> None:
        """Report what has ended since, where nobody waits for that."""
        return

    def close(self) -> None:
        """Finish what was submitted, and stop."""
        return


# --- on CPU: a thread


@dataclass(slots=True)
class _LaneJob:
    work: Work
    issue_ns: int
    position: Position
    ticket: LaneTicket


class LaneTicket:
    """What was submitted to a lane that is a thread."""

    def __init__(self, hooks: Hooks, name: str, attributes: Attributes, waiter: Waiter | None) -> None:
        self.name = name
        self.attributes = attributes
        self._hooks = hooks
        self._waiter = waiter
        self._lock = threading.Lock()  # an Event costs three times as much
        self._lock.acquire()
        self._finished = False
        self._reported = False
        self.error: BaseException | None = None

    def finish(self) -> None:
        self._finished = True
        self._lock.release()

    @property
    def done(self) -> bool:
        return self._finished

    def wait(self) -> None:
        # That its end was needed here is reported even if nobody had to stand still for it: another time they may have
        # to.
        if not self._finished or (not self._reported and self._hooks.listening):
            self._reported = True
            span = None
            if self._hooks.listening:
                about = {key: value for key, value in self.attributes.items() if key not in AMOUNTS}
                span = self._hooks.begin("wait", self.name, **about)  # type: ignore[arg-type]
            try:
                if self._waiter is None:
                    self._lock.acquire()
                else:
                    self._waiter(lambda seconds: self._lock.acquire(timeout=seconds))
                self._lock.release()
            finally:
                self._hooks.end(span)
        self.check()

    def check(self) -> None:
        """Raise what it raised, if it is done and did."""
        if self.error is not None:
            raise self.error


class CpuLane(Lane):
    """A thread that runs what blocks, in order: collectives, or with `kind` "copy" reads or writes of a disk.

    `lane` is the name that spans have for it. `link` (bytes/s) models an interconnect: each communication then takes at
    least its bytes over `link`, so overlap and bucket sizes have an effect that can be seen on a machine without one.
    """

    def __init__(
        self, name: str, hooks: Hooks, link: float | None = None, *, kind: Literal["comm", "copy"] = "comm",
        lane: str | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.waiter: Waiter | None = None
        """How whoever waits for a communication does it, if not simply for as long as it takes."""
        self._hooks = hooks
        self._jobs: queue.SimpleQueue[_LaneJob | None] = queue.SimpleQueue()
        self._broken: list[BaseException] = []
        """Why no communication is run any more."""
        self._thread = threading.Thread(
            target=_run_jobs, args=(self._jobs, kind, lane or f"comm.{name}", hooks, link, self._broken),
            name=f"dsprof-{name}", daemon=True,
        )  # fmt: skip
        self._thread.start()
        # The thread holds the queue, not the lane: an engine that is dropped takes its threads along.
        weakref.finalize(self, self._jobs.put, None)

    def submit(
        self, work: Work, name: str, at: Position | None = None, *, fresh: bool = False,
        **attributes: Unpack[Attributes],
    ) -> LaneTicket:  # fmt: skip
        if not self._thread.is_alive():
            raise RuntimeError(f"the lane {self.name!r} is closed: the engine was destroyed")
        ticket = LaneTicket(self._hooks, name, attributes, self.waiter)
        self._jobs.put(_LaneJob(work, time.monotonic_ns(), at or self._hooks.position, ticket))
        return ticket

    def abort(self, error: BaseException) -> None:
        """Run nothing any more: what has not begun fails with `error`."""
        self._broken.append(error)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()


class HostLane(CpuLane):
    """A thread that runs communications of a device's tensors which block the host, as gloo's do: they begin when the
    computation has come as far as it was when they were submitted, and have ended on the device when they are done."""

    def __init__(self, name: str, hooks: Hooks, device: torch.device, link: float | None = None) -> None:
        super().__init__(name, hooks, link)
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def submit(
        self, work: Work, name: str, at: Position | None = None, *, fresh: bool = False,
        **attributes: Unpack[Attributes],
    ) -> LaneTicket:  # fmt: skip
        ready = None if fresh else torch.cuda.current_stream(self._device).record_event()

        def run() -> None:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                if ready is not None:
                    self._stream.wait_event(ready)
                work()
                self._stream.synchronize()

        return super().submit(run, name, at, **attributes)


def _run_jobs(
    jobs: queue.SimpleQueue[_LaneJob | None], kind: Literal["comm", "copy"], lane: str, hooks: Hooks,
    link: float | None, broken: list[BaseException],
) -> None:  # fmt: skip
    with torch.no_grad():
        while (job := jobs.get()) is not None:
            begin, ticket = time.monotonic_ns(), job.ticket
            span = None
            if hooks.listening:  # before the attributes are unpacked, which costs more than to ask
                span = hooks.begin(
                    kind, ticket.name, lane=lane, issue_ns=job.issue_ns, at=job.position, **ticket.attributes
                )
            try:
                if broken:
                    raise broken[0]
                job.work()
                if link is not None:
                    size = ticket.attributes.get("bytes") or 0
                    time.sleep(max(0.0, size / link - (time.monotonic_ns() - begin) / 1e9))
            except BaseException as error:
                ticket.error = error
            hooks.end(span)
            ticket.finish()
            del job, ticket, span  # until the next job comes: their tensors would stay alive


# --- on a GPU: a stream


class _CudaTicket:
    """Keeps what the work uses until its end is waited for: the computation's stream would be given its memory anew."""

    def __init__(self, end: torch.cuda.Event, work: Work) -> None:
        self._end = end
        self._work: Work | None = work

    @property
    def done(self) -> bool:
        return bool(self._end.query())

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._end)
        self._work = None


@dataclass(frozen=True, slots=True)
class _Timed:
    """A communication whose end on the device is still to be reported."""

    begin: torch.cuda.Event
    end: torch.cuda.Event
    name: str
    attributes: Attributes
    issue_ns: int
    position: Position


class CudaLane:
    """A stream beside the computation's. A wait is a wait of the stream, not of the host.

    When somebody listens each communication is bracketed by timing events, and its call reported as a `launch`; `poll`
    reports the communications that are over.
    """

    def __init__(self, name: str, hooks: Hooks) -> None:
        self.name = name
        self._hooks = hooks
        self._stream = torch.cuda.Stream()
        self._timed: list[_Timed] = []
        self._origin: tuple[torch.cuda.Event, int] | None = None

    def submit(
        self, work: Work, name: str, at: Position | None = None, *, fresh: bool = False,
        **attributes: Unpack[Attributes],
    ) -> Ticket:  # fmt: skip
        listening = self._hooks.listening
        if listening and self._origin is None:
            self._origin = self._set_origin()
        issue_ns = time.monotonic_ns()
        if not fresh:
            self._stream.wait_stream(torch.cuda.current_stream())
        end = torch.cuda.Event(enable_timing=listening)
        with torch.cuda.stream(self._stream), torch.no_grad():
            begin = torch.cuda.Event(enable_timing=True) if listening else None
            if begin is not None:
                begin.record()
            with self._hooks.span(
                "launch", name, module=attributes.get("module"), purpose=attributes.get("purpose")
            ):  # fmt: skip
                work()
            end.record()
        if begin is not None:
            self._timed.append(_Timed(begin, end, name, attributes, issue_ns, at or self._hooks.position))
        return _CudaTicket(end, work)

    def poll(self) -> None:
        """Report the communications that have ended; never waits for one."""
        while self._origin is not None and self._timed and self._timed[0].end.query():
            timed = self._timed.pop(0)
            origin, origin_ns = self._origin
            start_ns = origin_ns + round(1e6 * origin.elapsed_time(timed.begin))
            end_ns = start_ns + round(1e6 * timed.begin.elapsed_time(timed.end))
            self._origin = timed.end, end_ns  # a device's times are floats: those of an hour come in quarters of a ms
            span = self._hooks.begin(
                "comm", timed.name, lane=f"comm.{self.name}", issue_ns=timed.issue_ns, at=timed.position,
                **timed.attributes,
            )  # fmt: skip
            if span is not None:
                span.start_ns = start_ns
            self._hooks.end(span, at_ns=end_ns)

    def close(self) -> None:
        self._stream.synchronize()
        self.poll()

    def _set_origin(self) -> tuple[torch.cuda.Event, int]:
        """One event whose host time is known: the only time that a lane waits for the device, once."""
        event = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            event.record()
        event.synchronize()
        return event, time.monotonic_ns()


class Done:
    """The ticket of a communication that is not needed: a group of one."""

    done = True

    def wait(self) -> None:
        return


class Inline(Lane):
    """No lane: a communication runs when it is submitted, in a group whose other collectives run so too."""

    name = "main"

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks

    def submit(
        self, work: Work, name: str, at: Position | None = None, *, fresh: bool = False,
        **attributes: Unpack[Attributes],
    ) -> Ticket:  # fmt: skip
        attributes["seq"] = None  # its number is among all calls in the group, not all of which come through here
        with self._hooks.span("comm", name, at=at, **attributes):
            work()
        return Done()


def open_lane(name: str, device: torch.device, hooks: Hooks, link: float | None = None) -> CpuLane | CudaLane:
    """The lane for tensors on `device`, for groups of the job's backend. `link` (bytes/s) is for threads only."""
    if device.type == "cuda":
        if dist.is_initialized() and dist.get_backend() == "gloo":
            return HostLane(name, hooks, device, link)
        return CudaLane(name, hooks)
    return CpuLane(name, hooks, link)
