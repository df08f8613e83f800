"""Activations that are sharded along the sequence, in one model or on their way from stage to stage of a pipeline.

In a pipeline the blocks are a span of its layers. Where its edges fall together with those of stages, it is the
smaller thing that is sent: who has the layer before the first block shards its output, and who has the layer after the
last one joins its input. In between every rank passes its part on to the rank of the next stage that has the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn

from dsprof.words import joined

from ..comm.comm import Comm
from ..comm.consensus import gather_objects
from ..pipe.module import Passage, PipelineModule
from ..tensor.collectives import join, split
from ..tensor.rng import RankStream
from .blocks import Edges, LayerSpan, Stack, hook_edges, of_first, passage, passed_by
from .styles import PlanError, Role
from .tracer import Trial, run_again

NO_BLOCKS: Final = (
    "sequence_parallel: the pipeline has no layers that are sharded and keep the shape of activations; switch it off"
)


# --- planning


def blocks_here(model: PipelineModule, trials: Sequence[Trial], roles: Mapping[str, Role]) -> list[int]:
    """Numbers of the layers here that are blocks: with sharded regions, and giving what is shaped as what they get.

    Raises PlanError if a stage could not be tried as a whole.
    """
    paths = [layer.path for layer in model.pipeline_layers]
    regions = [name for name, role in roles.items() if role.region is not None or role.style == "heads"]
    seen: dict[int, tuple[Any, Any]] = {}

    def observed(start: int, stop: int) -> Passage:
        def call_layer(at: int, call: Callable[[Any], Any], value: Any) -> Any:
            before = _shape(value)
            value = call(value)
            seen[at] = before, _shape(value)
            return value

        return call_layer

    for trial in trials:
        if trial.module is model:
            with passed_by(model, observed):
                run_again(trial)
    bounds, stages = model.placement.bounds, model.placement.stages
    missing = [at for stage in stages for at in range(*bounds[stage : stage + 2]) if at not in seen]
    if missing:
        raise PlanError(
            f"sequence_parallel: the pipeline's layer {paths[missing[0]]} could not be tried with the others of its "
            "stage; have layers take and give a tensor of batch, sequence and features, or switch it off"
        )
    return [
        at for at, (before, after) in seen.items()
        if before is not None and before == after and any(Stack((paths[at],), 0).holds(name) for name in regions)
    ]  # fmt: skip


def widest(mine: Sequence[int], comm: Comm, count: int) -> LayerSpan | None:
    """The span of the `count` layers from the first to the last block that any rank of `comm` has; None if
    there are none. On all its ranks."""
    firsts, lasts = zip(*gather_objects((min(mine, default=count), max(mine, default=-1)), comm), strict=True)
    first, last = min(firsts), max(lasts)
    return LayerSpan(first, last, count) if first <= last else None


def stack_of(model: nn.Module, span: LayerSpan, dim: int) -> Stack:
    """The blocks that activations pass one after the other. Raises PlanError for what is a block and something else."""
    assert isinstance(model, PipelineModule)
    layers = model.pipeline_layers[span.first : span.last + 1]
    stack = Stack(tuple(layer.path for layer in layers), dim, span)
    for name, places in model.tied_layers().items():
        inside = [span.first <= at <= span.last for at in places]
        if any(inside) and not all(inside):
            raise PlanError(
                f"sequence_parallel: {name} is used by layers {places[inside.index(True)]}, where the sequence is "
                f"sharded, and {places[inside.index(False)]}, where it is not; switch it off"
            )
    return stack


def _shape(value: Any) -> tuple[int, ...] | None:
    found: list[tuple[int, ...]] = []

    def note(x: Tensor) -> Tensor:
        found.append(tuple(x.shape))
        return x

    of_first(note, value)
    return found[0] if found else None


def find_stack(model: nn.Module, roles: Mapping[str, Role], dim: int, span: LayerSpan | None = None) -> Stack:
    """The blocks that activations pass one after the other: those with sharded regions in one ModuleList, Sequential,
    or other module whose children are numbered; in a pipeline, the layers of `span`.

    Raises PlanError if there are none, or if a layer in one of them needs the whole sequence.
    """
    stack = _numbered(model, roles, dim) if span is None else stack_of(model, span, dim)
    for layer, role in roles.items():
        if stack.holds(layer) and role.region is None and role.style not in ("whole", "heads"):
            raise PlanError(
                f"sequence_parallel: {layer} is {role.style}, which needs the whole sequence, in the blocks where it "
                "is sharded; make it column or row, or leave it whole"
            )
    return stack


def _numbered(model: nn.Module, roles: Mapping[str, Role], dim: int) -> Stack:
    children: list[str] = []
    holding: list[str] = []
    regions = [name for name, role in roles.items() if role.region is not None or role.style == "heads"]
    for name, module in model.named_modules():
        numbered = all(child.isdigit() for child, _ in module.named_children())
        if not numbered and not isinstance(module, nn.Sequential | nn.ModuleDict):
            continue
        inside = [joined(name, child) for child, _ in module.named_children()]
        with_regions = [child for child in inside if any(region.startswith(f"{child}.") for region in regions)]
        if len(with_regions) > len(holding):
            children, holding = inside, with_regions
    if not holding:
        raise PlanError(
            "sequence_parallel: the model has no ModuleList or Sequential of blocks with layers that are sharded; "
            "switch it off"
        )
    return Stack(tuple(children[children.index(holding[0]) : children.index(holding[-1]) + 1]), dim)


def whole_in(model: nn.Module, stack: Stack, roles: Mapping[str, Role]) -> list[str]:
    """Parameters of the blocks that are not sharded: each rank applies them to its part of the sequence.

    Raises PlanError for one that is used outside the blocks too.
    """
    sharded = {name for role in roles.values() for name in role.sharded_names()}
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    found = []
    for same in names.values():
        inside = [name for name in same if stack.holds(name)]
        if not inside or sharded.intersection(same):
            continue
        if len(inside) < len(same):
            outside = next(name for name in same if name not in inside)
            raise PlanError(f"sequence_parallel: {inside[0]} is used outside the blocks too, as {outside}")
        found.append(same[0])
    return found


# --- training


def shard_sequence(model: nn.Module, stack: Stack, comm: Comm) -> None:
    """Shard what the first block gets along the sequence, and join what the last one returns.

    In between dropout draws for this rank's part alone.
    """
    span = stack.span
    if span is None:
        first, last = model.get_submodule(stack.first), model.get_submodule(stack.last)
        hook_edges(first, last, _SequenceSplit(first, stack, comm, repeats=False))
        return
    assert isinstance(model, PipelineModule)
    passes: list[_SequenceSplit] = []

    def made(start: int, stop: int) -> Passage:
        if passes:
            passes.pop().give_up()
        passes.append(_SequenceSplit(model, stack, comm, repeats=True))
        return passage(span, start, stop, passes[-1])

    model.passage = made


class _SequenceSplit(Edges):
    """Activations sharded along the sequence, in one pass if some of its layers may be called again (`repeats`), or in
    all. In the blocks dropout draws for this rank's part alone.

    The random numbers of all ranks are kept for as long as a pass can be repeated: a recomputation of some of its
    layers may begin where they are set aside, or end where they go on.
    """

    def __init__(self, model: nn.Module, stack: Stack, comm: Comm, *, repeats: bool) -> None:
        self._model = model
        self._stack = stack
        self._comm = comm
        self._repeats = repeats
        self._stream = RankStream(comm.rank)
        self._over = False

    def split(self, x: Tensor) -> Tensor:
        return split(x, self._comm, self._stack.dim, self._stack.first)

    def join(self, x: Tensor) -> Tensor:
        return join(x, self._comm, self._stack.dim, self._stack.last)

    def begin(self, x: Tensor) -> Tensor:
        if self._model.training:
            if not self._repeats:
                self._stream.leave()  # the pass before may have been broken off
            self._stream.enter(x.device, self._stack.first)
        return x

    def end(self) -> None:
        self._stream.leave(forget=not self._repeats)
        self._over = True

    def give_up(self) -> None:
        """Go on with the random numbers of all ranks if a layer failed where they were set aside."""
        if not self._over:
            self._stream.leave()
