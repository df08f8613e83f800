"""Looks up the private names of torch and of frameworks (`private_names.py`), and says what is lost where one is gone.

Whoever needs a name calls `need`, or `find` where he can do without. What is an attribute of objects is read as usual:
where that fails inside a hook, `told_of` knows the name by the AttributeError.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any, Final

from dsprof.schema import LOST_FACT

from . import statements
from .private_names import CUDA, NAMES, PrivateName
from .signals import by_handler

_BY_PATH: Final = {one.path: one for one in NAMES}


class Gone(AttributeError):
    """The torch, or the framework, of this process has no such private name."""

    def __init__(self, private: PrivateName) -> None:
        super().__init__(because(private))
        self.private = private


def need(path: str) -> Any:
    """What a name of the table stands for. Raises Gone."""
    private = _BY_PATH[path]
    module, _, attributes = path.partition(":")
    try:
        found: Any = sys.modules.get(module) or importlib.import_module(module)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        if by_handler(error):
            raise
        raise Gone(private) from None
    return found


def find(path: str) -> Any | None:
    """The same; None, and it is told what is lost, where it is gone."""
    try:
        return need(path)
    except Gone as gone:
        tell(gone.private)
        return None


def known(path: str) -> bool:
    """Whether it is in the table: what is public is not."""
    return path in _BY_PATH


def has(path: str) -> bool:
    """Whether objects have an attribute of the table: their class does, or a method of it names it. Where they do not,
    it is told what is lost."""
    if not _there(_BY_PATH[path]):
        tell(_BY_PATH[path])
        return False
    return True


def tell(private: PrivateName) -> None:
    """It is gone: have the capture say so."""
    lost(private.collectors, private.lost, because(private), private.decisive)


def lost(collectors: tuple[str, ...], what: str, why: str, decisive: bool = False) -> None:
    """State what these collectors do not record. decisive: they are as good as switched off."""
    statements.state(
        {"fact": LOST_FACT, "collectors": list(collectors), "what": what, "because": why, "decisive": decisive}
    )


def told_of(error: BaseException) -> bool:
    """Whether a private name is gone by this error of a hook, which is then told."""
    private = error.private if isinstance(error, Gone) else _of_object(error)
    if private is not None:
        tell(private)
    return private is not None


def _of_object(error: BaseException) -> PrivateName | None:
    """The name of the table that an object turned out not to have."""
    if not isinstance(error, AttributeError) or error.name is None:
        return None
    owner = error.obj if isinstance(error.obj, type) else type(error.obj)
    classes = {one.__name__ for one in owner.__mro__}
    for private in NAMES:
        *_, of, attribute = private.path.replace(":", ".").split(".")
        if attribute == error.name and of in classes:
            return private
    return None


def because(private: PrivateName) -> str:
    """Why something is lost: who has no such name."""
    version = getattr(sys.modules.get(private.package), "__version__", "")
    return f"{private.package} {version} has no {private.name}".replace("  ", " ")


def gone() -> Iterator[PrivateName]:
    """Those that the torch of this process should have, and has not. Imports what of torch they are in: not for a
    training process."""
    import torch

    for private in NAMES:
        if private.package == "torch" and (private.build != CUDA or torch.version.cuda) and not _there(private):
            yield private


def _there(private: PrivateName) -> bool:
    try:
        need(private.path)
    except Gone:
        owner, _, attribute = private.path.rpartition(".")
        return ":" in owner and _of_instances(owner, attribute)
    return True


def _of_instances(owner: str, attribute: str) -> bool:
    """Whether a method of the class names an attribute that its objects may have."""
    module, _, name = owner.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        if by_handler(error):
            raise
        return False
    methods = [value for one in getattr(found, "__mro__", ()) for value in vars(one).values()]
    functions = [getattr(value, "__func__", value) for value in methods]  # of class methods, too
    return any(isinstance(value, FunctionType) and attribute in value.__code__.co_names for value in functions)
