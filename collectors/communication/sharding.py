"""How the parameters are sharded: the communication units of FSDP2 (`fully_shard`) and FSDP1, and where they are made.

A model has dozens, so the fact is kept until the end of a step. What FSDP2 itself does for a unit (it copies shards in
and out, exchanges the module's parameters, and waits) is recorded as a `module` row named SHARDING, before and after
its forward and its backward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from dsprof.schema import SHARDING, Kind

from ..capture import facts
from ..capture.open_capture import OpenCapture
from ..hooking import private
from ..hooking.caller import caller
from ..hooking.constructors import after_init, before_init
from ..hooking.hook_parts import HookPart, install_each
from ..hooking.late_imports import when_imported
from ..hooking.timed import timed
from ..hooking.uninstall import Uninstall, in_reverse, replace_attribute
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
MOST_SITES: Final = 16
MOST_UNITS: Final = 1000
"""Whose sizes are told one by one."""
DTYPES: Final = ("param_dtype", "reduce_dtype")
"""Fields of its MixedPrecisionPolicy."""
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
    sites: dict[str, None] = field(default_factory=dict)
    """Lines of the script itself that made units, up to MOST_SITES."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the first unit of FSDP2: what `fully_shard` was told, under its arguments' names."""
    stated: int = 0
    """Units that the last fact told of."""

    gathered: int = 0
    """Bytes of all units in the type that they compute in: `bytes` without mixed precision."""
    largest: int = 0
    """The same of the largest unit."""
    of_units: list[tuple[int, int]] = field(default_factory=list)
    """The same of each of the first units, in the order in which they were made, and of that what is trained."""

    root: bool = False
    """Whether all that was made before lies inside of the last unit: a model without parameters of its own is none."""
    made: list[int] = field(default_factory=list)
    """Of each of `of_units` its module, by its id."""

    def add(self, modules: Sequence[Any], parameters: int, size: int, gathered: int, trained: int) -> None:
        """modules: that the unit is made of; the rest as of the fields."""
        site, framework = caller()
        if not self.units:
            self.site = site
        if site is not None and framework is None and len(self.sites) < MOST_SITES:
            self.sites[site] = None
        self.units += 1
        self.parameters += parameters
        self.bytes += size
        self.gathered += gathered
        self.largest = max(self.largest, gathered)
        if len(self.of_units) < MOST_UNITS:
            self.of_units.append((gathered, trained))
            inside = {id(each) for module in modules for each in module.modules()}
            self.root = not modules or all(one in inside for one in self.made)
            self.made.extend(id(module) for module in modules[:1])

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
                "gathered": self.gathered,
                "largest": self.largest,
                **({"of_units": self.of_units, "root": self.root} if len(self.of_units) == self.units else {}),
                "site": self.site,
                "sites": list(self.sites),
                **self.settings,
            }
        )


def install(capture: OpenCapture) -> list[Uninstall]:
    """Count units and record what is done for them from now on; how many there are is stated after steps."""
    second, first = Sharded(2), Sharded(1)
    capture.before_end.extend((second.state, first.state))
    of_second = functools.partial(_watch_second, second, capture.recorder)
    of_first = functools.partial(_watch_first, first)
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
        names = inspect.signature(type(group).__init__).parameters  # which other versions of torch may call otherwise
        given = {**dict(zip(names, (group, params, *args), strict=False)), **kwargs}
        told, policy = _settings(given)
        if not sharded.units:
            sharded.settings = told
        # Taken from the arguments: the group itself has shards only.
        size = sum(param.numel() * param.element_size() for param in params)
        computes = getattr(policy, "param_dtype", None)
        each = [param.numel() * (param if computes is None else computes).itemsize for param in params]
        trained = sum(one for one, param in zip(each, params, strict=True) if param.requires_grad)
        modules = given.get("modules", ())
        modules = modules if isinstance(modules, (tuple, list)) else (modules,)
        sharded.add(modules, len(params), size, sum(each), trained)

    def hooks() -> Iterator[Uninstall]:
        group, name = private.find(f"{SECOND}:FSDPParamGroup"), recorder.intern(SHARDING)
        if group is not None:
            yield before_init(group, count, "facts")
            begin = functools.partial(recorder.begin, int(Kind.MODULE), name)
            for method in AROUND_UNIT:
                if private.find(f"{SECOND}:FSDPParamGroup.{method}") is not None:
                    recorded = timed(getattr(group, method), begin, recorder.end, "a unit of FSDP2")
                    yield replace_attribute(group, method, recorded)
        for function, purpose in PURPOSES.items():
            original = private.find(f"{SECOND}:{function}")
            if original is not None:
                yield replace_attribute(module, function, for_purpose(recorder, purpose, original))

    return in_reverse(hooks())


def _settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """What `fully_shard` was told of a unit, and its policy of mixed precision: from the arguments that it gives its
    group."""
    told: dict[str, Any] = {}
    if {"mesh_info", "post_forward_mesh_info"} <= given.keys():
        whole, after = given["mesh_info"], given["post_forward_mesh_info"]
        ranks = getattr(after, "shard_mesh_size", None)
        told["reshard_after_forward"] = after is not None and (ranks if after is not whole and ranks else True)
    policy = given.get("mp_policy")
    for name in DTYPES:
        dtype = getattr(policy, name, None)
        told[name] = None if dtype is None else str(dtype).removeprefix("torch.")
    return told, policy


def _watch_first(sharded: Sharded, module: ModuleType) -> Uninstall:
    def count(unit: Any, *_: Any, **__: Any) -> None:
        flat = getattr(unit._handle, "flat_param", None)
        if flat is not None:  # a unit without parameters of its own communicates nothing
            size = sum(flat._numels) * flat.element_size()
            sharded.add((unit,), len(flat._numels), size, size, size if flat.requires_grad else 0)

    if not all(private.has(name) for name in OF_FIRST):
        return lambda: None
    return after_init(module.FullyShardedDataParallel, count, "facts")
