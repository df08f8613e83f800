"""`zero.Init`: parameters sharded as they are made, so no rank ever holds the whole model. `zero.GatheredParameters`:
whole for a while, to look at or to change."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..comm.comm import open_comm
from ..comm.lane import Inline
from ..comm.launch import init_distributed, local_device
from ..config import ZeroConfig, load
from ..hooks import Hooks
from ..optim.loss_scaler import model_dtype
from .gather import Gatherer
from .param_hooks import WatchedParameters
from .shard import ParamGatherer, ShardedParam, find_sharded
from .shares import Partition, Shares, equal
from .storage import REGISTRY

INSTEAD: Final = {
    "remote_device": "write zero_optimization.offload_param",
    "pin_memory": "write zero_optimization.offload_param.pin_memory",
    "mpu": "every rank is a data-parallel one",
    "data_parallel_group": "every rank is a data-parallel one",
    "zero_param_parallel_group": "write zero_optimization.zero_hpz_partition_size",
    "zero_quantized_weights": "write it in zero_optimization: the engine gathers by it",
    "zero_quantized_nontrainable_weights": "weights travel as they are",
    "sequence_data_parallel_group": "every rank is a data-parallel one",
    "param_swapper": "write zero_optimization.offload_param",
}
"""DeepSpeed's arguments that `Init` does not have, and what there is for them."""


class EarlyParam(ShardedParam):
    """A parameter sharded before there is an engine. It does not keep its parameter alive, but lives as long as
    that."""

    def __init__(self, name: str, param: nn.Parameter, gatherer: ParamGatherer, shares: Shares | None = None) -> None:
        """`shares`: of the job's ranks; by default all are equal."""
        self._param = weakref.ref(param)
        comm = gatherer.comm
        partition = Partition(param.numel(), shares or equal(comm.size))
        super().__init__(name, param, partition, comm.rank, gatherer, persistent=False, index=0)
        self.trainable = False  # not as long as there is no engine
        REGISTRY[param] = lambda: self

    @property
    def param(self) -> nn.Parameter:
        found = self._param()
        assert found is not None
        return found

    @param.setter
    def param(self, value: nn.Parameter) -> None:
        self._param = weakref.ref(value)


@dataclass(eq=False, slots=True)
class _InitCall:
    """An `__init__` or `apply` under way in the block, and the parameters it gathered or replaced in sharded
    modules."""

    module: nn.Module | None
    touched: dict[nn.Parameter, None] = field(default_factory=dict)


class Init:
    """Within this block every module that is made has its parameters sharded over the ranks, and freed, as soon as its
    `__init__` is over (stage 3).

        with dsprof.engine.zero.Init(config_dict_or_path="ds.json"):
            model = Model()

    Rank 0's values are everybody's. Reading a parameter of such a module (`self.apply(init_weights)`, tied weights)
    brings it back, until the `__init__` or `apply` that read it is over; every rank has to read the same ones.

    `module`: shard one that exists already. `config_dict_or_path`, or `config`: another stage than 3 turns this off, as
    `enabled=False` does. `dtype`: of the parameters; the configuration's by default. `mem_efficient_linear` changes
    nothing: no linear layer keeps a copy of its weight here. DeepSpeed's other arguments raise ValueError.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: dict[str, Any] | str | Path | None = None,
        config: dict[str, Any] | str | Path | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **others: Any,
    ) -> None:
        if unknown := sorted(others.keys() - INSTEAD.keys()):
            raise TypeError(f"zero.Init: no argument {', '.join(unknown)}")
        if remote_device == "none":
            remote_device = None
        if data_parallel_group is dist.group.WORLD:
            data_parallel_group = None
        given = {
            "data_parallel_group": data_parallel_group, "remote_device": remote_device, "pin_memory": pin_memory,
            "mpu": mpu, **others,
        }  # fmt: skip
        for name, value in given.items():
            if value is not None and value is not False:
                raise ValueError(f"zero.Init: {name}={value!r} is not supported: {INSTEAD[name]}; leave it out")
        if config is not None and config_dict_or_path is not None:
            raise ValueError("zero.Init: config and config_dict_or_path: pass one of them")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"zero.Init: dtype={dtype} is not of floating-point numbers")
        source = config_dict_or_path if config_dict_or_path is not None else config
        self._dtype = dtype
        self._shares: Shares | None = None
        if source is not None:
            init_distributed()
            settings = load(self.settled(source), world_size=dist.get_world_size())
            enabled = enabled and settings.zero_optimization.stage == 3
            asked = model_dtype(fp16=settings.fp16.enabled, bf16=settings.bf16.enabled)
            if enabled and asked is not None and dtype not in (None, asked):
                raise ValueError(f"zero.Init: dtype={dtype}, and the configuration asks for {asked}; leave dtype out")
            self._dtype = dtype or asked
            if isinstance(memory := settings.heterogeneous.memory, tuple):
                self._shares = Shares([each or 0.0 for each in memory])
        self._enabled = enabled
        self._gatherer: Gatherer | None = None
        self._patches = contextlib.ExitStack()
        self._calls: list[_InitCall] = []
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        if module is not None and enabled:
            for inner in module.modules():
                for name, param in inner._parameters.items():
                    if param is not None and find_sharded(param) is None:
                        self._shard(param, name)

    def __enter__(self) -> Init:
        if not self._enabled:
            return self
        if "__init_subclass__" in vars(nn.Module):
            raise ValueError("zero.Init: this block is inside another one, which shards the same modules; leave it out")
        self._opened()  # here, where every rank comes
        self._calls = [_InitCall(None)]
        for kind in _subclasses(nn.Module):
            if "__init__" in vars(kind):
                self._watch(kind)
        self._watch_torch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._enabled:
            return
        self._patches.close()
        touched = self._calls[0].touched
        self._calls.clear()
        try:
            if kind is None:  # after an error the other ranks may be elsewhere
                for param in touched:
                    self._shard(param)
        finally:
            for module in self._modules:
                if isinstance(module._parameters, _Gathering):
                    module._parameters = module._parameters.plain()
            self._modules.clear()

    def settled(self, source: dict[str, Any] | str | Path) -> dict[str, Any] | str | Path:
        """The configuration as it is to be read."""
        return source

    def bring(self, param: nn.Parameter | None, by_name: bool = True) -> None:
        """Have `param`, if it is sharded, whole until the call under way is over."""
        found = None if param is None else find_sharded(param)
        if self._calls and param is not None and found is not None and not found.resident:
            found.gather()
            self._calls[-1].touched[param] = None

    def replace(self, param: nn.Parameter | None) -> None:
        """`param` was put into a module that is sharded already: shard it when the call under way is over."""
        if self._calls and param is not None and find_sharded(param) is None:
            self._calls[-1].touched[param] = None

    def _opened(self) -> Gatherer:
        """What gathers over all ranks of the job, as parameters are sharded."""
        if self._gatherer is None:
            init_distributed()
            comm = open_comm([range(dist.get_world_size())], lambda: Inline(Hooks()))
            self._gatherer = Gatherer(comm, ZeroConfig())
        return self._gatherer

    # --- when to shard

    def _watch(self, kind: type[nn.Module]) -> None:
        original = kind.__init__

        @functools.wraps(original)
        def __init__(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if any(call.module is module for call in self._calls):  # of a base class: the module is not finished
                original(module, *args, **kwargs)
            else:
                with self._call(module):
                    original(module, *args, **kwargs)

        self._patch(kind, "__init__", __init__)

    def _watch_torch(self) -> None:
        """Watch classes that are defined in the block, `apply`, and copies, which are made without `__init__`."""
        watch, call, finish = self._watch, self._call, self._finish
        original_apply, original_setstate = nn.Module.apply, nn.Module.__setstate__

        def __init_subclass__(cls: type[nn.Module], **kwargs: Any) -> None:
            super(nn.Module, cls).__init_subclass__(**kwargs)
            if "__init__" in vars(cls):
                watch(cls)

        def apply(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
            with call(None):
                return original_apply(module, fn)

        def __setstate__(module: nn.Module, state: Any) -> None:
            original_setstate(module, state)  # type: ignore[no-untyped-call]
            finish(module)

        self._patch(nn.Module, "__init_subclass__", classmethod(__init_subclass__))  # type: ignore[arg-type]
        self._patch(nn.Module, "apply", apply)
        self._patch(nn.Module, "__setstate__", __setstate__)

    def _patch(self, kind: type[nn.Module], name: str, value: object) -> None:
        """Have `value` as the attribute of a class, until the block is over."""
        if name in vars(kind):
            self._patches.callback(setattr, kind, name, vars(kind)[name])
        else:
            self._patches.callback(delattr, kind, name)
        setattr(kind, name, value)

    @contextlib.contextmanager
    def _call(self, module: nn.Module | None) -> Iterator[None]:
        if not self._calls:  # somebody kept a watched method until after the block
            yield
            return
        call = _InitCall(module)
        self._calls.append(call)
        try:
            yield
        except BaseException:
            self._calls.pop()
            self._calls[-1].touched.update(call.touched)  # whoever handles the error ends with them
            raise
        self._calls.pop()
        for param in call.touched:
            self._shard(param)
        if module is not None:
            self._finish(module)

    def _finish(self, module: nn.Module) -> None:
        """`module` has all its parameters: shard them, and have them gathered when they are read."""
        params = vars(module).get("_parameters")
        if not isinstance(params, dict):
            return
        self._modules.add(module)
        if isinstance(params, _Gathering):
            return
        for name, param in params.items():
            if param is not None and find_sharded(param) is None:
                self._shard(param, name)
        module._parameters = _Gathering(params, self)

    @torch.no_grad()
    def _shard(self, param: nn.Parameter, name: str | None = None) -> None:
        """Shard rank 0's value of `param`, which is whole, and free it."""
        if is_lazy(param) or param.is_meta:
            return
        gatherer, known = self._opened(), find_sharded(param)
        # In storage of its own: what it was made from, or what was made from it, may be in use.
        dtype = self._dtype if self._dtype is not None and param.is_floating_point() else param.dtype
        param.data = torch.empty(param.shape, dtype=dtype, device=local_device()).copy_(param.data)
        gatherer.comm.broadcast(param.data, 0, "parameter").wait()
        name = name or (known.name if known is not None else "parameter")
        EarlyParam(name, param, gatherer, self._shares).release()


class _Gathering(WatchedParameters):
    """The parameters of a sharded module, within the block: they are gathered when they are read."""

    def __init__(self, params: Mapping[str, nn.Parameter | None], init: Init) -> None:
        super().__init__(params, init.bring)
        self._init = init

    def get(self, name: str, default: Any = None) -> Any:
        self._init.bring(super().get(name))
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self.get(name)
        return super().pop(name, *default)

    def __setitem__(self, name: str, param: nn.Parameter | None) -> None:
        super().__setitem__(name, param)
        self._init.replace(param)


@contextlib.contextmanager
def GatheredParameters(
    params: nn.Parameter | nn.Module | Iterable[nn.Parameter | None],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Within this block `params` are whole. What rank `modifier_rank` writes to them is then every rank's.

    Without one they are to be read only: what is written is lost where they are sharded, and where they are not,
    ranks come to differ. What is computed from them may be differentiated after the block. Every rank must take part.
    Parameters that are not under ZeRO pass unchanged, and so does None, a bias that is not there. `fwd_module` is an
    error: parameters that are used outside their module are found without it. Raises RuntimeError if a backward in the
    block released what `modifier_rank` was to write to.
    """
    if fwd_module is not None:
        raise ValueError("GatheredParameters: fwd_module: a module's use of others' parameters is seen; leave it out")
    if not enabled:
        yield
        return
    if isinstance(params, nn.Module):
        params = params.parameters()
    several = isinstance(params, Iterable) and not isinstance(params, Tensor | str | Mapping)
    listed: list[Any] = [param for param in params if param is not None] if several else [params]
    for param in listed:
        if not isinstance(param, Tensor):
            where = f" in a {type(params).__name__}" if several else ""
            raise TypeError(
                f"GatheredParameters wants a parameter, several, or a module, and got a {type(param).__name__}{where}: "
                "write GatheredParameters(module.parameters())"
            )
    held = [found for param in dict.fromkeys(listed) if (found := find_sharded(param)) is not None]
    for found in held:
        if modifier_rank is not None and not 0 <= modifier_rank < found.gatherer.comm.size:
            raise ValueError(f"GatheredParameters: modifier_rank={modifier_rank}, of {found.gatherer.comm.size} ranks")
    # What is on its way already is somebody else's to release.
    brought = [found for found in held if not found.resident and not found.gatherer.under_way(found)]
    for found in held:
        found.gather()
        found.users += 1
    fetchers = dict.fromkeys(found.fetcher for found in held)  # one for each engine
    try:
        with contextlib.ExitStack() as saved:  # a backward after the block finds what was used in it
            for fetcher in fetchers:
                if fetcher is not None and (hooks := fetcher.hook_saved_tensors()) is not None:
                    saved.enter_context(hooks)
            yield
        if modifier_rank is not None:
            for found in held:
                _take_written(found, modifier_rank)
    finally:
        for found in held:
            found.users = max(0, found.users - 1)
        for found in brought:
            if not found.users:
                found.release()


@torch.no_grad()
def _take_written(sharded: ShardedParam, source: int) -> None:
    """Have what rank `source` wrote to a whole parameter everywhere."""
    if not sharded.resident:
        raise RuntimeError(
            f"GatheredParameters: {sharded.name} was released inside the block, by a backward, and what was "
            "written to it is lost; end the block before the backward"
        )
    sharded.gatherer.comm.broadcast(sharded.param.data, source, "parameter").wait()
    sharded.take_from_whole()
    # As changed in place, on every rank: a backward of a forward from before is an error.
    torch.autograd.graph.increment_version(sharded.param)
    if sharded.fetcher is not None:
        sharded.fetcher.weights_written()


def _subclasses(kind: type[nn.Module]) -> set[type[nn.Module]]:
    found = set(kind.__subclasses__())
    return found.union(*(_subclasses(inner) for inner in found)) if found else found
