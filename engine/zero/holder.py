"""What brings a sharded parameter back, and finds it by the parameter."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from ..comm.comm import Comm
from .gather import Gatherer
from .registry import HOLDERS, holder_of
from .shard import Partition, ShardedParam


@dataclass(frozen=True, slots=True)
class Holder:
    """What brings a parameter back."""

    sharded: ShardedParam
    gatherer: Gatherer
    comm: Comm

    @property
    def name(self) -> str:
        return self.sharded.name

    def fetch(self) -> None:
        """Have the parameter whole, if something runs that it can be fetched for."""
        if self.sharded.fetches is not None:
            self.sharded.fetches.used(self.sharded)


def holder(param: Tensor) -> Holder | None:
    """What keeps `param` sharded; None for one that is not under ZeRO, or no longer."""
    return cast("Holder | None", holder_of(param))


def hold(param: nn.Parameter, found: Holder) -> None:
    """Have `holder(param)` return `found`, as long as what it consists of is alive: its parts keep their parameters."""
    refs = weakref.ref(found.sharded), weakref.ref(found.gatherer), weakref.ref(found.comm)

    def find() -> Holder | None:
        sharded, gatherer, comm = refs[0](), refs[1](), refs[2]()
        return None if sharded is None or gatherer is None or comm is None else Holder(sharded, gatherer, comm)

    HOLDERS[param] = find


def forget(param: nn.Parameter) -> None:
    """`param` is whole, and nobody's."""
    HOLDERS.pop(param, None)


class EarlyParam(ShardedParam):
    """A parameter sharded before there is an engine. It does not keep its parameter alive, but lives as long as
    that."""

    def __init__(self, name: str, param: nn.Parameter, gatherer: Gatherer, comm: Comm) -> None:
        self._param = weakref.ref(param)
        super().__init__(name, param, Partition(param.numel(), comm.size), comm.rank, persistent=False, index=0)
        HOLDERS[param] = lambda: Holder(self, gatherer, comm)

    @property
    def param(self) -> nn.Parameter:
        found = self._param()
        assert found is not None
        return found

    @param.setter
    def param(self, value: nn.Parameter) -> None:
        self._param = weakref.ref(value)
