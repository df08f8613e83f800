"""Which parameters are sharded: a mapping beside them, so that they can be copied and saved like any other."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Final, Protocol

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class HolderLike(Protocol):
    """What is known of a sharded parameter, wherever it is used: see `holder.Holder`."""

    @property
    def name(self) -> str: ...

    def fetch(self) -> None:
        """Have the parameter whole, if something runs that it can be fetched for."""


HOLDERS: Final[MutableMapping[Tensor, Callable[[], HolderLike | None]]] = WeakIdKeyDictionary()
"""Parameter -> finds its holder. The values must not lead back to their parameters: these would never be freed."""


def holder_of(param: Tensor) -> HolderLike | None:
    """What keeps `param` sharded; None for one that is not under ZeRO, or no longer."""
    find = HOLDERS.get(param)
    return None if find is None else find()
