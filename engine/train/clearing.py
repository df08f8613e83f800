"""Where scripts clear gradients by torch's own names: `optimizer.zero_grad()` and `engine.module.zero_grad()`.

Between backward and step an engine has gradients in buckets and shards, which torch does not find there.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..forward import Undo


def watch(owner: nn.Module | torch.optim.Optimizer, cleared: Callable[[], object]) -> Undo:
    """Have `cleared`, a bound method that is not kept alive, called before each `owner.zero_grad()`; call the result to
    stop that. A copy of `owner` clears its own gradients only."""
    patched = vars(owner).get("zero_grad")  # by somebody else
    told = weakref.WeakMethod(cleared)
    of = weakref.ref(owner)

    @functools.wraps(type(owner).zero_grad)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        call = told()
        if call is not None and self is of():
            call()
        (patched or functools.partial(type(self).zero_grad, self))(*args, **kwargs)

    # A bound method, since a copy of the module then gets one that is bound to the copy.
    ours = MethodType(zero_grad, owner)
    owner.zero_grad = ours  # type: ignore[method-assign]

    def undo() -> None:
        if vars(owner).get("zero_grad") is ours:
            del owner.zero_grad
            if patched is not None:
                owner.zero_grad = patched  # type: ignore[method-assign]

    return undo
