"""Weights of layers that compute in float8, gathered in float8 (stage 3 of ZeRO): a byte an element.

A weight that is scaled as a whole becomes the same numbers before its gather and after it, if the ranks scale by the
largest element of the whole. So they agree on that first: one small collective for all weights, before each way through
the model. The layer casts again what it gets, which changes nothing: those numbers are float8's already, and the scale
is a power of two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.comm import Comm
from ..zero.shard import ShardedParam
from .gain import divides
from .scaling import E4M3, scale_of

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
