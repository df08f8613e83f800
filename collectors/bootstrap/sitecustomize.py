"""Arms a rank where torch does not load its entry points (TORCH_DEVICE_BACKEND_AUTOLOAD=0).

The launcher puts this folder on PYTHONPATH. Python then imports this file at start, in place of the user's own
sitecustomize, which it runs afterwards. Standard library only; dsprof is imported only after torch has been, and
only with DSPROF=1. Nothing of it may disturb the program it runs in.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType

HERE = os.path.dirname(os.path.abspath(__file__))


def wanted() -> bool:
    return os.environ.get("DSPROF", "").lower() in ("1", "true", "yes", "on")


def arm() -> None:
    """What torch's entry point would have done."""
    if not wanted():  # the torchrun agent
        return
    with suppress(Exception):  # the job goes on without a profile, and the launcher says that no capture came
        try:
            import dsprof
        except ImportError:  # not installed here: the launcher says where its own copy lies
            home = os.environ["DSPROF_HOME"]
            spec = importlib.util.spec_from_file_location("dsprof", os.path.join(home, "dsprof", "__init__.py"))
            if spec is None or spec.loader is None:
                return
            dsprof = sys.modules["dsprof"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(dsprof)
        from dsprof.collectors.arm import autoload

        autoload()


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
    run_users_own()
