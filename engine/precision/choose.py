"""Which linear layers compute in float8, by the configuration, their shapes and the device's rates.

At the end: the weights of these layers, gathered in float8 (ZeRO stage 3).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsprof.words import did_you_mean, fits, joined

from ..comm.comm import Comm
from ..comm.consensus import gather_objects
from ..comm.mesh import Parallel
from ..config.config import Config, Fp8Config
from ..forward import Undo
from ..optim.loss_scaler import model_dtype
from ..pipe.split_backward import with_matrices
from ..zero.shard import ShardedParam
from . import device as devices
from . import linear
from .gain import MULTIPLE, Rates, divides, layer_time
from .linear import Arithmetic
from .scaling import E4M3, scale_of


def attach(
    model: nn.Module, config: Config, by: Arithmetic, device: torch.device, parallel: Parallel
) -> tuple[Undo, Float8Shards | None]:
    """Have the linear layers of `model` compute in float8, as `by` says; call the first of the result to stop. The
    second: how stage 3 gathers their weights, where these are scaled as a whole. On all ranks of the job. Raises
    ValueError, on all of them, for a name that no layer has."""
    _check_names(model, config.fp8)
    rates = None
    if config.fp8.filter == "auto":
        dtype = model_dtype(fp16=config.fp16.enabled, bf16=config.bf16.enabled) or torch.float32
        rates = devices.rates(device, dtype, by, parallel.everyone)
    says = parallel.mesh.dp_rank == parallel.mesh.tp_rank == 0  # once for each stage, which has layers of its own
    choice = Choice(config.fp8, rates, says)
    if config.zero_optimization.stage < 3 or by.recipe != "tensorwise":
        return linear.install(model, by, choice), None
    shards = Float8Shards(model, choice)
    return linear.install(model, by, shards.computes), shards


def _check_names(model: nn.Module, config: Fp8Config) -> None:
    """In a pipeline, by the layers of all stages."""
    wanted = [("filter", name) for name in config.filter if not isinstance(config.filter, str)]
    wanted += [("skip", name) for name in config.skip]
    if not wanted:
        return
    names = sorted(set().union(*gather_objects([name for name, _ in with_matrices(model)])))
    for key, pattern in wanted:
        if not any(fits(name, pattern) for name in names):
            hint = did_you_mean(pattern, names)
            raise ValueError(f"{joined('fp8', key)}: no linear layer is named {pattern!r}{hint}")


@dataclass(eq=False)
class Choice:
    """Whether a layer takes float8, asked with every call: a layer may get few rows, and then many."""

    config: Fp8Config
    rates: Rates | None
    """Of `auto`."""
    says: bool = True
    """Whether this rank tells what stays as it is."""
    warn: Callable[[str], None] = lambda text: warnings.warn(text, stacklevel=2)
    _without: set[str] | None = field(default_factory=set)
    """The layers called so far, if none has taken float8; None from the first one on that has, or that is called again
    without, when it is told."""
    _told: set[tuple[int, int]] = field(default_factory=set)
    """Sizes of which it is told that they do not divide."""

    def __call__(self, name: str, m: int, k: int, n: int) -> bool:
        if not self._named(name):
            return False
        if not divides(k, n):
            if (k, n) not in self._told:
                self._told.add((k, n))
                self._tell(
                    f"fp8: {name}, and layers of its sizes, compute as without float8: their weights are {n} x {k}, "
                    f"which {MULTIPLE} does not divide; pad them, or list such layers in fp8.skip"
                )
            return False
        if self.rates is None:
            return True
        takes = self._pays(m, k, n)
        if self._without is not None:
            if takes:
                self._without = None
            elif name in self._without:
                self._without = None
                time = layer_time(m, k, n, self.rates, self.config.recipe)
                self._tell(
                    f"fp8: no linear layer is faster in float8 on this device, so none takes it: {name}, of {m} rows, "
                    f"{k} inputs and {n} outputs, takes {1e3 * time.as_is:.3g} ms as it is, and "
                    f'{1e3 * time.float8:.3g} ms in float8 with its casts; remove "fp8", or write "filter": "all"'
                )
            else:
                self._without.add(name)
        return takes

    @functools.cached_property
    def _named(self) -> Callable[[str], bool]:
        chosen, skipped = self.config.filter, self.config.skip

        def named(name: str) -> bool:
            if any(fits(name, pattern) for pattern in skipped):
                return False
            return isinstance(chosen, str) or any(fits(name, pattern) for pattern in chosen)

        return functools.cache(named)

    @functools.cached_property
    def _pays(self) -> Callable[[int, int, int], bool]:
        rates, recipe = self.rates, self.config.recipe
        return functools.cache(lambda m, k, n: rates is not None and layer_time(m, k, n, rates, recipe).saved > 0)

    def _tell(self, text: str) -> None:
        if self.says:
            self.warn(text)


# --- Weights of layers that compute in float8, gathered in float8 (stage 3 of ZeRO): a byte an element

# A weight that is scaled as a whole becomes the same numbers before its gather and after it, if the ranks scale by
# the largest element of the whole. So they agree on that first: one small collective for all weights, before each way
# through the model. The layer casts again what it gets, which changes nothing: those numbers are float8's already,
# and the scale is a power of two.


Takes = Callable[[str, int, int, int], bool]


class Float8Shards:
    """How the shards of these weights travel. Until a way through the model has shown that their layers compute in
    float8 on all ranks, as they are; from then on these layers do, however few rows they get."""

    def __init__(self, model: nn.Module, takes: Takes) -> None:
        """`takes`: of `linear.install`, for the layers of `model`."""
        self._takes = takes
        self._names = _own_weights(model)
        self._params: list[ShardedParam] = []
        self._called: set[str] = set()
        self._without: set[str] = set()
        """Layers that were called, and those that some call has left as they are."""
        self._went = False
        """Whether there has been a way through the model."""
        self._in_float8: frozenset[str] | None = None
        """Layers whose weights travel in float8; None: not settled."""
        self._scales: dict[ShardedParam, Tensor] = {}
        """Agreed on, of the present weights."""

    def computes(self, name: str, m: int, k: int, n: int) -> bool:
        """What `takes` says, and True for a layer whose weight comes in float8."""
        if self._in_float8 is not None:
            return name in self._in_float8 or self._takes(name, m, k, n)
        found = self._takes(name, m, k, n)
        (self._called if found else self._without).add(name)
        return found

    # --- as an `Agreement` of gathers

    def takes(self, param: ShardedParam) -> bool:
        found = param.param in self._names and divides(*param.shape) and param.store is None and param.dtype in _EXACT
        if found:
            self._params.append(param)
        return found

    def agree(self, comm: Comm) -> None:
        if not self._params:
            return
        if self._in_float8 is None:
            self._in_float8 = self._settle(comm) if self._went else None
            self._went = True
        names = self._in_float8 or ()
        params = [param for param in self._params if self._names[param.param] in names]
        if not params:
            return
        largest = torch.stack([_largest(param) for param in params])
        comm.all_reduce(largest, "parameter", dist.ReduceOp.MAX).wait()
        self._scales = dict(zip(params, scale_of(largest, E4M3), strict=True))

    def lapse(self) -> None:
        self._scales = {}

    def ready(self, param: ShardedParam) -> bool:
        return param in self._scales

    def nbytes(self, elements: int) -> int:
        return elements

    def pack(self, param: ShardedParam, shard: Tensor, into: Tensor) -> None:
        factor = self._scales[param].reciprocal().to(shard.dtype)
        most = torch.finfo(E4M3).max  # what a script has written to this rank's shard since may be above
        into.copy_((shard * factor).clamp_(-most, most).to(E4M3).view(torch.uint8))

    def unpack(self, param: ShardedParam, rows: Tensor, columns: int) -> Tensor:
        return rows.view(E4M3).to(param.dtype).mul_(self._scales[param].to(param.dtype))

    def _settle(self, comm: Comm) -> frozenset[str]:
        """The layers that have computed in float8 so far, on all ranks. It waits for the device."""
        names = [self._names[param.param] for param in self._params]
        left = torch.tensor([name not in self._called - self._without for name in names], dtype=torch.int32)
        left = left.to(self._params[0].device)
        comm.all_reduce(left, "parameter", dist.ReduceOp.MAX).wait()
        return frozenset(name for name, out in zip(names, left.tolist(), strict=True) if not out)


_EXACT: Final = (torch.bfloat16, torch.float32)
"""What holds all of float8's numbers at any scale that occurs; fp16 does not."""


def _own_weights(model: nn.Module) -> dict[nn.Parameter, str]:
    """Weight -> name of the layer, of torch's own linear layers that have it alone."""
    users: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for param in dict.values(module._parameters):
            if param is not None:
                users.setdefault(param, []).append((name, module))
    return {
        param: ".".join(part for part in of[0][0].split(".") if part != "_orig_mod")
        for param, of in users.items()
        if len(of) == 1 and type(of[0][1]) is nn.Linear and param is of[0][1]._parameters["weight"]
    }


def _largest(param: ShardedParam) -> Tensor:
    """Of this rank's shard, on the parameter's device."""
    shard = param.shard
    if not shard.numel():
        return torch.zeros((), device=param.device)
    found: Tensor = torch.linalg.vector_norm(shard, torch.inf, dtype=torch.float32)
    return found.to(param.device)
