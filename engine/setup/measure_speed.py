"""How fast each rank is at the job's own model: `"heterogeneous": {"speeds": "measure"}`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from ..comm.consensus import failing_together, gather_objects
from ..comm.mesh import Mesh
from ..config import Config, ConfigError
from ..optim.loss_scaler import cast_floating, model_dtype
from ..pipe.layer_costs import time_layers
from ..pipe.module import PipelineModule
from ..tree import output_of, to_device
from ..zero.shard import find_sharded

REPEATS: Final = 5
ALIKE: Final = 0.95
"""Ranks that all reach this part of the fastest's speed count as equally fast: so much is noise."""

INSTEAD: Final = "or write the speeds of the ranks as a list"


def with_measured_speeds(
    model: nn.Module, config: Config, mesh: Mesh, device: torch.device, example: Any, data: Any, loader: Any,
    collate_fn: Any,
) -> Config:  # fmt: skip
    """The configuration with the speeds of all ranks in the place of "measure", the same on all. On all ranks.

    Each runs forward and backward of the whole model, of a pipeline layer by layer, on `example`, or else on a
    micro-batch of `data`, a data set, or of `loader`, at the same time as the others, and takes the median of a few.
    Weights, buffers and random numbers are afterwards as before; there are no gradients. The costs of a pipeline's
    layers count where it is divided by `parameters` without having been asked to, or is to be by `measured` ones that
    nobody gives. Raises ConfigError on all ranks if one cannot.
    """
    costs: list[float] = []
    with failing_together("initialize", error=_refused):
        gather_objects(None)  # begin together
        try:
            costs = _seconds(model, config, device, example, data, loader, collate_fn)
        except ConfigError:
            raise
        except Exception as error:
            raise _refused(
                f'"measure" could not run the model: {type(error).__name__}: {error}; pass example= to initialize, '
                f"what the model's forward takes, {INSTEAD}"
            ) from error
    seconds = gather_objects(sum(costs))
    relative = [min(seconds) / each for each in seconds]
    speeds = tuple(1.0 if min(relative) >= ALIKE else max(0.001, round(each, 3)) for each in relative)
    if isinstance(model, PipelineModule) and _divides_by_measured(model, config):
        model.partition_method, model.costs = "measured", costs
    found = config.model_copy(update={"heterogeneous": config.heterogeneous.model_copy(update={"speeds": speeds})})
    if mesh.rank == 0:
        took = ", ".join(f"{1e3 * each:.3g}" for each in seconds)
        print(
            f"heterogeneous: forward and backward took {took} ms on the ranks, so their speeds are {list(speeds)}; of "
            f"a micro-batch the data-parallel replicas get {found.shares(mesh.size)} samples",
            file=sys.stderr,
        )
    return found


def _divides_by_measured(model: PipelineModule, config: Config) -> bool:
    pipeline = config.pipeline
    given = pipeline.partition_method if "partition_method" in pipeline.model_fields_set else None
    if (given or model.partition_method) == "measured":
        return pipeline.layer_costs is None and model.costs is None
    return given is None and model.partition_method == "parameters"


def _refused(what: str) -> ConfigError:
    return ConfigError([f"heterogeneous.speeds: {what}"])


def _seconds(
    model: nn.Module, config: Config, device: torch.device, example: Any, data: Any, loader: Any, collate_fn: Any
) -> list[float]:
    """Of each layer of a pipeline, or of the model."""
    if any(find_sharded(param) is not None for param in model.parameters()):
        raise _refused(
            f'"measure" takes a whole model, and zero.Init has sharded this one; build it without, {INSTEAD}'
        )
    dtype = model_dtype(fp16=config.fp16.enabled, bf16=config.bf16.enabled)
    modules: list[nn.Module] = [model]
    layers: Iterator[tuple[str, Callable[[Any], Any]]]
    if isinstance(model, PipelineModule):
        parts = (part for each in model.pipeline_layers for part in (each.built, each.source))
        modules += [part for part in parts if isinstance(part, nn.Module)]
        layers = model.each_layer(device, dtype)
    else:
        model.to(device=device, dtype=dtype)
        layers = iter([("model", lambda batch: output_of(model, batch))])
    # Loaders that shuffle draw random numbers, too.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), _as_before(modules):
        batch = example
        if example is None:
            batch = _batch(data, loader, collate_fn, config.train_micro_batch_size_per_gpu)
            batch = batch[0] if isinstance(model, PipelineModule) else batch
        batch = to_device(batch, device)
        batch = batch if dtype is None else cast_floating(batch, dtype)
        found = time_layers(layers, batch, REPEATS)
    return [layer["forward_s"] + layer["backward_s"] for layer in found]


@contextmanager
def _as_before(modules: list[nn.Module]) -> Iterator[None]:
    """Buffers are at the end of the block what they were, and there are no gradients."""
    before = [
        (part, name, buffer, buffer.clone())
        for module in modules for part in module.modules() for name, buffer in part._buffers.items()
        if buffer is not None
    ]  # fmt: skip
    try:
        yield
    finally:
        for module in modules:
            module.zero_grad(set_to_none=True)
        with torch.no_grad():
            for part, name, buffer, value in before:  # layers that went to a device or type have others by now
                buffer.copy_(value)
                part._buffers[name] = buffer


def _batch(data: Any, loader: Any, collate_fn: Any, samples: int) -> Any:
    """A micro-batch, of the first samples. Raises ConfigError where none can be had without using it up."""
    if isinstance(data, DataLoader):
        loader = data
    if isinstance(loader, DataLoader) or (isinstance(loader, list | tuple) and loader):
        return next(iter(loader))
    if isinstance(data, IterableDataset):
        return (collate_fn or default_collate)(list(islice(data, samples)))
    if isinstance(data, Dataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return (collate_fn or default_collate)([data[at % len(data)] for at in range(samples)])
    raise _refused(f'"measure" takes what to run the model on; pass training_data or example= to initialize, {INSTEAD}')
