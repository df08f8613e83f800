"""What a rank's tensors are for: parameters, gradients, states of optimizers, buffers.

Told from the objects that are alive, without a look at any value: modules make themselves known when they register a
parameter or a buffer, optimizers when they are made, and dsprof's engine tells of the pieces and buffers that are its
own. What counts is the storage behind a tensor, once: of a sharded parameter (FSDP, DTensor, ZeRO) the part that lies
here, of views into one flat buffer that buffer.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Final

from dsprof.engine import hooks
from dsprof.schema import HOST

from ..hooking import private
from ..hooking.constructors import after_init
from ..hooking.errors import count_error
from ..hooking.signals import by_handler
from ..hooking.uninstall import Uninstall, in_reverse

MOST_TENSORS: Final = 200_000
"""That are looked at: of more, those that come first."""

HOOK: Final = "what memory is for"
"""Names the hooks where their errors are counted."""

ASKED: Final = ("torch.nn:Module._parameters", "torch.nn:Module._buffers", "torch:UntypedStorage._cdata")

Parts = dict[tuple[str, str], int]
"""(where, such as `cuda.0` or `host`; what for, of schema.MEMORY_PARTS) -> bytes."""


class Alive:
    """Objects by identity, as long as somebody else keeps them: a class of the user's need not be hashable."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[Any]] = {}

    def add(self, one: Any) -> None:
        key = id(one)
        if key not in self._refs:
            self._refs[key] = weakref.ref(one, lambda _: self._refs.pop(key, None))

    def __iter__(self) -> Iterator[Any]:
        for ref in list(self._refs.values()):
            one = ref()
            if one is not None:
                yield one


class LiveTensors:
    """The modules and optimizers of this process."""

    def __init__(self) -> None:
        self.modules, self.optimizers = Alive(), Alive()
        self._able: bool | None = None

    def measure(self) -> Parts:
        """What their tensors take now."""
        from torch.nn import Parameter

        if not self._can_tell():
            return {}
        found = _Storages()
        for part, tensors in _of_engines().items():
            found.add(part, tensors)
        of_models, updated = self._of_models(), self._updated()
        found.add("parameters", of_models)
        found.add("parameters", [param for param in updated if isinstance(param, Parameter)])
        found.add("gradients", _gradients_of(of_models, updated))
        for module in self.modules:
            found.add("buffers", module._buffers.values())
        # What an optimizer updates in the place of a model's parameters: copies in a wider format.
        found.add("optimizer_states", updated)
        for optimizer in self.optimizers:
            for state in list(optimizer.state.values()):
                found.add("optimizer_states", state.values() if isinstance(state, dict) else (state,))
        return dict(found.bytes)

    def gradients(self) -> Parts:
        """Of gradients alone."""
        if not self._can_tell():
            return {}
        found = _Storages()
        found.add("gradients", _of_engines().get("gradients", ()))
        found.add("gradients", _gradients_of(self._of_models(), self._updated()))
        return dict(found.bytes)

    def _can_tell(self) -> bool:
        """Whether torch has the attributes that this asks for."""
        if self._able is None:
            self._able = all(private.has(name) for name in ASKED)
        return self._able

    def _of_models(self) -> list[Any]:
        return [param for module in self.modules for param in module._parameters.values() if param is not None]

    def _updated(self) -> list[Any]:
        """What optimizers update."""
        return [param for of in self.optimizers for group in of.param_groups for param in group["params"]]


def _of_engines() -> dict[str, list[object]]:
    """What dsprof's engines have, parameters first."""
    found: dict[str, list[object]] = {"parameters": []}
    for part, tensor in hooks.memory_held():
        found.setdefault(part, []).append(tensor)
    return found


def _gradients_of(*params: list[Any]) -> list[Any]:
    """torch warns of a look at the gradient of what is no leaf."""
    return [param.grad for of in params for param in of if param.is_leaf]


class _Storages:
    """Bytes by what they are for; a storage counts for what it was first seen as."""

    def __init__(self) -> None:
        self.bytes: Parts = defaultdict(int)
        self._seen: set[int] = set()
        self._left = MOST_TENSORS
        self._places: dict[Any, str] = {}

    def add(self, part: str, tensors: Iterable[Any]) -> None:
        import torch

        plain = (torch.Tensor, torch.nn.Parameter)
        for tensor in list(tensors):
            is_plain = type(tensor) in plain
            if not is_plain and not isinstance(tensor, torch.Tensor):
                continue
            self._left -= 1
            if self._left < 0:
                return
            # Of a DTensor what lies here. (A look at an attribute that is not there takes longer than all else.)
            self._count(part, tensor if is_plain else _local(tensor))
            if "ds_tensor" in tensor.__dict__:  # DeepSpeed's stage 3
                self._count(part, tensor.ds_tensor)

    def _count(self, part: str, tensor: Any) -> None:
        try:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._seen:
                return
            device, size = storage.device, storage.nbytes()
        except Exception as error:  # a tensor without a plain storage
            if by_handler(error):
                raise
            return
        place = self._places.get(device)
        if place is None:
            place = self._places[device] = place_of(device)
        if place:
            self._seen.add(key)
            self.bytes[place, part] += size


def _local(tensor: Any) -> Any:
    """Of a DTensor what lies here; any other is itself."""
    local = getattr(tensor, "_local_tensor", None)
    if local is not None:
        return local
    if type(tensor).__name__ == "DTensor":
        private.has("torch.distributed.tensor:DTensor._local_tensor")  # which tells what is lost
    return tensor


def place_of(device: Any) -> str:
    """`host`, `cuda.0`; empty for what takes no memory (meta)."""
    if device.type == "cpu":
        return HOST
    return "" if device.type == "meta" else f"{device.type}.{device.index or 0}"


_live = LiveTensors()
_watching = False


def live() -> LiveTensors:
    """Of this process, since `watch`."""
    return _live


def watch() -> Uninstall:
    """Know of modules and optimizers that are made from now on. Once a process; a second call does nothing."""
    global _watching
    if _watching:
        return lambda: None
    _watching = True
    from torch.nn.modules import module as modules
    from torch.optim import Optimizer

    from ..hooking import dynamo

    def note(module: Any, *_: Any) -> None:
        if not dynamo.compiling():
            _note(_live.modules, module)

    handles = [
        modules.register_module_parameter_registration_hook(note),
        modules.register_module_buffer_registration_hook(note),
    ]

    def note_optimizer(optimizer: Any, *_: Any, **__: Any) -> None:
        _live.optimizers.add(optimizer)

    def unwatch() -> None:
        global _watching
        _watching = False

    unwatch_optimizers = after_init(Optimizer, note_optimizer, HOOK)
    undo: list[Uninstall] = [unwatch, unwatch_optimizers, *(handle.remove for handle in handles)]
    return in_reverse(undo)


def _note(known: Alive, one: Any) -> None:
    try:
        known.add(one)
    except Exception as error:  # an object that cannot be referred to weakly
        count_error(HOOK, error)
