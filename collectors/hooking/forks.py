"""Locks in a forked child: the thread that held one when the process forked is not there to free it."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Final

_owners: Final[weakref.WeakKeyDictionary[object, str]] = weakref.WeakKeyDictionary()
"""Object -> its attribute that is a lock."""


def renew_in_child(owner: object, attribute: str) -> None:
    """Have a forked child give `owner` a new lock there. A thread that forks while it holds the old one leaves that."""
    _owners[owner] = attribute


def _renew() -> None:
    for owner, attribute in list(_owners.items()):
        setattr(owner, attribute, threading.RLock())


os.register_at_fork(after_in_child=_renew)
