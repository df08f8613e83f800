"""torch.distributed.pipelining: which schedule, and how many micro-batches."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

from ..hooking.late_imports import when_imported
from ..hooking.uninstall import Uninstall, in_reverse, replace_attribute
from .arguments import override_arguments
from .override import Override

COUNT: Final = "n_microbatches"
PACKAGE: Final = "torch.distributed.pipelining"
SINGLE: Final = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
"""Schedules of ranks with one stage each."""
MULTI: Final = {
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "interleaved-zero-bubble": "ScheduleInterleavedZeroBubble",
}
"""Schedules of ranks with several stages, dealt out in turns."""


def install(overrides: list[Override]) -> Uninstall:
    """Apply them to every schedule made from now on."""
    by_name = {override.name: override for override in overrides}
    installed = []
    if (count := by_name.get("microbatches")) is not None:
        installed.append(when_imported(f"{PACKAGE}.schedules", lambda module: _cut(module, count)))
    if (schedule := by_name.get("schedule")) is not None:
        installed += [
            when_imported(name, lambda module: _exchange(module, schedule))
            for name in (f"{PACKAGE}.schedules", PACKAGE)
        ]
    return in_reverse(installed)


def _cut(module: ModuleType, override: Override) -> Uninstall:
    """Batches are cut into another number of micro-batches."""

    def hooks() -> Iterator[Uninstall]:
        # A schedule may use the number before its base class is given it.
        for cls in vars(module).values():
            own = vars(cls).get("__init__") if isinstance(cls, type) else None
            if own is not None and COUNT in inspect.signature(own).parameters:
                yield override_arguments(cls, "__init__", {COUNT: override}, cls.__name__)

    return in_reverse(list(hooks()))


def _exchange(module: ModuleType, override: Override) -> Uninstall:
    """Each schedule of the same kind (one stage a rank, or several) is the one that is asked for."""
    kind = SINGLE if override.value in SINGLE else MULTI
    chosen = getattr(module, kind[override.value])

    def hooks() -> Iterator[Uninstall]:
        for name in kind.values():
            there = getattr(module, name, None)
            if there is not None and there is not chosen:
                yield replace_attribute(module, name, _standing_for(there, chosen, override))
        for name in (MULTI if kind is SINGLE else SINGLE).values():
            if (other := getattr(module, name, None)) is not None:
                yield _telling(other, override)

    return in_reverse(hooks())


def _standing_for(original: type, chosen: Any, override: Override) -> type:
    """The chosen class, by which it is told that it takes the place of `original`."""

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        override.applied(original.__name__)
        chosen.__init__(self, *args, **kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Pickled, and copied, it is one of the chosen class, which can be found by its name."""
        _, _, *rest = chosen.__reduce_ex__(self, protocol)
        return (chosen.__new__, (chosen,), *rest)

    own = {"__init__": construct, "__reduce_ex__": __reduce_ex__, "__module__": chosen.__module__}
    return type(chosen.__name__, (chosen,), own)


def _telling(other: Any, override: Override) -> Uninstall:
    """Tell that a schedule of the other kind stays as it is."""
    from ..hooking.constructors import before_init

    def tell(made: Any, *_: Any, **__: Any) -> None:
        if type(made).__name__ == other.__name__:
            override.not_applied(f"{override.value} cannot take the place of {other.__name__}: the stages differ")

    return before_init(other, tell, f"--set {override.key}", watches=False)
