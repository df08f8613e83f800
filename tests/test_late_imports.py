"""Hooks in modules that are imported later: they go in, come out, and the import is what it would have been."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from dsprof.collectors.hooking import errors
from dsprof.collectors.hooking.late_imports import _finder, when_imported


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that can be imported."""
    (tmp_path / "imported_late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "imported_late"
    sys.modules.pop("imported_late", None)
    assert not _finder.waiting
    assert _finder not in sys.meta_path


class Hook:
    """Sets a module's `value` to 2, and back."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: ModuleType) -> object:
        self.calls += 1
        module.value = 2  # type: ignore[attr-defined]

        def uninstall() -> None:
            module.value = 1  # type: ignore[attr-defined]

        return uninstall


def test_a_hook_waits_for_the_import(name: str) -> None:
    hook = Hook()
    uninstall = when_imported(name, hook)  # type: ignore[arg-type]
    assert importlib.util.find_spec(name) is not None  # only looked whether it is there
    assert hook.calls == 0
    module = importlib.import_module(name)
    assert (module.value, hook.calls) == (2, 1)
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert "exec_module" not in vars(module.__loader__)
    assert importlib.reload(module).value == 1  # the user's doing
    uninstall()
    assert module.value == 1


def test_a_loader_of_the_old_kind_loads_as_without_us(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loader:
        def load_module(self, name: str) -> ModuleType:
            return sys.modules.setdefault(name, ModuleType(name))

    class Finder:
        def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            return ModuleSpec(name, Loader()) if name == "loaded_as_of_old" else None  # type: ignore[arg-type]

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    hook = Hook()
    forget = when_imported("loaded_as_of_old", hook)  # type: ignore[arg-type]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert importlib.import_module("loaded_as_of_old").__name__ == "loaded_as_of_old"
        assert hook.calls == 0
    finally:
        forget()
        sys.modules.pop("loaded_as_of_old", None)


def test_a_module_that_is_there_is_hooked_at_once(name: str) -> None:
    module = importlib.import_module(name)
    uninstall = when_imported(name, Hook())  # type: ignore[arg-type]
    assert module.value == 2
    uninstall()
    assert module.value == 1


def test_a_module_that_is_being_imported_is_hooked_once_it_is_whole(tmp_path: Path, name: str) -> None:
    """As deepspeed is, which imports torch before it has anything of its own."""
    hook = Hook()
    (tmp_path / "imported_early.py").write_text(f"import {name}\nbefore = {name}.ask()\nvalue = 1\n")
    undo: list[Callable[[], None]] = []
    module = importlib.import_module(name)
    module.ask = lambda: undo.append(when_imported("imported_early", hook))  # type: ignore[attr-defined]
    early = importlib.import_module("imported_early")
    sys.modules.pop("imported_early")
    assert hook.calls == 0
    assert early.value == 2
    assert type(early) is ModuleType
    assert hook.calls == 1
    undo[0]()
    assert early.value == 1


def test_who_gives_up_waiting_leaves_no_trace(name: str) -> None:
    first, second = Hook(), Hook()
    give_up = [when_imported(name, hook) for hook in (first, second)]  # type: ignore[arg-type]
    give_up[0]()
    assert importlib.import_module(name).value == 2
    assert (first.calls, second.calls) == (0, 1)
    give_up[1]()


def test_an_import_that_fails_fails_and_may_succeed_later(name: str, tmp_path: Path) -> None:
    uninstall = when_imported(name, Hook())  # type: ignore[arg-type]
    file = tmp_path / f"{name}.py"
    file.write_text("raise KeyError('planted')\n")
    with pytest.raises(KeyError, match="planted"):
        importlib.import_module(name)
    file.write_text("value = 1  # mended\n")
    importlib.invalidate_caches()
    assert importlib.import_module(name).value == 2
    uninstall()


def test_a_hook_that_fails_is_counted_and_the_import_succeeds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "noted", [])

    def broken(module: ModuleType) -> object:
        raise AttributeError("gone")

    uninstall = when_imported(name, broken)  # type: ignore[arg-type]
    assert importlib.import_module(name).value == 1
    assert errors.noted == [(f"a hook in {name}", "AttributeError: gone")]
    uninstall()
