"""What must be as before when a test, or a job of ranks, is over: torch's functions, the engine's, listeners."""

from __future__ import annotations

import functools
import operator
import os
import sys
import time
import types
from typing import Any, Final

import torch
import torch._dynamo  # which replaces functions of torch when it is imported
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

from dsprof.engine import hooks

CLASSES: Final = (
    torch.Tensor, torch.optim.Optimizer, torch.autograd.Function,
    *(value for value in vars(nn).values() if isinstance(value, type)),
)  # fmt: skip
MODULES: Final = (
    torch, torch.autograd, torch.cuda, torch.utils.checkpoint, nn.functional, nn.init, dist, dist.distributed_c10d, os,
    time,
)  # fmt: skip
KINDS: Final = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.GetSetDescriptorType, property, classmethod, staticmethod, type, functools.partial,
    type(functools.cache(len)),
)  # fmt: skip
"""What functions and methods are. Whatever else torch has in its modules may change."""

Bindings = list[tuple[Any, dict[str, object]]]


def bindings() -> Bindings:
    """Where somebody might replace something for a while, and all that is there."""
    engine = [module for name, module in sys.modules.items() if name.startswith("dsprof.engine")]
    return [(place, dict(vars(place))) for place in (*CLASSES, *MODULES, *engine)]


def changes(before: Bindings) -> list[str]:
    """What differs: functions anywhere, attributes that classes have got, constants of the engine, and listeners."""
    found = ["dsprof.engine.hooks: somebody listens still"] if hooks._listeners else []
    for place, old in before:
        new = vars(place)
        if old.keys() == new.keys() and all(map(operator.is_, old.values(), new.values())):
            continue
        constants = place not in MODULES and place not in CLASSES
        for name in old.keys() | new.keys() if place in CLASSES else old.keys():
            one, other = old.get(name), new.get(name)
            # Not isinstance: torch has values that answer to that with a warning.
            replaced = issubclass(type(one), KINDS) or issubclass(type(other), KINDS) or (constants and name.isupper())
            if one is not other and replaced and not _of_libraries(other):
                found.append(f"{place.__name__}.{name}")
    return sorted(found)


def _of_libraries(value: Any) -> bool:
    """Whether it was torch itself that replaced something, as it does when it first compiles, or transformers."""
    module = getattr(value, "__module__", None) or ""
    return module.partition(".")[0] in ("torch", "transformers")
