"""Where the training loop is: waiting for data, or in backward. (Forward: `modules`. Optimizer: `optimizers`.)

These hook points run a few times a step, so they are Python on both recorders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from dsprof.schema import Kind

from ..capture import facts
from ..capture.open_capture import OpenCapture
from ..hooking import dynamo, private
from ..hooking.hook_parts import HookPart, install_each
from ..hooking.timed import timed_by_arguments
from ..hooking.uninstall import Uninstall, in_reverse, replace_attribute
from ..hooking.wrap import stands_for
from . import optimizers

if TYPE_CHECKING:
    from ..recorder.record import Recorder


RUN: Final = "_engine_run_backward"
Entered = tuple["Recorder", int]
"""A backward that has begun: who records it, and the handle of its record, -1 where it is part of another one."""


def install(capture: OpenCapture) -> list[Uninstall]:
    """Record data loading and backward."""
    recorder = capture.recorder
    parts = (
        HookPart("waiting for the DataLoader is not recorded", lambda: _data(recorder), decisive=True),
        HookPart("the start of a DataLoader's workers is not recorded", lambda: _loader_start(recorder)),
        HookPart("backward passes are not recorded", lambda: _backward(recorder), decisive=True),
    )
    return install_each("phases", parts)


def _data(recorder: Recorder) -> Uninstall:
    iterator = private.need(facts.ITERATOR)
    return replace_attribute(iterator, "__next__", _of_loader(recorder, "data", iterator.__next__))


def _loader_start(recorder: Recorder) -> Uninstall:
    """Starting the workers anew each epoch is a stall of its own kind."""
    from torch.utils.data import DataLoader

    return replace_attribute(DataLoader, "__iter__", _of_loader(recorder, "loader_start", DataLoader.__iter__))


def _of_loader(recorder: Recorder, phase: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a loader, or of its iterator, with a row for each call, whose value is the loader's number."""
    name = recorder.intern(phase)

    def begin(args: tuple[Any, ...], _: dict[str, Any]) -> int:
        return recorder.begin(Kind.PHASE, name, -1, getattr(args[0], facts.LOADER, None))

    return timed_by_arguments(original, begin, recorder.end, phase)


class _Backwards:
    """Records the outermost backward pass, once there is a recorder. The first one shows that this process trains."""

    def __init__(self) -> None:
        self.on_first: Callable[[], None] | None = None
        self.recorder: Recorder | None = None
        self.name = 0
        self.watchers: list[Callable[[], None]] = []

    def enter(self) -> Entered | None:
        """A backward pass begins: what `leave` wants to know at its end."""
        if self.on_first is not None:
            first, self.on_first = self.on_first, None
            first()
        recorder = self.recorder
        if recorder is None:
            return None
        if recorder.enter_backward() > 1:  # re-entrant checkpointing: part of the outer one
            return recorder, -1
        self.begins(recorder)
        return recorder, recorder.begin(Kind.PHASE, self.name)

    def begins(self, recorder: Recorder) -> None:
        for watcher in self.watchers:
            try:
                watcher()
            except Exception as error:
                recorder.count_error("the beginning of backward", error)

    def leave(self, entered: Entered | None) -> None:
        if entered is None:
            return
        recorder, handle = entered
        if handle != -1:
            recorder.end(handle)
        recorder.leave_backward()
        if handle != -1:
            optimizers.after_backward()


_backwards = _Backwards()


def enter_backward() -> Entered | None:
    """A framework begins what it calls backward; the autograd engine's is part of it. What `leave_backward` wants."""
    return _backwards.enter()


def before_backward(call: Callable[[], None]) -> Uninstall:
    """Call it, while a capture is open, when an outermost backward pass begins."""
    _backwards.watchers.append(call)
    return lambda: _backwards.watchers.remove(call) if call in _backwards.watchers else None


def backward_begins(recorder: Recorder) -> None:
    """An outermost backward pass begins, which a framework records itself."""
    _backwards.begins(recorder)


def leave_backward(entered: Entered | None) -> None:
    """It ended."""
    _backwards.leave(entered)


def before_first(on_first: Callable[[], None]) -> None:
    """Call `on_first` before the first backward pass from now on: a loop need not have an optimizer of torch's."""
    _backwards.on_first = on_first
    _hook_backward()


def _backward(recorder: Recorder) -> Uninstall:
    unhook = _hook_backward()
    _backwards.name = recorder.intern("backward")
    _backwards.recorder = recorder

    def uninstall() -> None:
        _backwards.recorder = None
        unhook()

    return uninstall


def _hook_backward() -> Uninstall:
    """Wrap what `torch.autograd.backward` and `.grad` both end in, once; torch binds it under two names, of which
    these call the one in `torch.autograd`. Raises `private.Gone` where there is neither."""
    import torch.autograd as autograd
    from torch.autograd import graph

    bound = [(place, private.find(f"{place.__name__}:{RUN}")) for place in (autograd, graph)]
    places: list[Any] = [place for place, run in bound if run is not None]
    run: Any = private.need(f"{places[0].__name__ if places else autograd.__name__}:{RUN}")
    if getattr(run, "_dsprof", None) is not None:
        return run._dsprof  # type: ignore[no-any-return]

    enter, leave, compiling, any_fake = _backwards.enter, _backwards.leave, dynamo.check(), dynamo.any_fake

    # `timed` by hand: of a step of 2 ms each call here counts.
    @stands_for(run)
    def engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        if compiling() or (args and any_fake(args[0])):
            return run(*args, **kwargs)
        entered = enter()
        try:
            return run(*args, **kwargs)
        finally:
            leave(entered)

    # Called between the parts of a compiled step, it is no part of it.
    dynamo.skip_frame(engine_run_backward)
    dynamo.skip(_Backwards.enter, _Backwards.leave)

    unhook = in_reverse(replace_attribute(place, RUN, engine_run_backward) for place in places)
    engine_run_backward._dsprof = unhook  # type: ignore[attr-defined]
    return unhook
