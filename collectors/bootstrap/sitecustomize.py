"""Arms a rank where torch does not load its entry points (TORCH_DEVICE_BACKEND_AUTOLOAD=0), and, with
DSPROF_ENGINE=dsprof, has `import deepspeed` mean dsprof's engine.

The launcher puts this folder on PYTHONPATH. Python then imports this file at start, in place of the user's own
sitecustomize, which it runs afterwards. Standard library only; dsprof is imported only after torch has been, and
only with DSPROF=1, or when the script imports deepspeed. Nothing of it may disturb the program it runs in.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


def wanted() -> bool:
    return os.environ.get("DSPROF", "").lower() in ("1", "true", "yes", "on")


def arm() -> None:
    """What torch's entry point would have done."""
    if not wanted():  # the torchrun agent
        return
    with suppress(Exception):  # the job goes on without a profile, and the launcher says that no capture came
        find_dsprof()
        from dsprof.collectors.arming import process

        process.arm()


def find_dsprof() -> None:
    """Have dsprof importable. Raises ImportError."""
    try:
        import dsprof
    except ImportError:  # not installed here: the launcher says where its own copy lies
        path = os.path.join(os.environ.get("DSPROF_HOME", ""), "dsprof", "__init__.py")
        spec = importlib.util.spec_from_file_location("dsprof", path)
        if spec is None or spec.loader is None or not os.path.isfile(path):
            raise
        dsprof = sys.modules["dsprof"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(dsprof)


class TorchFinder:
    """Finds torch as the other finders do, with a loader that arms at the end of the import, once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self.wrap(spec)
                return spec
        return None

    def wrap(self, spec: importlib.machinery.ModuleSpec) -> None:
        # The finder stays until torch is really imported: others ask for the spec only to see whether torch is there.
        # An attribute of this one loader is enough, and leaves its type, __spec__ and __loader__ what they were.
        loader = spec.loader
        if loader is None:  # a folder named torch without an __init__
            return
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            execute(module)
            arm()

        with suppress(AttributeError):
            loader.exec_module = exec_module  # type: ignore[method-assign]


class StandIn:
    """Finds `deepspeed` and what is below it: dsprof.engine.deepspeed, before any that is installed or lies nearby."""

    stands_in_for = "deepspeed"

    @classmethod
    def wanted(cls) -> bool:
        return os.environ.get("DSPROF_ENGINE") == "dsprof"

    @classmethod
    def install(cls) -> None:
        """Have `import deepspeed` find it, from now on. Raises RuntimeError if another has been imported already."""
        # Two modules have this class, if both torch's entry point and Python's start come here.
        if not any(is_ours(finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, cls())
        there = sys.modules.get("deepspeed")
        if there is not None and not is_ours(getattr(getattr(there, "__spec__", None), "loader", None)):
            raise RuntimeError(
                "--engine dsprof: DeepSpeed itself was imported before dsprof could stand in for it, because this "
                "Python was started with -I, -E or -S, or without the PYTHONPATH it was given; start it with that, or "
                "have the script import torch before deepspeed"
            )

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "deepspeed":
            return None
        if name != "deepspeed":  # which has been imported, then
            self.names().check(name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def find_distributions(self, context: Any) -> list[Any]:
        """What importlib.metadata knows of deepspeed: libraries ask that whether it is there, and how new."""
        if (getattr(context, "name", None) or "").lower() != "deepspeed":
            return []
        return [self.names().distribution()]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module: ModuleType = self.names().make(spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has all it needs."""

    def names(self) -> Any:
        try:
            find_dsprof()
            return importlib.import_module("dsprof.engine.deepspeed")
        except ImportError as error:
            raise ImportError(
                f"--engine dsprof: deepspeed stands for dsprof's engine, which {sys.executable} cannot import "
                f"({error}); install dsprof there"
            ) from error


def is_ours(finder: object) -> bool:
    return getattr(finder, "stands_in_for", None) == "deepspeed"


def run_users_own() -> None:
    """Import the sitecustomize that this one hides, if there is one, in its place."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
    if wanted():
        sys.meta_path.insert(0, TorchFinder())
    if StandIn.wanted():
        StandIn.install()
    run_users_own()
