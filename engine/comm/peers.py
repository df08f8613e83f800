"""A rank that fails by itself: it says why in the job's store, and who waits for it ends with that, not by a time-out.

Nothing is exchanged while nothing fails. A script may catch what an engine raises and go on, so an error alone is no
end: a rank is given up where its process ends by an error that nobody has caught, and where it is proved that it will
not come (`deadlock`). It then closes its connections, which ends all waits for it, and the others find what it said.
NCCL has no connections to close: there a thread of each rank looks whether another has ended, and aborts the groups.
"""

from __future__ import annotations

import json
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .comm import Comm, break_connections
from .consensus import SharedError, reason

POLL_S: Final = 2.0
"""Between two looks whether another rank has ended, on NCCL."""
LONGEST: Final = 1000
"""Characters of an error's text: an out-of-memory error of a device has a page."""
CLOSED: Final = ("closed", "pair closure", "reset by peer", "broken pipe", "aborted", "socket error")
"""What the errors of gloo and NCCL say, in lower case, where another rank is not there any more."""


class Peers:
    """The other ranks of a job, for one engine: what they and this one say of their failures."""

    def __init__(
        self, everyone: Comm, groups: Iterable[dist.ProcessGroup | None], *, polls: bool | None = None
    ) -> None:
        """On all ranks. `groups` are those that ranks may wait for this one in. `polls`: look for ranks that have
        ended; by default where a wait does not end by itself when they have, as on NCCL."""
        self._groups = list({id(group): group for group in groups if group is not None}.values())
        self._rank = dist.get_rank() if everyone.group is not None else 0
        self._ranks = [] if everyone.group is None else dist.get_process_group_ranks(everyone.group)
        self._store: Any = None
        self._noted = False
        self.lost: SharedError | None = None
        """Why nothing can be done together any more."""
        self._stop = threading.Event()
        if everyone.group is None:
            return
        store = distributed_c10d._get_default_store()
        self._store = distributed_c10d.PrefixStore(f"dsprof/failed/{everyone.group.group_name}", store)
        self._store.set(str(self._rank), "")  # what there may be of an earlier job in the same store
        if everyone.rank == 0:
            self._store.set("ended", "")
        _listen(self)
        if everyone.device is not None if polls is None else polls:
            watcher = threading.Thread(
                target=_watch, args=(weakref.ref(self), self._stop), name="dsprof-peers", daemon=True
            )
            watcher.start()

    # --- this rank

    def note(self, doing: str, error: BaseException) -> None:
        """An error leaves `doing`, which others may be in the middle of: say so, should they come to wait for it."""
        if self._store is not None and not isinstance(error, SharedError) and not is_lost(error):
            self._noted = True
            with suppress(RuntimeError):
                self._store.set(str(self._rank), json.dumps([doing, reason(error)[:LONGEST]]))

    def withdraw(self) -> None:
        """The last error has kept nobody waiting."""
        if self._noted:
            self._noted = False
            with suppress(RuntimeError):
                self._store.set(str(self._rank), "")

    def give_up(self) -> None:
        """Have all who wait for this rank fail, now or later."""
        for group in self._groups:
            with suppress(RuntimeError, ValueError):  # what is destroyed already
                break_connections(group)
                if dist.get_backend(group) == "nccl":
                    group.abort()

    def uncaught(self, error: BaseException) -> None:
        """The process ends by an error that nobody has caught: the others are told, and wait no longer."""
        if not dist.is_initialized():
            return
        said = self._said(self._rank)
        if said is None or said[1] != reason(error)[:LONGEST]:
            self.note("the script", error)
        with suppress(RuntimeError):
            self._store.set("ended", str(self._rank))
        self.give_up()

    def close(self) -> None:
        """The engine is destroyed."""
        self._stop.set()
        _ALIVE.discard(self)
        self.withdraw()

    # --- the others

    def check(self, doing: str) -> None:
        """Raise SharedError if another rank has ended: what was waited for on a device since is not there."""
        if self.lost is not None:
            raise SharedError(f"{doing}: {self.lost}")

    def explain(self, doing: str, error: BaseException) -> SharedError | None:
        """What to raise in the place of an error of `doing` that says no more than that another rank is not there."""
        if self._store is None or isinstance(error, SharedError) or not is_lost(error):
            return None
        text = self.cause()
        if text is None and not any(word in str(error).lower() for word in CLOSED):
            return None  # a time-out, of which there is no more to say
        unknown = "another rank of the job has ended, or has closed its connections, and no rank has said why: it may "
        unknown += "have been killed; see what the others printed, and how they ended"
        return SharedError(f"{doing}: {text or unknown}")

    def cause(self) -> str | None:
        """Which other ranks have failed and in what, in a sentence; None if none has said so."""
        found = {rank: said for rank in self._ranks if rank != self._rank and (said := self._said(rank)) is not None}
        if not found:
            return None
        first, (doing, text) = next(iter(found.items()))
        others = f" (and so have the ranks {', '.join(map(str, list(found)[1:]))})" if len(found) > 1 else ""
        return (
            f"rank {first} has failed{others} in {doing}: {text}. This rank cannot go on without it: end the job, and "
            "start it again from a checkpoint"
        )

    def ended(self) -> bool:
        """Whether another rank has ended by an error; then all groups of this one are aborted."""
        if not self._store.check(["ended"]) or self._store.get("ended") in (b"", str(self._rank).encode()):
            return False
        self.lost = SharedError(self.cause() or "another rank of the job has ended by an error; see what it printed")
        self.give_up()
        return True

    def _said(self, rank: int) -> Any:
        """(in what it has failed, the error) of a rank."""
        with suppress(RuntimeError, ValueError):
            text = self._store.get(str(rank)).decode() if self._store.check([str(rank)]) else ""
            return json.loads(text) if text else None
        return None


def is_lost(error: BaseException) -> bool:
    """Whether it says no more than that another rank is not there."""
    text = str(error)
    return isinstance(error, dist.DistError) or "gloo" in text or "pair closure" in text


_ALIVE: Final[weakref.WeakSet[Peers]] = weakref.WeakSet()
_BEFORE: Final[list[Callable[..., object]]] = []
"""What `sys.excepthook` was before ours: at exit it would be too late, if a thread does not end."""


def _listen(peers: Peers) -> None:
    """Have it told of an error that nobody catches, as long as it is alive and not closed."""
    if not _BEFORE:
        _BEFORE.append(sys.excepthook)
        sys.excepthook = _excepthook
    _ALIVE.add(peers)


def _excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    _BEFORE[0](kind, error, traceback)
    if not hasattr(sys, "ps1"):  # an interactive interpreter goes on
        for peers in list(_ALIVE):
            peers.uncaught(error)


def _watch(alive: weakref.ref[Peers], stop: threading.Event) -> None:
    while not stop.wait(POLL_S):
        peers = alive()
        try:
            if peers is None or peers.ended():
                return
        except RuntimeError:  # the store's host has ended
            return
        del peers
