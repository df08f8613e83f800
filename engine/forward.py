"""Something around a module's forward, for a while, on the instance and inside its `__call__`.

Names, classes, hooks and `state_dict` stay as they are, and the module can be copied and pickled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

from torch import nn

Undo = Callable[[], None]


def wrap_forward(module: nn.Module, call: Callable[..., Any], name: str, what: str) -> Undo:
    """Have `call(forward, *args, **kwargs)` called in the place of `module.forward`; call the result to stop that.

    What was put around it last is taken off first: RuntimeError if something was put there after `what` was done to
    the module, whose `name` is for that error.
    """
    patched = vars(module).get("forward")  # by somebody else, or by an earlier call of this

    @functools.wraps(patched or type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(patched or functools.partial(type(self).forward, self), *args, **kwargs)

    # A bound method, since a copy of the module then gets one that is bound to the copy.
    ours = MethodType(forward, module)
    module.forward = ours

    def undo() -> None:
        if vars(module).get("forward") is not ours:
            raise RuntimeError(f"{name}: its forward was replaced after {what}; undo that first")
        if patched is None:
            del module.forward
        else:
            module.forward = patched

    return undo


def last_first(undos: Sequence[Undo]) -> Undo:
    """All of them, the last first, until one raises."""

    def undo() -> None:
        for one in reversed(undos):
            one()

    return undo
