"""torch.optim: which implementation updates the parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

from ..hooking.uninstall import Uninstall, in_reverse
from .arguments import Arguments, given, override_arguments
from .override import Override

FUSED: Final = ("cpu", "cuda", "hpu", "mps", "mtia", "xpu")
"""Types of devices for which torch has fused kernels."""


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
    wanted = given(arguments, overrides)
    for name, other in (("fused", "foreach"), ("foreach", "fused")):
        if wanted.get(name) is True and other not in wanted and arguments.get(other):
            wanted[other] = False
    if wanted.get("fused") is True and "params" in arguments:
        wanted["params"], every = _listed(arguments["params"])
        why = _cannot_be_fused(every, differentiable=bool(arguments.get("differentiable")))
        if why:
            overrides["fused"].not_applied(why)
            del wanted["fused"]
            wanted.pop("foreach" if "foreach" not in overrides else "", None)
    return wanted


def _listed(params: Any) -> tuple[list[Any], list[Any]]:
    """Parameters as an optimizer takes them, which may come by a generator: as lists, and all tensors of theirs."""
    groups: list[Any] = []
    every: list[Any] = []
    for one in params:
        if isinstance(one, dict) and "params" in one:
            inside = one["params"]
            inside = [inside] if hasattr(inside, "device") else list(inside)
            groups.append({**one, "params": inside})
        else:
            inside = [one]
            groups.append(one)
        every += [each[1] if isinstance(each, tuple) else each for each in inside]  # with its name
    return groups, every


def _cannot_be_fused(tensors: list[Any], *, differentiable: bool) -> str:
    """Why torch would refuse; empty: it would not."""
    if differentiable:
        return "the optimizer is differentiable, which a fused one cannot be"
    for one in tensors:
        if one.device.type not in FUSED or not one.is_floating_point():
            return f"fused kernels take no parameters of {one.dtype} on {one.device.type}"
    return ""
