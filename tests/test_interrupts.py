"""What a signal's handler of the job raises while a hook of ours runs reaches the job; what is ours does not."""

from __future__ import annotations

import functools
import gc
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from armed import captured, train
from captures import RECORDERS, build_helper, open_recorder, read_rows

from dsprof.collectors.hooking import errors
from dsprof.collectors.hooking.signals import by_handler
from dsprof.collectors.loop import modules
from dsprof.collectors.recorder import chunks
from dsprof.collectors.recorder.python_recorder import PyRecorder
from dsprof.collectors.recorder.record import Recorder
from dsprof.ondisk import CHUNK_RECORDS
from dsprof.schema import Kind


class Preempted(Exception):
    pass


def raises(number: int, frame: FrameType | None) -> None:
    raise Preempted(number)


def takes_anything(*given: object) -> None:
    raise Preempted(*given[:1])


def cleans_up_first(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    deeper(number)


def deeper(number: int) -> None:
    raise TimeoutError(number)


class Handler:
    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise Preempted(number)

    def method(self, number: int, frame: FrameType | None) -> None:
        raise OSError("preempted")


HANDLERS: dict[str, Callable[..., None]] = {
    "a function": raises,
    "any arguments": takes_anything,
    "another function raises it": cleans_up_first,
    "an object": Handler(),
    "a method": Handler().method,
    "partly applied": functools.partial(raises),
    "a lambda": lambda number, frame: deeper(number),
}


@pytest.fixture
def handled() -> Iterator[Callable[[Callable[..., None]], None]]:
    """Installs a handler of SIGUSR1, for the test."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler) and None
    signal.signal(signal.SIGUSR1, before)


def interrupted() -> None:
    signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize("how", HANDLERS)
def test_what_a_handler_raised_is_told(how: str, handled: Callable[[Callable[..., None]], None]) -> None:
    handled(HANDLERS[how])
    with pytest.raises((Preempted, OSError)) as caught:
        interrupted()
    assert by_handler(caught.value)
    handled(HANDLERS[how])
    with pytest.raises((Preempted, OSError)) as caught:
        signal.raise_signal(signal.SIGUSR1)  # in the very frame that catches it
    assert by_handler(caught.value)


def test_what_is_ours_is_told() -> None:
    def ours(number: int, value: object) -> None:
        raise ValueError(number)

    for arguments in ((10, None), (10, "frame"), (10, object())):
        with pytest.raises(ValueError, match="10") as caught:
            ours(*arguments)
        assert not by_handler(caught.value)
    with pytest.raises(ValueError, match="x") as caught:
        int("x")
    assert not by_handler(caught.value)
    assert not by_handler(ValueError("never raised"))


@pytest.mark.parametrize("look", [by_handler, lambda error: errors.count_error("a hook", error)])
def test_to_look_at_an_error_keeps_nothing_of_the_stack(
    look: Callable[[Exception], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "noted", [])
    kept: list[weakref.ref[Preempted]] = []

    def hook(said: str) -> None:
        try:
            int(said)
        except ValueError as error:
            look(error)

    def step() -> None:
        tensor = Preempted()
        kept.append(weakref.ref(tensor))
        hook("x")

    gc.disable()
    try:
        step()
        assert kept[0]() is None
    finally:
        gc.enable()


def test_a_hook_counts_its_own_and_passes_on_the_jobs(
    handled: Callable[[Callable[..., None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "noted", [])

    def hook(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            errors.count_error("a hook", error)

    handled(raises)
    with pytest.raises(Preempted):
        hook(interrupted)
    assert errors.noted == []
    hook(lambda: {}["x"])
    assert errors.noted == [("a hook", "KeyError: 'x'")]


@pytest.fixture(params=RECORDERS)
def recorder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Recorder]:
    if request.param == "native":
        build_helper()
    opened = open_recorder(request.param, tmp_path / "capture")
    yield opened
    opened.close()


class Interrupting(torch.Tensor):
    """A signal comes in while a hook asks for its size."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if getattr(function, "__name__", "") == "__get__" and "nbytes" in repr(function.__self__):
            interrupted()
        return super().__torch_function__(function, types, args, kwargs or {})


class Broken(torch.Tensor):
    @property
    def nbytes(self) -> int:
        raise ValueError("no size")


def test_a_forwards_hook(recorder: Recorder, handled: Callable[[Callable[..., None]], None]) -> None:
    layer = torch.nn.Identity()
    uninstall = modules.watch(recorder, every=True)
    try:
        handled(raises)
        interrupting = torch.ones(2).as_subclass(Interrupting)
        with pytest.raises(Preempted):
            layer(interrupting)
        broken = torch.ones(2).as_subclass(Broken)
        assert layer(broken) is broken
        assert layer(torch.ones(2)).sum() == 2
    finally:
        uninstall()
    assert recorder.errors == 0


def test_the_names_of_modules(recorder: Recorder, handled: Callable[[Callable[..., None]], None]) -> None:
    class Named(torch.nn.Module):
        signalled = 0

        def named_modules(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            return super().named_modules(*args, **kwargs)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Odd(type):
        def __getattribute__(cls, name: str) -> object:
            if name == "__name__" and cls.act is not None:  # type: ignore[attr-defined]
                cls.act()  # type: ignore[attr-defined]
            return super().__getattribute__(name)

    class Unnamed(Named, metaclass=Odd):
        act: Callable[[], None] | None = None

    def fails() -> None:
        raise ValueError("no name")

    uninstall = modules.watch(recorder, every=True)
    try:
        handled(raises)
        Unnamed.act = staticmethod(interrupted)
        with pytest.raises(Preempted):
            Unnamed()(torch.ones(1))
        assert recorder.errors == 0
        Unnamed.act = staticmethod(fails)
        module = Unnamed()
        assert module(torch.ones(1)) == 1
        assert recorder.errors == 1
    finally:
        Unnamed.act = None
        uninstall()


@pytest.mark.parametrize("begun", [False, True], ids=["before its thread", "when its thread has begun"])
def test_a_chunk_whose_making_was_interrupted_is_made_anew(
    begun: bool, tmp_path: Path, handled: Callable[[Callable[..., None]], None]
) -> None:
    """A chunk is made by a thread of its own, to which no signal comes: what is interrupted is who starts it."""
    recorder, start = PyRecorder(tmp_path, patience_s=60.0), chunks._thread.start_new_thread
    name = recorder.intern("mark")
    told: list[object] = []

    def fill_a_chunk() -> None:
        for _ in range(CHUNK_RECORDS):
            recorder.mark(int(Kind.MARK), name)

    def interrupting(*args: Any) -> int:
        patch.setattr(chunks._thread, "start_new_thread", start)
        if begun:
            start(*args)
        interrupted()
        return 0

    handled(raises)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", told.append)
        patch.setattr(chunks._thread, "start_new_thread", interrupting)
        with pytest.raises(Preempted):
            fill_a_chunk()
        fill_a_chunk()
        recorder.close()
    assert (recorder.errors, recorder.dropped, told) == (0, 0, [])
    rows = read_rows(tmp_path)
    assert [row.kind for row in rows] == [Kind.MARK] * (CHUNK_RECORDS // 2 + CHUNK_RECORDS)


TIMED_OUT = """
import signal, time
import torch, torch.distributed as dist
class TimedOut(OSError):  # such as TimeoutError: of a class that hooks know for errors of their own
    pass
raised = caught = 0
def handler(number, frame):  # where torch is interrupted it may well catch what is raised
    global raised, armed
    if armed and "dsprof" in frame.f_code.co_filename and frame.f_code.co_name != "on_collection":
        raised += 1
        armed = False  # one a turn: another would come while this one is on its way
        raise TimedOut
armed = False
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
value = torch.ones(2)
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.00037)
until = time.monotonic() + 60
for turn in range(1_000_000):
    try:
        armed = turn > 10
        model(value)
        dist.all_reduce(value, async_op=True).wait()
        optimizer.step()
    except TimedOut:
        caught += 1
    finally:
        armed = False
    if raised >= 40 or time.monotonic() > until:
        break
signal.setitimer(signal.ITIMER_REAL, 0)
print(raised == caught, raised >= 3, raised, caught)
"""


@pytest.mark.parametrize("native", ["1", "0"])
def test_each_exception_of_a_handler_reaches_the_script(native: str, tmp_path: Path) -> None:
    if native == "1":
        build_helper()
    done = train(tmp_path, TIMED_OUT, native=native)
    assert (done.returncode, done.stderr, done.stdout.split()[:2]) == (0, "", ["True", "True"]), done.stdout
    captured(tmp_path)
