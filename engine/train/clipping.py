"""torch's clipping of gradients that an engine holds: between backward and step they are in buckets and shards, where
`torch.nn.utils.clip_grad_norm_` would find none, return 0 and clip nothing."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from torch import Tensor
from torch.nn.utils import clip_grad


class Holder(Protocol):
    """Something that may hold gradients of parameters outside of their `grad`."""

    def held(self, param: Tensor) -> str | None:
        """The name of `param` if its gradient, or a part of it, is there; None if not."""


_HOLDERS: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_NAMES: Final = ("_clip_grads_with_norm_", "clip_grad_value_")
"""The first is called by `clip_grad_norm_`."""
_REPLACED: Final[list[str]] = []


def refuse_for(holder: Holder) -> None:
    """From now on torch's functions refuse to clip what `holder` holds, as long as it lives. It must be hashable."""
    _HOLDERS.add(holder)
    for name in _NAMES:
        # A script may have imported the function by name: so not its name, but what is within it is replaced.
        function: Any = getattr(clip_grad, name, None)
        inner = getattr(function, "__wrapped__", None)
        for cell in getattr(function, "__closure__", None) or ():
            if cell.cell_contents is inner and name not in _REPLACED:
                _REPLACED.append(name)
                cell.cell_contents = _refusing(inner)


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for holder in list(_HOLDERS):
            name = next(filter(None, map(holder.held, parameters)), None)
            if name is not None:
                raise RuntimeError(
                    "torch.nn.utils.clip_grad: gradients are the engine's from backward to step, and that of "
                    f'{name} is not in its .grad: write "gradient_clipping" in the configuration, which clips by the '
                    "norm of all ranks, or change gradients by deepspeed.utils.safe_get_full_grad and "
                    "safe_set_full_grad"
                )
        return function(parameters, *args, **kwargs)

    return clip
