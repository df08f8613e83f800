"""`zero.Init`: parameters cut as they are made, so no rank ever holds the whole model. `zero.GatheredParameters`: whole
for a while, to look at or to change."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from ..comm import Comm, open_comm
from ..config import load
from ..hooks import Hooks
from ..lane import Inline
from ..precision import model_dtype
from .gather import Gatherer
from .shard import Cut, ShardedParam

ATTRIBUTE: Final = "_dsprof_holder"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who keeps a parameter in pieces, and can bring it back."""

    sharded: ShardedParam
    gatherer: Gatherer
    comm: Comm


def holder(param: nn.Parameter) -> Holder | None:
    """What keeps `param` in pieces; None for one that never was under ZeRO."""
    return getattr(param, ATTRIBUTE, None)


class Init:
    """Within this block every module that is made has its parameters cut over the ranks, and freed, as soon as its
    `__init__` is over (stage 3). Arguments as DeepSpeed's; those without a meaning here are errors.

        with dsprof.engine.zero.Init(config_dict_or_path="ds.json"):
            model = Model()

    Rank 0's values are everybody's. `module`: cut a module that exists already.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        config_dict_or_path: dict[str, Any] | str | Path | None = None,
        config: dict[str, Any] | str | Path | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        remote_device: str | None = None,
    ) -> None:
        source = config_dict_or_path if config_dict_or_path is not None else config
        if remote_device not in (None, "none"):
            raise ValueError(
                f"zero.Init: remote_device={remote_device!r} is not supported: write zero_optimization.offload_param"
            )
        if data_parallel_group is not None and data_parallel_group is not dist.group.WORLD:
            raise ValueError("zero.Init: data_parallel_group: every rank is a data-parallel one; leave it out")
        self._dtype = dtype
        if source is not None:
            from ..initialize import init_distributed

            init_distributed()
            settings = load(source, world_size=dist.get_world_size())
            enabled = enabled and settings.zero_optimization.stage == 3
            self._dtype = dtype or model_dtype(fp16=settings.fp16.enabled, bf16=settings.bf16.enabled)
        self._enabled = enabled
        self._restore: list[Callable[[], None]] = []
        self._depth = 0
        if module is not None and enabled:
            self._open()
            for inner in module.modules():
                self._cut(inner)

    def __enter__(self) -> Init:
        if not self._enabled:
            return self
        self._open()
        for kind in _subclasses(nn.Module):
            if "__init__" in vars(kind):
                self._watch(kind)
        watch = self._watch

        def __init_subclass__(cls: type[nn.Module], **kwargs: Any) -> None:
            super(nn.Module, cls).__init_subclass__(**kwargs)
            if "__init__" in vars(cls):
                watch(cls)

        # Classes defined inside the block.
        nn.Module.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment, arg-type]
        self._restore.append(lambda: delattr(nn.Module, "__init_subclass__"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._restore:
            self._restore.pop()()

    def _open(self) -> None:
        from ..initialize import init_distributed

        init_distributed()
        self._comm = open_comm(list(range(dist.get_world_size())), lambda: Inline(Hooks()))
        self._gatherer = Gatherer(self._comm)

    def _watch(self, kind: type[nn.Module]) -> None:
        original = kind.__init__

        @functools.wraps(original)
        def __init__(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            self._depth += 1
            try:
                original(module, *args, **kwargs)
            finally:
                self._depth -= 1
            # A base class's __init__ ends before the subclass has finished with the parameters.
            if type(module) is kind:
                self._cut(module)

        kind.__init__ = __init__  # type: ignore[method-assign, assignment]

        def restore() -> None:
            kind.__init__ = original  # type: ignore[method-assign]

        self._restore.append(restore)

    @torch.no_grad()
    def _cut(self, module: nn.Module) -> None:
        for name, param in module._parameters.items():
            if param is None or holder(param) is not None or param.is_meta:
                continue
            data = param.data
            if self._dtype is not None and data.is_floating_point():
                data = data.to(self._dtype)
            param.data = data.clone(memory_format=torch.contiguous_format)
            self._comm.broadcast(param.data, 0, "parameter").wait()
            sharded = ShardedParam(
                name, param, Cut(param.numel(), self._comm.size), self._comm.rank, persistent=False, index=0
            )
            setattr(param, ATTRIBUTE, Holder(sharded, self._gatherer, self._comm))
            sharded.release()


@contextlib.contextmanager
def GatheredParameters(
    params: nn.Parameter | nn.Module | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Within this block `params` are whole. What rank `modifier_rank` writes to them is then every rank's; without one,
    what is written is lost. Every rank must take part. Parameters that are not in pieces pass unchanged.
    """
    if not enabled:
        yield
        return
    if isinstance(params, nn.Module):
        params = params.parameters()
    listed = [params] if isinstance(params, nn.Parameter) else list(params)
    held = [found for param in dict.fromkeys(listed) if (found := holder(param)) is not None]
    absent = [found for found in held if not found.sharded.resident]
    for found in absent:
        found.gatherer.bring([found.sharded], found.sharded.numel)
    try:
        yield
    finally:
        with torch.no_grad():
            for found in held:
                if modifier_rank is not None:
                    found.comm.broadcast(found.sharded.param.data, modifier_rank, "parameter").wait()
                    found.sharded.take_from_whole()
            for found in absent:
                found.sharded.release()


def _subclasses(kind: type[nn.Module]) -> set[type[nn.Module]]:
    found = set(kind.__subclasses__())
    return found.union(*(_subclasses(inner) for inner in found)) if found else found
