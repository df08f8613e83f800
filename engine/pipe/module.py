"""A model as a list of layers, of which each rank has those of its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import activation_checkpoint
from ..comm.consensus import failing_together, gather_objects
from ..comm.launch import init_distributed
from ..hooks import Hooks
from ..partition import partition, read_costs
from ..unsupported import PIPELINE_MODULE
from .layers import LayerSpec, PipelineLayer, check_agreement, described, named, of_model, shared_parameters
from .p2p import PipelineError
from .topology import NAMES, Placement, ProcessTopology, stages_asked

Passage = Callable[[int, Callable[[Any], Any], Any], Any]
"""Calls a layer on its way through a stage: the layer's number, what is to be called, and on what -> its output."""


@dataclass(frozen=True, slots=True)
class TiedParameters:
    """Parameters that several pipeline ranks have, each a copy of its own."""

    name: str
    ranks: tuple[int, ...]
    """Places in the pipeline, the first of which has them in the job's checkpoints and norms."""
    params: list[nn.Parameter] = field(default_factory=list)
    """This rank's, if it is one of them."""


class PipelineModule(nn.Module):
    """`layers`, one called on the output of the other, divided among `num_stages` pipeline ranks.

    Arguments are DeepSpeed's, and some more:

    layers: classes to be built (LayerSpec, TiedLayerSpec), modules, or functions. An `nn.Sequential` is the list of its
        children. With `model`, an ordinary model, they are names of its modules in the order in which they are called;
        an `nn.Sequential` or `nn.ModuleList` among them stands for its children.
    num_stages: pipeline ranks; without it, and without a `topology`, the configuration's `pipeline.stages`.
    topology: in place of `num_stages`; `pipe` must be its first axis.
    loss_fn: called as loss_fn(output, labels) on the last stage; without it the last layer returns the loss.
    seed_layers: seed the random numbers with `base_seed` + the layer's number (or call `seed_fn` with that) before each
        layer is built, so that its weights do not depend on the partition.
    partition_method: `uniform`, `parameters`, `type:REGEX`, bounds as a list, or `measured`, by the `costs`, which are
        seconds for each layer or a file of them; see `dsprof.engine.partition`.
    activation_checkpoint_interval: layers between two activation checkpoints; 0 keeps all activations.
        `checkpointable_layers` names the classes that are worth it; the spans without one keep theirs.
        `activation_checkpoint_func(run, inputs)` calls a span in the place of the engine's own.
    dynamic_shape: shapes may always differ between micro-batches, so nothing depends on it.
    virtual_stages: stages that each rank has, for the schedule `interleaved`.

    Layers have the names `0`, `1`, ..., or those they have in `model`, and those that are tied, `tied_modules.KEY`,
    whichever stages they are on.
    """

    def __init__(
        self,
        layers: Sequence[Any] | nn.Sequential,
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], object] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[int] = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = activation_checkpoint.checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = True,
        *,
        model: nn.Module | None = None,
        virtual_stages: int = 1,
        costs: Sequence[float] | str | Path | None = None,
    ) -> None:
        super().__init__()
        self.pipeline_layers = named(layers) if model is None else of_model(model, list(layers))
        if not self.pipeline_layers:
            raise ValueError("PipelineModule: no layers; pass the list of them")
        self._by_name = model is not None
        self._shared = shared_parameters(self.pipeline_layers, model)
        self.loss_fn = loss_fn
        self.partition_method = partition_method
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.hooks = Hooks()
        """Those of the engine, once there is one."""
        self.passage: Callable[[int, int], Passage] | None = None
        """Makes, for each pass through layers `start` to before `stop`, what calls them; recomputation calls it too."""
        self._seed = (seed_fn or torch.manual_seed) if seed_layers else None
        self._base_seed = base_seed
        self.costs = costs
        self.speeds: Sequence[float] | None = None
        """Of the pipeline ranks, where they are unequal."""
        self._checkpointable = checkpointable_layers
        self._checkpoint = activation_checkpoint_func
        asked = stages_asked(num_stages, topology)
        self.placement = Placement(asked, virtual_stages, topology)
        if asked is not None:
            self.arrange_everywhere(asked, _stage_id(asked))

    # --- which layers are here

    def arrange(self, num_stages: int, rank: int) -> None:
        """Have the layers that pipeline rank `rank` of `num_stages` has, and no others, by `partition_method`, `costs`,
        `speeds` and the placement's `virtual_stages`. Layers that are here already stay as they are. Raises ValueError
        if the layers cannot be divided so."""
        placement = self.placement
        stages = num_stages * placement.virtual_stages
        kind = self.partition_method.lower() if isinstance(self.partition_method, str) else ""
        bounds = partition(
            self.partition_method, stages, [layer.kind for layer in self.pipeline_layers],
            parameters=self._parameter_counts() if kind == "parameters" else None,
            costs=self._measured_costs() if kind == "measured" else None, speeds=self.speeds,
        )  # fmt: skip
        placement.num_stages, placement.bounds, placement.stage_id = num_stages, bounds, rank
        here = {at for stage in placement.stages for at in range(bounds[stage], bounds[stage + 1])}
        loss_fn = self.loss_fn
        self._modules.clear()
        if placement.is_last():
            self.loss_fn = loss_fn  # which may be a module, and goes where the model goes
        else:
            self.__dict__["loss_fn"] = loss_fn  # whose parameters, if it has any, are the last stage's
        for at, layer in enumerate(self.pipeline_layers):
            if at not in here:
                layer.built = None
            elif layer.built is None:
                layer.built = self._build(at, layer)
        for at in sorted(here):
            built = self.pipeline_layers[at].built
            if isinstance(built, nn.Module):
                _register(self, self.pipeline_layers[at].path, built)

    def arrange_everywhere(self, num_stages: int, rank: int) -> None:
        """As `arrange`, on all ranks of the job, with the costs that rank 0 has: each that measures has others. What
        fails on one rank fails on all: they would wait for it later.

        Raises what failed here, and PipelineError, with what was said there, where it did not, and if the ranks'
        layers or what they ask for differ."""
        method = self.partition_method
        check_agreement({
            "stages": num_stages,
            "virtual_stages": self.placement.virtual_stages,
            "partition_method": method if isinstance(method, str) else list(method),
            **described(self.pipeline_layers, self._shared),
        })  # fmt: skip
        self.costs = gather_objects(self.costs)[0]
        with failing_together("PipelineModule", error=PipelineError):
            self.arrange(num_stages, rank)
        check_agreement({"bounds": self.placement.bounds})

    def set_checkpoint_interval(self, interval: int) -> None:
        """Layers between two activation checkpoints from now on; 0 keeps all activations."""
        if interval < 0:
            raise ValueError(f"set_checkpoint_interval: {interval}; write 0, or the number of layers between two")
        self.activation_checkpoint_interval = interval

    @property
    def forward_funcs(self) -> list[Callable[[Any], Any]]:
        """What is called here, layer by layer."""
        return [layer.function(layer.built) for layer in self.pipeline_layers if layer.built is not None]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """torch.compile each layer that is here, with its arguments."""
        for layer in self.pipeline_layers:
            if isinstance(layer.built, nn.Module):
                layer.built.compile(*args, **kwargs)
            elif layer.built is not None:
                layer.built = torch.compile(layer.built, *args, **kwargs)

    def each_layer(
        self, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Callable[[Any], Any]]]:
        """Name and function of every layer, one after the other; those that are not here are built for as long. With a
        `device` each is there for as long, in `dtype` from then on."""
        for at, layer in enumerate(self.pipeline_layers):
            built = layer.built if layer.built is not None else self._build(at, layer)
            if device is None or not isinstance(built, nn.Module):
                yield layer.name, layer.function(built)
                continue
            before = next((param.device for param in built.parameters()), device)
            built.to(device=device, dtype=dtype)
            yield layer.name, layer.function(built)
            built.to(before)

    def end_of(self, stage: int) -> str:
        """What returns the output of `stage`, in words."""
        layer = self.pipeline_layers[self.placement.bounds[stage + 1] - 1]
        return f"layer {layer.name} ({layer.kind}), the last of stage {stage} of the pipeline,"

    def forget_others(self) -> None:
        """Give up the layers of other ranks that were built by the script; the stages cannot be changed any more."""
        for layer in self.pipeline_layers:
            if layer.built is None and not isinstance(layer.source, LayerSpec):
                layer.source = None

    def ties(self) -> list[TiedParameters]:
        """What several pipeline ranks share; the same list on all of them, but for the parameters."""
        found = []
        for name, where in self.tied_layers().items():
            ranks = self.placement.owners(where)
            here = [layer for at in where if isinstance(layer := self.pipeline_layers[at].built, nn.Module)]
            params = [self._shared[name][0]] if name in self._shared else list(here[0].parameters()) if here else []
            if len(ranks) > 1:
                found.append(TiedParameters(name, ranks, params if here else []))
        return found

    def tied_layers(self) -> dict[str, list[int]]:
        """Name of every tied module and shared parameter -> numbers of the layers that have it. On all ranks the
        same."""
        found: dict[str, list[int]] = {}
        for at, layer in enumerate(self.pipeline_layers):
            if layer.key is not None:
                found.setdefault(layer.path, []).append(at)
        return found | {name: where for name, (_, where) in self._shared.items()}

    def names(self) -> dict[nn.Parameter, str]:
        """The parameters that are here, by the names they have in the whole model."""
        first = {param: name for name, (param, _) in self._shared.items()}
        return {param: first.get(param, name) for name, param in self.named_parameters()}

    def stages_of_parameters(self) -> dict[nn.Parameter, frozenset[int]]:
        """The parameters that are here, and which of the stages here use each: all of them for one of no layer."""
        bounds, found = self.placement.bounds, dict[nn.Parameter, set[int]]()
        for stage in self.placement.stages:
            used = [layer.built for layer in self.pipeline_layers[bounds[stage] : bounds[stage + 1]]]
            if stage == self.placement.last_stage:
                used.append(self.loss_fn)
            for module in used:
                for param in module.parameters() if isinstance(module, nn.Module) else ():
                    found.setdefault(param, set()).add(stage)
        every = frozenset(self.placement.stages)
        return {param: frozenset(found.get(param, every)) for param in self.parameters()}

    # --- what they do

    def forward(self, inputs: Any, stage: int | None = None) -> Any:
        """Call the layers of `stage`, by default of all stages that are here, one on the output of the other."""
        for here in self.placement.stages if stage is None else [stage]:
            inputs = self._run(here, inputs)
        return inputs

    def _run(self, stage: int, inputs: Any) -> Any:
        start, stop = self.placement.bounds[stage : stage + 2]
        every = self.activation_checkpoint_interval
        passage = None if self.passage is None else self.passage(start, stop)
        if not every or not torch.is_grad_enabled():
            return self._in_turn(start, stop, passage)(inputs)
        for at in range(start, stop, every):
            end = min(at + every, stop)
            run = self._in_turn(at, end, passage)
            inputs = self._checkpointed(run, inputs) if self._is_worth_it(at, end) else run(inputs)
        return inputs

    def _in_turn(self, start: int, stop: int, passage: Passage | None) -> Callable[[Any], Any]:
        def run(inputs: Any) -> Any:
            for at, layer in enumerate(self.pipeline_layers[start:stop], start):
                assert layer.built is not None
                call = layer.function(layer.built)
                try:
                    with self.hooks.span("module", layer.name):
                        inputs = call(inputs) if passage is None else passage(at, call, inputs)
                except Exception as error:
                    error.add_note(layer.where_raised(inputs, by_name=self._by_name))
                    raise
            return inputs

        run.__qualname__ = f"layers {start} to {stop - 1}"
        return run

    def _checkpointed(self, run: Callable[[Any], Any], inputs: Any) -> Any:
        if self._checkpoint is activation_checkpoint.checkpoint:  # which would make a tuple of a list
            return activation_checkpoint.region_of(run)(run, inputs)
        return self._checkpoint(run, inputs)

    def _is_worth_it(self, start: int, stop: int) -> bool:
        layers = self.pipeline_layers[start:stop]
        if self._checkpointable is not None:
            return any(layer.kind in self._checkpointable for layer in layers)
        return any(isinstance(layer.built, nn.Module) for layer in layers)

    # --- inside

    def __getattr__(self, name: str) -> Any:
        """What is asked of the placement; an error says what to write instead of what is DeepSpeed's alone."""
        if name in NAMES and "placement" in self.__dict__:
            return getattr(self.placement, name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in PIPELINE_MODULE:
                raise
        raise AttributeError(f"PipelineModule.{name}: dsprof's engine does not have it: {PIPELINE_MODULE[name]}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *NAMES})  # type: ignore[no-untyped-call]

    def _build(self, at: int, layer: PipelineLayer) -> Callable[..., Any]:
        if layer.source is None:
            raise RuntimeError(f"PipelineModule: layer {layer.name} was freed when the engine was made; build it anew")
        if not isinstance(layer.source, LayerSpec):
            return layer.source  # type: ignore[no-any-return]
        tied = [other for other in self.pipeline_layers if layer.key is not None and other.key == layer.key]
        existing = next((other.built for other in tied if other.built is not None), None)
        if existing is not None:
            return existing
        if self._seed is not None:
            self._seed(self._base_seed + (self.pipeline_layers.index(tied[0]) if tied else at))
        return layer.build()

    def _parameter_counts(self) -> list[int]:
        """Of each layer. What is not built yet is built without memory for it."""
        counts, seen = [], set()
        for layer in self.pipeline_layers:
            module = layer.built if layer.built is not None else layer.source
            if layer.key is not None and layer.key in seen:
                module = None  # its weights are elsewhere, and their work is not
            seen.add(layer.key)
            if isinstance(module, LayerSpec):
                with torch.device("meta"):
                    module = layer.build()
            counts.append(sum(p.numel() for p in module.parameters()) if isinstance(module, nn.Module) else 0)
        return counts

    def _measured_costs(self) -> Sequence[float] | None:
        if isinstance(self.costs, str | Path):
            return read_costs(self.costs, [layer.name for layer in self.pipeline_layers])
        return self.costs


def _stage_id(num_stages: int) -> int:
    """This process' place in a pipeline: the stages are the outermost axis of the ranks, whatever the others are."""
    if not dist.is_initialized():
        init_distributed()
    ranks = dist.get_world_size()
    if ranks % num_stages:
        fitting = [n for n in range(1, ranks + 1) if ranks % n == 0]
        raise ValueError(
            f"PipelineModule: {num_stages} stages do not divide the {ranks} rank{'s' if ranks > 1 else ''} of the job; "
            f"write one of {', '.join(map(str, fitting))}, or start {num_stages} ranks"
        )
    return dist.get_rank() // (ranks // num_stages)


def _register(root: nn.Module, path: str, module: nn.Module) -> None:
    """Make `module` the one called `path` in `root`, with empty modules on the way."""
    *way, last = path.split(".")
    for part in way:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        inner = root._modules[part]
        assert inner is not None
        root = inner
    root._modules[last] = module
