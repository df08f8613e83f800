"""How the parameters are sharded: the communication units of FSDP2 (`fully_shard`) and FSDP1, and where they are made.

A model has dozens, so the fact is kept until the end of a step. What FSDP2 itself does for a unit (it copies shards in
and out, exchanges the module's parameters, and waits) is recorded as a `module` row named SHARDING, before and after
its forward and its backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from dsprof.schema import SHARDING, Kind

from ..capture import facts
from ..hooking import dynamo, private
from ..hooking.errors import count_error
from ..hooking.hook_parts import HookPart, install_each
from ..hooking.late_imports import when_imported
from ..hooking.uninstall import Uninstall, in_reverse, replace_attribute
from ..hooking.wrap import stands_for
from .purposes import for_purpose

if TYPE_CHECKING:
    from ..recorder.record import Recorder

FSDP: Final = "torch.distributed.fsdp"
SECOND: Final = f"{FSDP}._fully_shard._fsdp_param_group"
OF_FIRST: Final = (
    f"{FSDP}.fully_sharded_data_parallel:FullyShardedDataParallel._handle",
    f"{FSDP}._flat_param:FlatParameter._numels",
)
AROUND_UNIT: Final = ("pre_forward", "post_forward", "pre_backward", "post_backward")
"""Methods of FSDP2's FSDPParamGroup."""
PURPOSES: Final = {"foreach_all_gather": "parameter", "foreach_reduce": "gradient"}
"""Functions that communicate for its units -> what for. A pipeline's schedule gathers and reduces between its actions,
and a script may gather ahead: the place does not tell."""


@dataclass
class Sharded:
    """The units of one version of FSDP that this process has made."""

    version: int
    units: int = 0
    parameters: int = 0
    """Tensors."""
    bytes: int = 0
    """Of them unsharded."""
    site: str | None = None
    """Where the first was made."""
    stated: int = 0
    """Units that the last fact told of."""

    def add(self, parameters: int, size: int) -> None:
        if not self.units:
            self.site = facts.caller_site()
        self.units += 1
        self.parameters += parameters
        self.bytes += size

    def state(self) -> None:
        if self.stated == self.units:
            return
        self.stated = self.units
        facts.state(
            {
                "fact": "fsdp",
                "version": self.version,
                "units": self.units,
                "parameters": self.parameters,
                "bytes": self.bytes,
                "site": self.site,
            }
        )


def install(recorder: Recorder, each_step: Callable[[Callable[[], None]], None]) -> list[Uninstall]:
    """Count units and record what is done for them from now on; what is given to `each_step`, to be called after steps,
    states how many there are."""
    second, first = Sharded(2), Sharded(1)
    each_step(second.state)
    each_step(first.state)
    of_second, of_first = functools.partial(_watch_second, second, recorder), functools.partial(_watch_first, first)
    parts = (
        HookPart("how FSDP2 divides the model is not known", lambda: when_imported(SECOND, of_second), decisive=True),
        HookPart(
            "how FSDP1 divides the model is not known",
            lambda: when_imported(f"{FSDP}.fully_sharded_data_parallel", of_first),
        ),
    )
    return install_each("sharding", parts)


def _watch_second(sharded: Sharded, recorder: Recorder, module: ModuleType) -> Uninstall:
    def count(group: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        # Taken from the arguments: the group itself has shards only.
        sharded.add(len(params), sum(param.numel() * param.element_size() for param in params))

    def hooks() -> Iterator[Uninstall]:
        group, name = private.find(f"{SECOND}:FSDPParamGroup"), recorder.intern(SHARDING)
        if group is not None:
            yield _before_init(group, count)
            for method in AROUND_UNIT:
                if private.find(f"{SECOND}:FSDPParamGroup.{method}") is not None:
                    yield _record(group, method, recorder, name)
        for function, purpose in PURPOSES.items():
            original = private.find(f"{SECOND}:{function}")
            if original is not None:
                yield replace_attribute(module, function, for_purpose(recorder, purpose, original))

    return in_reverse(hooks())


def _record(cls: Any, method: str, recorder: Recorder, name: int) -> Uninstall:
    original = getattr(cls, method)
    compiling, begin, end, kind = dynamo.check(), recorder.begin, recorder.end, int(Kind.MODULE)

    @stands_for(original)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return original(*args, **kwargs)
        handle = begin(kind, name)
        try:
            return original(*args, **kwargs)
        finally:
            end(handle)

    dynamo.skip_frame(recorded)
    return replace_attribute(cls, method, recorded)


def _watch_first(sharded: Sharded, module: ModuleType) -> Uninstall:
    cls: Any = module.FullyShardedDataParallel
    if not all(private.has(name) for name in OF_FIRST):
        return lambda: None
    construct = cls.__init__

    @stands_for(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        try:
            flat = getattr(self._handle, "flat_param", None)
            if flat is not None:  # a unit without parameters of its own communicates nothing
                sharded.add(len(flat._numels), sum(flat._numels) * flat.element_size())
        except Exception as error:
            _count(error)

    return replace_attribute(cls, "__init__", __init__)


def _before_init(cls: Any, count: Callable[..., None]) -> Uninstall:
    construct = cls.__init__

    @stands_for(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            count(self, *args, **kwargs)
        except Exception as error:
            _count(error)
        construct(self, *args, **kwargs)

    return replace_attribute(cls, "__init__", __init__)


def _count(error: Exception) -> None:
    count_error("facts", error)
