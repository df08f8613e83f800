"""Sequence parallelism: between the cut regions of the blocks, each rank has its part of the sequence
(Korthikanti et al. 2022, arXiv 2205.05198)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..comm import Comm
from .ops import join, split
from .rehearsal import Stack, Stretch, on_first_activation
from .rng import RankStream
from .roles import Role
from .row import cut_row, stack_of
from .styles import PlanError
from .trial import joined


def find_stack(model: nn.Module, roles: Mapping[str, Role], dim: int, row: Stretch | None = None) -> Stack:
    """The blocks that activations pass one after the other: those with cut regions in one ModuleList, Sequential, or
    other module whose children are numbered; in a pipeline, the layers of `row`.

    Raises PlanError if there are none, or if a layer in one of them needs the whole sequence.
    """
    stack = _numbered(model, roles, dim) if row is None else stack_of(model, row, dim)
    for layer, role in roles.items():
        if stack.holds(layer) and role.region is None and role.style not in ("whole", "heads"):
            raise PlanError(
                f"sequence_parallel: {layer} is {role.style}, which needs the whole sequence, in the blocks where it "
                "is cut; make it column or row, or leave it whole"
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
            "sequence_parallel: the model has no ModuleList or Sequential of blocks with layers that are cut; switch "
            "it off"
        )
    return Stack(tuple(children[children.index(holding[0]) : children.index(holding[-1]) + 1]), dim)


def uncut_in(model: nn.Module, stack: Stack, roles: Mapping[str, Role]) -> list[str]:
    """Parameters of the blocks that are not cut: each rank applies them to its part of the sequence.

    Raises PlanError for one that is used outside the blocks too.
    """
    cut = {name for role in roles.values() for name in role.cut_names()}
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    found = []
    for same in names.values():
        inside = [name for name in same if stack.holds(name)]
        if not inside or cut.intersection(same):
            continue
        if len(inside) < len(same):
            outside = next(name for name in same if name not in inside)
            raise PlanError(f"sequence_parallel: {inside[0]} is used outside the blocks too, as {outside}")
        found.append(same[0])
    return found


def cut_sequence(model: nn.Module, stack: Stack, comm: Comm) -> None:
    """Cut what the first block gets along the sequence, and join what the last one returns.

    In between dropout draws for this rank's part alone.
    """
    if stack.row is not None:
        cut_row(model, stack, comm)
        return
    stream = RankStream(comm.rank)
    first = model.get_submodule(stack.first)

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        def cut(x: Tensor) -> Tensor:
            if module.training:
                stream.leave()
                stream.enter(x.device, stack.first)
            return split(x, comm, stack.dim, stack.first)

        return on_first_activation(cut, args, kwargs)

    def end(_: nn.Module, __: Any, output: Any) -> Any:
        stream.leave()
        return on_first_activation(lambda x: join(x, comm, stack.dim, stack.last), (output,), {})[0][0]

    first.register_forward_pre_hook(begin, with_kwargs=True)
    model.get_submodule(stack.last).register_forward_hook(end)
