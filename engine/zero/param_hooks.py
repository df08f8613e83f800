"""Uses of parameters that no call of a module announces: seen where autograd saves them, and where they are read.

At the end: which modules are torch's own code, whose backward needs no parameter that autograd has not saved.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from .shard import ShardedParam

T = TypeVar("T")


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


class SavedParams(abc.ABC):
    """What autograd saves of the sharded parameters of one engine, which is brought when backward needs it."""

    def __init__(self) -> None:
        self.by_storage: dict[int, ShardedParam] = {}
        self._weights = 0
        """How often the weights have changed, by a step, a load or the script."""

    @abc.abstractmethod
    def _first_saved(self, param: ShardedParam) -> None:
        """Autograd saves `param` for the first time."""

    @abc.abstractmethod
    def _fetch(self, needed: list[ShardedParam], module: str) -> None:
        """Have `needed` whole."""

    def hook_saved_tensors(self) -> saved_tensors_hooks | None:
        """Have `_unpacked` called for the parameters that autograd saves from now on; None if it is already.

        Hooks that are there, as those of a checkpoint, do their part within ours.
        """
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        present = None if outer is None else getattr(outer[0], "__self__", None)
        if isinstance(present, SavedParamHooks) and present.by_storage is self.by_storage:
            return None
        weights = self._weights
        ours = SavedParamHooks(
            self.by_storage, self._first_saved, lambda param: self._unpacked(param, weights), outer
        )  # fmt: skip
        return saved_tensors_hooks(ours.pack, ours.unpack)

    def weights_written(self) -> None:
        """A script has written weights: what autograd has saved of them before is out of date."""
        self._weights += 1

    def replace_storage(self, key: int, param: ShardedParam) -> None:
        """`param` has a storage of its own instead of the one whose identity was `key`."""
        if self.by_storage.pop(key, None) is not None:
            self.by_storage[param.storage.key] = param

    def _unpacked(self, param: ShardedParam, weights: int) -> None:
        """Backward needs `param`, as it was after so many changes of the weights. It is in use until its gradient, or
        the backward, is complete.

        Raises RuntimeError if it has changed since, as torch does of what was changed in place."""
        if weights != self._weights and param.trainable:
            raise RuntimeError(
                "engine.backward: the loss is of a forward that ran before the weights changed, by a step, a load or "
                f"the script, and needs {param.name} as it was: take each loss backward before that, or run its "
                "forward again"
            )
        if not param.users:
            param.users = 1
            self._fetch([param], param.name.rpartition(".")[0])


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


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def once_a_backward(tensors: Iterable[Tensor], act: Callable[[T], object], argument: T) -> None:
    """Have `act` called with its argument in each backward when the first gradient of `tensors` has come."""
    last = -1

    def hook(grad: Tensor) -> None:
        nonlocal last
        if last != (last := torch._C._current_graph_task_id()):
            act(argument)

    for tensor in tensors:
        if tensor.requires_grad:
            tensor.register_hook(hook)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a module's output or arguments, however nested; those of a plain object's attributes too."""
    found = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (nn.Module, type)):
            found += [inner for inner in pytree.tree_leaves(vars(leaf)) if isinstance(inner, Tensor)]
    return found


# --- Whether modules, and the functions that they call, are torch's own code

# Backward then needs no parameter but those that autograd has saved. Code of the script's own may keep a parameter by
# itself, for a kernel that nothing announces.


_TORCH: Final = os.path.dirname(torch.__file__) + os.sep
_NAMES: Final = tuple(name for name, value in vars(F).items() if callable(value))
_read: Final[Callable[[Any], tuple[Any, ...]]] = itemgetter(*_NAMES)


def is_torchs(module: nn.Module) -> bool:
    """Whether the forward of `module`, and of all that it has, is torch's. One in a parametrization counts, too."""
    return all(
        "forward" not in vars(part)
        and type(part).__module__.startswith("torch.nn.")
        and getattr(type(part).forward, "__module__", "").startswith("torch.nn.")
        for part in module.modules()
    )


class Functions:
    """Those of torch.nn.functional, which modules look up whenever they run: a script may replace them."""

    def __init__(self) -> None:
        self._known = _read(vars(F))
        self.are_torchs = all(map(_is_torchs, self._known))

    def were_replaced(self) -> bool:
        """Whether one has been replaced since; True once."""
        if not self.are_torchs or _read(vars(F)) == self._known:
            return False
        self.are_torchs = False
        return True

    def replaced(self) -> str:
        """The names of those that are not what they were when this was made, with commas."""
        pairs = zip(_NAMES, self._known, _read(vars(F)), strict=True)
        return ", ".join(f"torch.nn.functional.{name}" for name, known, now in pairs if now is not known)


def _is_torchs(function: object) -> bool:
    if isinstance(function, FunctionType):
        return function.__code__.co_filename.startswith(_TORCH)  # a name can be copied, as functools.wraps does
    return isinstance(function, BuiltinFunctionType | type) or type(function).__module__.startswith(("torch", "typing"))
