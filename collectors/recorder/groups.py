"""Process groups as `PyRecorder` knows them, and when torch begins to number them anew. The native helper's are in
`native/groups.hpp`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..hooking.forks import renew_in_child
from ..hooking.uninstall import Uninstall, in_reverse, replace_attribute
from ..hooking.wrap import stands_for


@dataclass
class Group:
    id: int
    """Of its name."""
    gloo: bool | None = None
    """Whether its CPU backend is gloo; None until somebody asked."""
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    """Of its collectives. A signal's handler may take one in the middle of anything."""


class Groups:
    """Groups by name, as a new one may have a destroyed one's address. Thread-safe; without a lock for a known one."""

    def __init__(self, intern: Callable[[str], int]) -> None:
        self._lock = threading.RLock()  # a signal's handler may call a collective while its thread holds it
        renew_in_child(self, "_lock")
        self._intern = intern
        self._groups: dict[str, Group] = {}
        self._generation = 1

    def named(self, name: str) -> Group:
        """The group that has this name now."""
        group = self._groups.get(name)
        if group is not None:
            return group
        with self._lock:
            known_as = name if self._generation == 1 else f"{name}#{self._generation}"
            return self._groups.setdefault(name, Group(self._intern(known_as)))

    def renew(self) -> None:
        """The default group was destroyed: torch numbers its groups from 0 again; keep the next ones apart (`0#2`)."""
        with self._lock:
            self._generation += 1
            self._groups = {}


def watch_destroy(renew_groups: Callable[[], None]) -> Uninstall:
    """Notice when the default group is destroyed."""
    from torch import distributed
    from torch.distributed import distributed_c10d

    original = distributed_c10d.destroy_process_group

    @stands_for(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not distributed.is_initialized():
            renew_groups()
        return result

    modules = (distributed, distributed_c10d)
    return in_reverse(replace_attribute(module, original.__name__, destroy_process_group) for module in modules)
