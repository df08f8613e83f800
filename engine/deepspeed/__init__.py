"""What scripts import as `deepspeed` under `dsprof run --engine dsprof`: DeepSpeed's names, this engine's work.

    names         which names there are, module by module, and what stands behind each; what to write instead of others
    start         initialize, tp_model_init, DeepSpeedConfig
    zero          what scripts ask parameters of stage 3
    fragments     and of their masters, states and gradients
    groups        which ranks work together
    z3_leaf       set_z3_leaf_modules
    rng_tracker   random numbers of what ranks divide
    accelerator   get_accelerator()
    fragments     safe_get_full_fp32_param and its like
    optimizers    FusedAdam and its like
    utils         deepspeed.comm, OnDevice, the logger, and what lies in deepspeed.runtime.utils
    zero_to_fp32  a checkpoint's weights, without an engine

Nothing here is importable as `deepspeed` by itself. The launcher sets DSPROF_ENGINE=dsprof, and a finder in
collectors/bootstrap/sitecustomize.py calls `check` and `make`; without that an installed DeepSpeed stays what it is.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from .names import MODULES, VERSION, distribution, refusal

__all__ = ["VERSION", "check", "distribution", "make"]


def check(name: str) -> None:
    """Raise ModuleNotFoundError, with what to write instead, if there is no module `name` (`deepspeed.utils`)."""
    if name not in MODULES:
        # Without its `name`: an import statement would take that for its own failure, and drop the text.
        raise ModuleNotFoundError(refusal(name))


def make(name: str) -> ModuleType:
    """A new module of that name."""
    check(name)
    if name == "deepspeed":
        from .zero import describe_parameters

        describe_parameters()
    return _Module(name)


class _Module(ModuleType):
    """Has the names that the table gives it, each loaded when it is used."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"{name}, as dsprof's engine has it")
        self.__file__ = __file__
        self.__all__ = list(MODULES[name])

    def __getattr__(self, name: str) -> Any:
        whole = f"{self.__name__}.{name}"
        found = MODULES[self.__name__].get(name)
        if found is not None:
            home, _, attribute = found.partition(":")
            return getattr(importlib.import_module(home, "dsprof.engine"), attribute)
        if whole in MODULES:
            return importlib.import_module(whole)
        raise AttributeError(f"module {self.__name__!r} has no {name}" if name.startswith("__") else refusal(whole))

    def __dir__(self) -> list[str]:
        below = [name.rpartition(".")[2] for name in MODULES if name.rpartition(".")[0] == self.__name__]
        return sorted({*self.__dict__, *MODULES[self.__name__], *below})
