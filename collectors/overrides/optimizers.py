"""torch.optim: which implementation updates the parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ..hooking.uninstall import Uninstall, in_reverse
from .arguments import Arguments, override_arguments
from .override import Override


def install(overrides: list[Override]) -> Uninstall:
    """Apply them to every optimizer of torch.optim, or of a class derived from one, made from now on."""
    import torch

    arguments = {override.name: override for override in overrides}
    classes: list[Any] = [
        one for one in vars(torch.optim).values() if isinstance(one, type) and "__init__" in vars(one)
    ]
    installed = []
    for cls in dict.fromkeys(classes):
        takes = inspect.signature(cls.__init__).parameters
        of_class = {name: override for name, override in arguments.items() if name in takes}
        if of_class:
            installed.append(override_arguments(cls, "__init__", of_class, cls.__name__, _one_of_two))
    return in_reverse(installed)


def _one_of_two(arguments: Arguments, overrides: Mapping[str, Override]) -> Mapping[str, Any]:
    """`fused` and `foreach` exclude each other."""
    wanted = {name: override.value for name, override in overrides.items()}
    for name, other in (("fused", "foreach"), ("foreach", "fused")):
        if wanted.get(name) is True and other not in wanted and arguments.get(other):
            wanted[other] = False
    return wanted
