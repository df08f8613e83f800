"""Something around a method of a module or an optimizer, for a while, on the instance.

Names, classes, hooks and `state_dict` stay as they are, and the owner can be copied and pickled.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

from torch import nn
from torch.optim import Optimizer

Undo = Callable[[], object]


def wrap_forward(module: nn.Module, call: Callable[..., Any], name: str, what: str) -> Undo:
    """Have `call(forward, *args, **kwargs)` called in the place of `module.forward`, inside the module's `__call__`;
    call the result to stop that.

    What was put around it last is taken off first: RuntimeError if something was put there after `what` was done to
    the module, whose `name` is for that error.
    """
    patched = vars(module).get("forward")  # by somebody else, or by an earlier call of this

    @functools.wraps(patched or type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(patched or functools.partial(type(self).forward, self), *args, **kwargs)

    put_back = _put(module, "forward", forward)

    def undo() -> None:
        if not put_back():
            raise RuntimeError(f"{name}: its forward was replaced after {what}; undo that first")

    return undo


def watch_zero_grad(owner: nn.Module | Optimizer, cleared: Callable[[], object]) -> Undo:
    """Have `cleared`, a bound method that is not kept alive, called before each `owner.zero_grad()`; call the result to
    stop that, unless something was put there since. A copy of `owner` clears its own gradients only."""
    patched = vars(owner).get("zero_grad")  # by somebody else
    told, of = weakref.WeakMethod(cleared), weakref.ref(owner)

    @functools.wraps(type(owner).zero_grad)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        call = told()
        if call is not None and self is of():
            call()
        (patched or functools.partial(type(self).zero_grad, self))(*args, **kwargs)

    return _put(owner, "zero_grad", zero_grad)


def _put(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], bool]:
    """Have `function` as a method of `owner`; call the result to put back what was there, which returns False, and does
    nothing, if something else is there by now."""
    before = vars(owner).get(name)
    # A bound method, since a copy of the owner then gets one that is bound to the copy.
    ours = MethodType(function, owner)
    setattr(owner, name, ours)

    def put_back() -> bool:
        if vars(owner).get(name) is not ours:
            return False
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
        return True

    return put_back


def last_first(undos: Sequence[Undo]) -> Undo:
    """All of them, the last first, until one raises."""

    def undo() -> None:
        for one in reversed(undos):
            one()

    return undo
