"""Which linear layers compute in float8, by the configuration, their shapes and the device's rates."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from dsprof.words import did_you_mean, fits, joined

from ..comm.consensus import gather_objects
from ..comm.mesh import Parallel
from ..config.config import Config, Fp8Config
from ..forward import Undo
from ..optim.loss_scaler import model_dtype
from ..pipe.split_backward import with_matrices
from . import device as devices
from . import linear
from .gain import MULTIPLE, Rates, divides, layer_time
from .gathered import Float8Shards
from .linear import Arithmetic


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
