"""Whether modules, and the functions that they call, are torch's own code.

Backward then needs no parameter but those that autograd has saved. Code of the script's own may keep a parameter by
itself, for a kernel that nothing announces.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

_TORCH: Final = os.path.dirname(torch.__file__) + os.sep
_NAMES: Final = tuple(name for name, value in vars(F).items() if callable(value))
_read: Final[Callable[[Any], tuple[Any, ...]]] = itemgetter(*_NAMES)


def is_torchs(module: nn.Module) -> bool:
    """Whether the forward of `module`, and of all that it has, is torch's. One in a parametrization counts, too."""
    return all(
        "forward" not in vars(part)
        and type(part).__module__.startswith("torch.nn.")
        and getattr(type(part).forward, "__module__", "").startswith("torch.nn.")
        for part in module.modules()
    )


class Functions:
    """Those of torch.nn.functional, which modules look up whenever they run: a script may replace them."""

    def __init__(self) -> None:
        self._known = _read(vars(F))
        self.are_torchs = all(map(_is_torchs, self._known))

    def were_replaced(self) -> bool:
        """Whether one has been replaced since; True once."""
        if not self.are_torchs or _read(vars(F)) == self._known:
            return False
        self.are_torchs = False
        return True

    def replaced(self) -> str:
        """The names of those that are not what they were when this was made, with commas."""
        pairs = zip(_NAMES, self._known, _read(vars(F)), strict=True)
        return ", ".join(f"torch.nn.functional.{name}" for name, known, now in pairs if now is not known)


def _is_torchs(function: object) -> bool:
    if isinstance(function, FunctionType):
        return function.__code__.co_filename.startswith(_TORCH)  # a name can be copied, as functools.wraps does
    return isinstance(function, BuiltinFunctionType | type) or type(function).__module__.startswith(("torch", "typing"))
