"""Takes private names away from dsprof alone: torch, which needs them itself, goes on to see them.

`hide` has every look at an attribute fail that comes from a frame of the collectors, as it would if the attribute were
not there: on a module, and on the objects of a class. Of a class itself that cannot be done; there it is the function
that looks up the collectors' private names which does not find it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Final

from dsprof.collectors.hooking import private

_hidden: Final[set[tuple[int, str]]] = set()
"""(id of a module, a class or an object; attribute)."""
_known: Final = private._of_instances


def hide(path: str) -> None:
    """A name of `private_names.py`."""
    module, _, attributes = path.partition(":")
    owner: Any = importlib.import_module(module)
    *owners, name = attributes.split(".")
    for one in owners:
        owner = getattr(owner, one)
    _hidden.add((id(owner), name))
    if isinstance(owner, type):
        _watch_objects(owner)
    else:
        kind = type(owner)
        owner.__class__ = type(kind.__name__, (kind,), {"__getattribute__": _looking(kind.__getattribute__, id(owner))})
    vars(private)["getattr"] = _look
    vars(private)["_of_instances"] = _of_instances


def _watch_objects(cls: Any) -> None:
    cls.__getattribute__ = _looking(cls.__getattribute__, id(cls))


def _looking(usual: Any, owner: int) -> Any:
    def __getattribute__(self: Any, name: str) -> Any:
        if (owner, name) in _hidden and str(sys._getframe(1).f_globals.get("__name__")).startswith("dsprof.collectors"):
            raise AttributeError(f"hidden: {name}", name=name, obj=self)
        return usual(self, name)

    return __getattribute__


def _look(owner: Any, name: str, *default: Any) -> Any:
    """`getattr`, as `private` calls it."""
    if (id(owner), name) in _hidden:
        raise AttributeError(f"hidden: {name}", name=name, obj=owner)
    return getattr(owner, name, *default)


def _of_instances(owner: str, attribute: str) -> bool:
    module, _, name = owner.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return (id(found), attribute) not in _hidden and _known(owner, attribute)
