"""Hooks in modules of torch that the job may import later, or never: they go in as soon as it has.

Nothing of the kind is imported on our own account: that would cost a second, and change what a script finds loaded.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from . import dynamo
from .errors import count_error
from .uninstall import Uninstall

Hook = Callable[[ModuleType], Uninstall]


def when_imported(name: str, hook: Hook) -> Uninstall:
    """Have `hook` do its work in the module `name`: now if the job has imported it, else when it does.

    The result takes the hook out again, or gives up waiting. Of a hook that fails later on, the error is counted.
    """
    waiting = _Waiting(hook)
    module = sys.modules.get(name)
    if module is not None and _is_incomplete(module):  # it imports torch, which arms us
        _when_complete(module, waiting)
    elif module is not None:
        waiting.arrived(module)
    else:
        _finder.wait(name, waiting)
    return lambda: _finder.forget(name, waiting)


class _Waiting:
    """A hook, and how to take it out once it is in."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.uninstall: Uninstall | None = None

    def arrived(self, module: ModuleType) -> None:
        self.uninstall = self.hook(module)


def _is_incomplete(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _when_complete(module: ModuleType, waiting: _Waiting) -> None:
    """Have the hook do its work when something is first read of `module` after its import has ended.

    Nothing tells of that end, so until then the module has a class of ours.
    """
    original: Any = type(module)

    class Completing(original):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            own = original.__getattribute__(self, "__dict__")
            if not name.startswith("__") and not getattr(own.get("__spec__"), "_initializing", False):
                self.__class__ = original
                try:
                    waiting.arrived(self)
                except Exception as error:
                    count_error(f"a hook in {own.get('__name__')}", error)
            return original.__getattribute__(self, name)

    module.__class__ = Completing


class _Finder:
    """Finds what is waited for as the other finders do, with a loader that tells of the end of the import, once."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[_Waiting]] = {}
        self.skipped = False

    def wait(self, name: str, waiting: _Waiting) -> None:
        if not self.skipped:  # an import inside a compiled function is no business of Dynamo's
            self.skipped = True
            dynamo.skip(_Finder.find_spec, _Finder._arrived)
        self.waiting.setdefault(name, []).append(waiting)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def forget(self, name: str, waiting: _Waiting) -> None:
        left = [other for other in self.waiting.pop(name, []) if other is not waiting]
        if left:
            self.waiting[name] = left
        elif not self.waiting and self in sys.meta_path:
            sys.meta_path.remove(self)
        if waiting.uninstall is not None:
            waiting.uninstall()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.waiting:
            return None
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._wrap(name, spec)
                return spec
        return None

    def _wrap(self, name: str, spec: importlib.machinery.ModuleSpec) -> None:
        # An attribute of this one loader is enough, and leaves its type, __spec__ and __loader__ what they were.
        # Whoever asks for a spec only to see whether the module is there, never runs it.
        loader = spec.loader
        if loader is None or isinstance(loader, type):
            return
        execute = getattr(loader, "exec_module", None)
        if execute is None:  # an old one, with load_module alone
            return

        def exec_module(module: ModuleType) -> None:
            with suppress(AttributeError):
                del loader.exec_module
            execute(module)
            self._arrived(name, module)

        with suppress(AttributeError):
            loader.exec_module = exec_module  # type: ignore[method-assign]

    def _arrived(self, name: str, module: ModuleType) -> None:
        for waiting in self.waiting.pop(name, []):
            try:
                waiting.arrived(module)
            except Exception as error:
                count_error(f"a hook in {name}", error)
        if not self.waiting and self in sys.meta_path:
            sys.meta_path.remove(self)


_finder = _Finder()
