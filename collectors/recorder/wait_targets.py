"""What a wait waits for, as `PyRecorder` knows it. The native helper's part is `native/waits.hpp`.

A collective is remembered when it is issued: by its work, or, as functional collectives hand out tensors in place of
works, by the memory of its tensors. A wait asks by the one or the other.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from ..hooking import private
from ..hooking.forks import renew_in_child
from ..hooking.signals import by_handler

MOST_TENSORS: Final = 256
"""Of one collective that are remembered."""
MOST_STORAGES: Final = 1024
"""Of all collectives; the newest."""
OF_STORAGE: Final = ("_cdata", "_weak_ref", "_free_weak_ref", "_expired")
"""Attributes of a storage that tell which it is, and whether it is gone."""
SWEPT: Final = 32
"""That are looked at with each collective, whether their tensor is gone."""


class Target(NamedTuple):
    """A collective, a send or a receive, as a wait's record names it."""

    name: int
    group: int
    seq: int
    peer: int
    """Of a send or a receive; else -1. So is `tag`."""
    tag: int
    p2p: bool


class Here(threading.local):
    """What a thread communicates and waits for."""

    issued: Target | None = None
    """The collective it issued last."""
    told: Target | None = None
    """The engine's communication that is under way on it, whose calls of c10d are passed over."""
    functional: int = 0
    """Operators of `_c10d_functional` that it is in, whose results are waited for by their tensors."""
    blocking: int = 0
    """How many calls it is in that wait in C++ for the collectives they issue."""
    wait: int = 0
    """Handle of the outermost one's record, from its first collective on."""
    work: Any = None
    """Of the collective it issued last: kept so that whoever issued it is given this object, and remembers it, until
    it has been waited for, or another is issued, or the step is over."""

    def __init__(self) -> None:
        self.inside: list[Any] = []
        """The works that it issued in calls it is in that wait in C++."""


class Targets:
    """The targets of this process, by work and by storage. Thread-safe."""

    def __init__(self) -> None:
        self.here = Here()
        self._works: WeakKeyDictionary[Any, Target] = WeakKeyDictionary()
        self._storages: dict[int, tuple[WeakStorage, Target]] = {}
        """By address, which is the storage's own while there is a weak reference to it. The newest last."""
        self._lock = threading.RLock()  # freeing a storage may collect garbage, and so run anything
        renew_in_child(self, "_lock")
        self._can_tell: bool | None = None
        """Storages apart; None: not yet known."""

    def remember_work(self, work: Any, target: Target) -> None:
        try:
            self._works[work] = target
        except TypeError as error:  # None
            if by_handler(error):
                raise

    def remember_tensors(self, value: Any, target: Target) -> None:
        """Of a tensor, a list of them, or a list of lists."""
        known = self._storages
        with self._lock:
            for storage in self._storages_of(value)[:MOST_TENSORS]:
                address = storage._cdata
                found = known.pop(address, None)
                known[address] = (WeakStorage(storage) if found is None else found[0]), target
            while len(known) > MOST_STORAGES:
                known.pop(next(iter(known)))
            for address in list(itertools.islice(known, SWEPT)):
                kept = known.pop(address)
                if not kept[0].gone:
                    known[address] = kept

    def forget_tensors(self, value: Any) -> None:
        """Of a tensor, a list of them, or a list of lists."""
        with self._lock:
            for storage in self._storages_of(value)[:MOST_TENSORS]:
                self._storages.pop(storage._cdata, None)

    def _storages_of(self, value: Any) -> list[Any]:
        """None, where torch does not have any more what tells them apart."""
        if self._can_tell is None:
            self._can_tell = all(private.find(f"torch:UntypedStorage.{name}") is not None for name in OF_STORAGE)
        return _storages(value) if self._can_tell else []

    def of_work(self, work: Any) -> Target | None:
        try:
            return self._works.get(work)
        except TypeError as error:  # no work, or one of a class that cannot be hashed
            if by_handler(error):
                raise
            return None

    def of_tensor(self, tensor: Any) -> Target | None:
        for storage in self._storages_of(tensor):
            found = self._storages.get(storage._cdata)
            return None if found is None else found[1]
        return None


class WeakStorage:
    """A weak reference, which keeps a storage's address from being used again, and not its memory.

    But it keeps the hundred bytes beside that, which may lie at the end of the hole that a large tensor leaves, so that
    none of its size fits in again: of thousands of them a process grows by what each of its steps gathers.
    """

    def __init__(self, storage: Any) -> None:
        self.address: int = storage._weak_ref()
        self._free, self._expired = type(storage)._free_weak_ref, type(storage)._expired

    @property
    def gone(self) -> bool:
        """Whether its tensor is."""
        return bool(self._expired(self.address))

    def __del__(self) -> None:
        self._free(self.address)


def _storages(value: Any) -> list[Any]:
    """Of a tensor, a list of them, or a list of lists."""
    if isinstance(value, (list, tuple)):
        if len(value) == 1:
            return _storages(value[0])
        return [storage for item in value for storage in _storages(item)]
    try:
        return [value.untyped_storage()]
    except (AttributeError, RuntimeError) as error:  # no tensor, or one without a storage (sparse)
        if by_handler(error):
            raise
        return []
