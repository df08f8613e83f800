"""FSDP2: the arguments of `fully_shard`, coarser units, and explicit prefetching."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any, Final

from ..hooking.errors import count_error
from ..hooking.late_imports import when_imported
from ..hooking.uninstall import Uninstall, in_reverse, replace_attribute
from ..hooking.wrap import stands_for
from .arguments import put
from .override import Override

MODULES: Final = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
"""From which scripts import `fully_shard`; all have the same."""
DTYPES: Final = {"param_dtype", "reduce_dtype"}
"""Fields of its MixedPrecisionPolicy."""
ORIGINAL: Final = "_dsprof_class"
"""In the class that a module has while it waits: its own."""
PREFETCH: Final = ("forward_prefetch", "backward_prefetch")


def install(overrides: list[Override]) -> Uninstall:
    """Apply them to every `fully_shard` from now on."""
    override = _Sharding({override.name: override for override in overrides}).override
    return in_reverse([when_imported(name, override) for name in MODULES])


class _Sharding:
    """`fully_shard` with what is asked for, wherever a script imports it from: its units are counted in one place."""

    def __init__(self, overrides: Mapping[str, Override]) -> None:
        self.overrides = overrides
        self.units: _UnitsOfScript | None = None
        self.original: Any = None
        self.ours: Any = None

    def override(self, module: ModuleType) -> Uninstall:
        shard = module.fully_shard
        if isinstance(shard, ModuleType):
            return lambda: None  # of the same name
        if shard is self.ours:  # it comes from where it was replaced already
            return lambda: setattr(module, "fully_shard", self.original)
        hooks = []
        if self.units is None:
            self.units = _UnitsOfScript(shard, self.overrides)
            self.original, self.ours = shard, self._wrapper(shard, self.units)
            if self.units.coarser is not None:
                from torch.optim import Optimizer

                hooks.append(replace_attribute(Optimizer, "__init__", self.units.before_optimizer(Optimizer.__init__)))
        return in_reverse([*hooks, replace_attribute(module, "fully_shard", self.ours)])

    def _wrapper(self, shard: Any, units: _UnitsOfScript) -> Any:
        @stands_for(shard)
        def fully_shard(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = inspect.signature(shard).bind(*args, **kwargs)
                _change(bound, self.overrides)
            except Exception as error:
                count_error("--set for fully_shard", error)
                return shard(*args, **kwargs)
            return units.shard(bound)

        return fully_shard


def _change(bound: inspect.BoundArguments, overrides: Mapping[str, Override]) -> None:
    """Other values for what one call of `fully_shard` is given."""
    if (reshard := overrides.get("reshard_after_forward")) is not None:
        put(bound, "reshard_after_forward", reshard.value, reshard)
    if policy := DTYPES & overrides.keys():
        import torch

        own = bound.arguments.get("mp_policy", bound.signature.parameters["mp_policy"].default)
        for name in policy:
            overrides[name].applied(getattr(own, name))
        wanted = {name: getattr(torch, overrides[name].value) for name in policy}
        bound.arguments["mp_policy"] = dataclasses.replace(own, **wanted)


class _UnitsOfScript:
    """Calls of `fully_shard`: several modules of one class in one unit, where that is asked for.

    The modules of a unit that is not full yet wait for the next call that is not one of them: that for what holds them,
    which is the last. A script that never makes it is ended where it builds its optimizer, which would hold parameters
    that are not sharded. One that sets up a module right after it was sharded (`layer.set_...`, `layer.unshard()`)
    needs it sharded by then: its unit is closed as it is.
    """

    def __init__(self, shard: Any, overrides: Mapping[str, Override]) -> None:
        self.call = shard
        self.coarser = overrides.get("modules_per_unit")
        self.prefetch = [overrides[name] for name in PREFETCH if name in overrides]
        self.waiting: list[Any] = []
        self.bound: inspect.BoundArguments | None = None
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()
        """Modules that `fully_shard` was called for."""

    def shard(self, bound: inspect.BoundArguments) -> Any:
        module = bound.arguments["module"]
        if self.coarser is not None and not isinstance(module, list) and not self._holds_units(module):
            self._add(module, bound)
            return module
        self.flush()
        result = self.call(*bound.args, **bound.kwargs)
        for override in self.prefetch:
            _prefetch(module, override)
        return result

    def _holds_units(self, module: Any) -> bool:
        return any(one in self.seen for one in module.modules() if one is not module)

    def _add(self, module: Any, bound: inspect.BoundArguments) -> None:
        assert self.coarser is not None
        self.seen.add(module)
        alike = not self.waiting or _own_class(self.waiting[-1]) is type(module)
        if self.waiting and not (alike and _equal_but_module(self.bound, bound)):
            self.flush()
        self._watch(module)
        self.waiting.append(module)
        self.bound = bound
        if len(self.waiting) == self.coarser.value:
            self.flush()

    def _watch(self, module: Any) -> None:
        """Until it is sharded, the module has a class of ours, which knows when a sharded one's attribute is wanted."""
        original = type(module)

        def __getattr__(waiting: Any, name: str) -> Any:
            if name in _of_sharded() and any(one is waiting for one in self.waiting):
                self._close_early(name)
                return getattr(waiting, name)
            return original.__getattr__(waiting, name)

        with suppress(TypeError):  # of a class that cannot be exchanged, such attributes are told to be missing
            module.__class__ = type(original.__name__, (original,), {"__getattr__": __getattr__, ORIGINAL: original})

    def _close_early(self, name: str) -> None:
        assert self.coarser is not None
        self.coarser.not_applied(
            f"the script calls {name}() of each module as soon as it is sharded, so no unit can wait for its others"
        )
        self.flush()

    def flush(self) -> None:
        modules, self.waiting = self.waiting, []
        if not modules or self.bound is None or self.coarser is None:
            return
        for one in modules:
            if _own_class(one) is not type(one):
                one.__class__ = _own_class(one)
        self.bound.arguments["module"] = modules if len(modules) > 1 else modules[0]
        if len(modules) > 1:
            self.coarser.applied(1)
        self.call(*self.bound.args, **self.bound.kwargs)

    def before_optimizer(self, construct: Any) -> Any:
        @stands_for(construct)
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            if self.waiting:
                raise RuntimeError(
                    "--set fsdp2.modules_per_unit: the script calls fully_shard for parts of its model and never for "
                    "the whole, so the last unit is not complete; call fully_shard(model) after its parts"
                )
            construct(optimizer, *args, **kwargs)

        return __init__


def _own_class(module: Any) -> Any:
    """That of a module which may be waiting."""
    return vars(type(module)).get(ORIGINAL, type(module))


def _of_sharded() -> frozenset[str]:
    """Names that a module has only once it is sharded."""
    import torch
    from torch.distributed.fsdp import FSDPModule

    return frozenset(dir(FSDPModule)) - frozenset(dir(torch.nn.Module))


def _equal_but_module(one: inspect.BoundArguments | None, other: inspect.BoundArguments) -> bool:
    """Whether two calls differ in nothing but the module."""
    if one is None:
        return False
    first, second = ({**bound.arguments, "module": None} for bound in (one, other))
    try:
        return first.keys() == second.keys() and all(first[k] is second[k] or first[k] == second[k] for k in first)
    except Exception:  # such as of tensors, whose == has no truth
        return False


def _prefetch(root: Any, override: Override) -> None:
    """While a unit computes, its next ones (backward: those before it) are gathered. The order is that in which they
    are registered; the last call, for the root, sees all of them."""
    try:
        units = [one for one in root.modules() if hasattr(one, f"set_modules_to_{override.name}")]
        units = [one for one in units if one is not root]
        if override.name == "backward_prefetch":
            units.reverse()
        for number, unit in enumerate(units):
            following = units[number + 1 : number + 1 + override.value]
            getattr(unit, f"set_modules_to_{override.name}")(following)
        if units:
            override.applied(1)
    except Exception as error:
        count_error(f"--set {override.key}", error)
