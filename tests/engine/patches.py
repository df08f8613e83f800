"""What must be as before when a test, or a job of ranks, is over: torch's functions, the engine's, listeners."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

from dsprof.engine import hooks

CLASSES = (nn.Module, nn.Parameter, torch.Tensor, torch.optim.Optimizer, torch.autograd.Function)
MODULES = (
    torch, torch.autograd, torch.cuda, torch.utils.checkpoint, nn.functional, nn.init, dist, dist.distributed_c10d, os,
    time,
)  # fmt: skip

Bindings = dict[tuple[Any, str], object]


def bindings() -> Bindings:
    """(where, name) -> what it is bound to there, of everything that somebody might replace for a while."""
    found: Bindings = {}
    for place in (*CLASSES, *MODULES):
        for name, value in vars(place).items():
            if callable(value) or isinstance(value, property | classmethod | staticmethod):
                found[place, name] = value
    for module in [module for name, module in sys.modules.items() if name.startswith("dsprof.engine")]:
        found.update(
            {(module, name): value for name, value in vars(module).items() if callable(value) or name.isupper()}
        )
    found.update({(kind, "__init__"): kind.__init__ for kind in _subclasses(nn.Module)})
    found[hooks, "_listeners"] = hooks._listeners
    found[torch, "the default dtype"] = torch.get_default_dtype()
    return found


def changes(before: Bindings, now: Bindings) -> list[str]:
    """What differs. Classes must have no new attributes either; modules load some when they are used."""
    kept = {key for key in before if key[0] in CLASSES} | {key for key in now if key[0] in CLASSES} | before.keys()
    return sorted(
        f"{getattr(where, '__qualname__', where.__name__)}.{name}"
        for where, name in kept
        if before.get((where, name)) is not now.get((where, name))
    )


def _subclasses(kind: type) -> Iterator[type]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)
