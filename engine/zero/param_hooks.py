"""Uses of parameters that no call of a module announces: seen where autograd saves them, and where they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .shard import ShardedParam


@dataclass(frozen=True, slots=True)
class _Saved:
    """What autograd keeps in the place of a parameter, or a view of it."""

    hooks: SavedParamHooks
    """Whose this is: hooks of several engines may be around each other."""
    param: ShardedParam
    kept: Any


@dataclass(eq=False, slots=True)
class SavedParamHooks:
    """Hooks on what autograd saves, around those that were there."""

    by_storage: Mapping[int, ShardedParam]
    """Parameters by the identity of their storage; those of one engine."""
    first_saved: Callable[[ShardedParam], None]
    """Is called with each that is not known to be `saved`."""
    unpacked: Callable[[ShardedParam], None]
    """Is called with each that backward needs."""
    outer: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None

    # Called for everything that is saved, few of which are parameters.

    def pack(self, tensor: Tensor) -> Any:
        try:
            param = self.by_storage.get(tensor.untyped_storage()._cdata)
        except NotImplementedError:  # a sparse one, or a wrapper of others
            param = None
        kept = tensor if self.outer is None else self.outer[0](tensor)
        if param is None:
            return kept
        if not param.saved:
            self.first_saved(param)
        return _Saved(self, param, kept)

    def unpack(self, packed: Any) -> Tensor:
        if type(packed) is not _Saved or packed.hooks is not self:
            return packed if self.outer is None else self.outer[1](packed)
        tensor: Tensor = packed.kept if self.outer is None else self.outer[1](packed.kept)
        self.unpacked(packed.param)
        return tensor


class WatchedParameters(dict[str, "nn.Parameter | None"]):
    """A module's parameters. `read` is called with each that is read, and whether by its name."""

    def __init__(
        self, params: Mapping[str, nn.Parameter | None], read: Callable[[nn.Parameter | None, bool], None]
    ) -> None:
        super().__init__(params)
        self._read = read

    def plain(self) -> dict[str, nn.Parameter | None]:
        return dict(super().items())

    def __reduce__(self) -> tuple[type[dict[str, nn.Parameter | None]], tuple[dict[str, nn.Parameter | None]]]:
        return dict, (dict(self.items()),)  # a copied or saved module has plain parameters

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        self._read(param, True)
        return param

    def items(self) -> Any:
        self.values()
        return super().items()

    def values(self) -> Any:
        for param in super().values():
            self._read(param, False)
        return super().values()
