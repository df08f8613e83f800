"""Which parameters are in pieces: a mapping beside them, so that they can be copied and saved like any other."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, Final, Protocol

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class UseListener(Protocol):
    """What fetches absent parameters when they are used."""

    def used(self, sharded: Any, /) -> Any:
        """Have `sharded` whole, if something runs that it can be fetched for."""


class Sharded(Protocol):
    """What is known of an absent parameter: of `shard.ShardedParam`, that which is used here."""

    @property
    def name(self) -> str: ...

    @property
    def fetches(self) -> UseListener | None: ...


class HoldsSharded(Protocol):
    """What keeps a parameter in pieces: of `holder.Holder`, that which is used here."""

    @property
    def sharded(self) -> Sharded: ...


HOLDERS: Final[MutableMapping[Tensor, Callable[[], HoldsSharded | None]]] = WeakIdKeyDictionary()
"""Parameter -> finds its holder. The values must not lead back to their parameters: these would never be freed."""


def holder_of(param: Tensor) -> HoldsSharded | None:
    """What keeps `param` in pieces; None for one that is not under ZeRO, or no longer."""
    find = HOLDERS.get(param)
    return None if find is None else find()
