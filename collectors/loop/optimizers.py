"""Optimizer steps: they end the training step, and the first one shows that this process trains.

What runs inside a step, such as the forward and backward of its closure, is recorded as anywhere else. An optimizer
that another one steps is part of that one (ZeroRedundancyOptimizer).

torch iterates over the global hooks while it calls them, so a hook that adds or removes one ends the job with
"OrderedDict mutated during iteration". Ours are registered once, when the process is armed, and stay.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from dsprof.schema import OF_A_NORM, SMALL_GRADIENTS, Kind

from ..capture import facts
from ..capture.open_capture import OpenCapture
from ..hooking import dynamo
from ..hooking.uninstall import Uninstall
from .backward import graph_task

if TYPE_CHECKING:
    from ..recorder.record import Recorder


WRAPPER_FILE: Final = "torch/optim/optimizer.py"
MOST_DESCRIBED: Final = 100
"""Optimizers that a fact tells of: with one for each parameter there are hundreds of the same."""
MOST_GRADIENTS: Final = 1000
"""Whose sizes it tells."""
NO_SETTINGS: Final = ("params", "param_names", "name", "group_name")
"""Keys of a parameter group that do not say how it is updated."""
IMPLEMENTATIONS: Final = ("fused", "foreach")
"""Arguments of an optimizer that say how it makes an update; where it has neither, torch chooses."""


class _UnderWay(threading.local):
    """This thread's nested optimizers (ZeroRedundancyOptimizer steps another one inside), by id, and their record.

    `engine`: it is in a step of an engine, which is recorded whole; `states`: what steps in there says what it is like.
    """

    def __init__(self) -> None:
        self.optimizers: list[int] = []
        self.handle = 0
        self.engine = self.states = False


class _Steps:
    """Records the outermost optimizer step, once there is a recorder."""

    def __init__(self) -> None:
        self.on_first: Callable[[], None] | None = None
        self.recorder: Recorder | None = None
        self.on_step: Callable[[], None] | None = None
        self.name = 0
        self.local = _UnderWay()
        self.numbers: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self.next_number = itertools.count(1)
        self.last_numbered: tuple[Callable[[], object], int | None] = (lambda: None, None)
        self.stepped_in_backward = False
        self.taken = 0
        self.graph_task: Callable[[], int] = lambda: -1
        self.compiling: Callable[[], bool] = lambda: False
        """Both torch's own, once it is watched: to import them in each step takes longer than all else here."""

    def before(self, optimizer: Any, *_: Any) -> None:
        if self.compiling():
            return
        if self.on_first is not None:
            first, self.on_first = self.on_first, None
            first()
        if self.recorder is None:
            return
        local = self.local
        if local.engine:
            if local.states:
                self.number_of(optimizer)  # which says what it is like
            return
        if local.optimizers and _active_steps() < 2:  # an earlier step raised, so `after` never ran
            local.optimizers.clear()
        if not local.optimizers:
            local.handle = self.recorder.begin(Kind.PHASE, self.name, -1, self.number_of(optimizer))
        local.optimizers.append(id(optimizer))

    def after(self, optimizer: object, *_: Any) -> None:
        if self.compiling():
            return
        local = self.local
        if self.recorder is None or local.engine or not local.optimizers:
            return
        if local.optimizers.pop() == id(optimizer) and not local.optimizers:
            self.recorder.end(local.handle)
            self.taken += 1
            if _in_backward():  # there may be hundreds of them, one for each parameter
                self.stepped_in_backward = True
            elif self.on_step is not None:
                self.on_step()

    def after_backward(self) -> None:
        if self.stepped_in_backward:
            self.stepped_in_backward = False
            if self.on_step is not None:
                self.on_step()

    def forget_numbers(self) -> None:
        """The next optimizer to step is the first one again."""
        self.numbers.clear()
        self.next_number = itertools.count(1)
        self.last_numbered = (lambda: None, None)

    def number_of(self, optimizer: Any) -> int | None:
        """From 1 in the order of their first steps; a fact says which it is. None if it cannot be told again."""
        last, number = self.last_numbered
        if last() is optimizer:  # as nearly always: to look it up takes ten times as long
            return number
        try:
            number = self.numbers.get(optimizer)
            if number is None:
                number = self.numbers[optimizer] = next(self.next_number)
                if number <= MOST_DESCRIBED:
                    facts.state(_describe(optimizer, number, of_engine=self.local.states))
            self.last_numbered = weakref.ref(optimizer), number
            return number
        except Exception as error:  # a class of the user's that is not hashable, or lacks param_groups
            if self.recorder is not None:
                self.recorder.count_error("an optimizer's number", error)
            return None


def _describe(optimizer: Any, number: int, *, of_engine: bool) -> facts.Fact:
    """of_engine: it steps masters, and dsprof's engine tells which communications carry their gradients."""
    tensors = sum(len(group["params"]) for group in optimizer.param_groups)
    fact: facts.Fact = {
        "fact": "optimizer", "number": number, "class": type(optimizer).__name__, "parameters": tensors,
        **_of_groups(optimizer),
    }  # fmt: skip
    if of_engine:
        return {**fact, "of_engine": True}
    if tensors <= MOST_GRADIENTS:
        grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
        made = [grad for grad in grads if grad is not None]
        if made and all(grad.numel() * grad.element_size() <= OF_A_NORM for grad in made):
            fact[SMALL_GRADIENTS] = [grad.numel() for grad in made]
    return fact


def _of_groups(optimizer: Any) -> facts.Fact:
    """How many parameter groups it has, how many of them differ in their settings, and how it makes an update."""
    groups = optimizer.param_groups
    settings = {_settings(group) for group in groups}
    made = next((name for name in IMPLEMENTATIONS if any(group.get(name) for group in groups)), None)
    elements = sum(param.numel() for group in groups for param in group["params"])
    return {"groups": len(groups), "settings": len(settings), "implementation": made, "elements": elements}


def _settings(group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What of a parameter group says how it is updated. To compare tensors would wait for their device: each of them is
    taken for another setting."""
    plain = (str, int, float, bool, tuple, type(None))
    named = sorted((name, value) for name, value in group.items() if name not in NO_SETTINGS)
    return tuple((name, repr(value) if isinstance(value, plain) else id(value)) for name, value in named)


def _in_backward() -> bool:
    """Whether the autograd engine calls, on whatever thread it uses."""
    return _steps.graph_task() != -1


def _active_steps() -> int:
    """How many optimizer steps are on this thread's stack: torch's wrapper calls the hooks from its own frame."""
    count, frame = 0, sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        count += code.co_name == "wrapper" and code.co_filename.endswith(WRAPPER_FILE)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return count


_steps = _Steps()
_watching = False


def before_first(call: Callable[[], None]) -> None:
    """Call it before the first step from now on."""
    _steps.on_first = call
    register()


def register() -> None:
    """Register the hooks, once a process."""
    global _watching
    if not _watching:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        _steps.graph_task, _steps.compiling = graph_task(), dynamo.check()
        register_optimizer_step_pre_hook(_steps.before)
        register_optimizer_step_post_hook(_steps.after)
        _watching = True


def enter_engine_step(*, states: bool = False) -> None:
    """This thread begins a step of an engine, which is recorded as one: the optimizers in it are passed over, but for
    what they are like, where nobody else `states` that."""
    _steps.local.engine, _steps.local.states = True, states


def leave_engine_step() -> None:
    """It ended."""
    _steps.local.engine = _steps.local.states = False
    _steps.taken += 1


def in_engine_step() -> bool:
    """Whether this thread is in one."""
    return _steps.local.engine


def stepped() -> int:
    """How many optimizers have been stepped, of those that are still there."""
    return len(_steps.numbers)


def taken() -> int:
    """How many steps of optimizers were recorded so far: of those inside another, and of an engine, the outer ones."""
    return _steps.taken


def number_of(optimizer: Any) -> int | None:
    """The number that its records bear, from 1; None if it cannot be told again."""
    return _steps.number_of(optimizer)


def after_backward() -> None:
    """A backward pass ended: that was the step, if optimizers were stepped in it."""
    _steps.after_backward()


def install(capture: OpenCapture) -> list[Uninstall]:
    """Record steps, each outermost one of which ends a training step."""
    return [watch(capture.recorder, capture.step_ended)]


def watch(recorder: Recorder, on_step: Callable[[], None]) -> Uninstall:
    """Record steps from now on and call `on_step` after each outermost one."""
    register()
    _steps.name = recorder.intern("optimizer")
    _steps.local = _UnderWay()
    _steps.recorder, _steps.on_step = recorder, on_step

    def uninstall() -> None:
        _steps.recorder = _steps.on_step = None
        _steps.forget_numbers()  # the next capture of this process tells of each anew

    return uninstall
