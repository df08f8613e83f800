"""What a model's own code has to be given when its layers are sharded: found by trying.

Most code asks the tensors. Some has counts of its own (`self.num_heads`), and some takes its sizes from its input.
Which of these concern what is sharded cannot be seen from names; but whether a choice is right can be rehearsed. The
least change with which the sharded model computes what the whole one does is taken, alike for all blocks of a kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from dsprof.words import joined

from ..tensor.layers import layer_of
from ..tensor.shape_override import ShapeOverride
from .blocks import Stack
from .styles import PlanError, Role, Roles, leave_whole
from .tracer import Trial
from .verify import Arrangement, Change, Mismatch, OwnDecision, rehearse_all

_SWITCH: Final = "switch sequence_parallel off"
"""What may help, where the sequence is sharded."""

_TRIES: Final = 400
"""Options of one kind of region at most."""


@dataclass
class _Kind:
    """Regions that look alike."""

    regions: dict[int, str]
    """Number -> name of the module in which it lies."""

    options: Iterator[Arrangement]
    """What may be arranged for each, by names relative to the module in which it lies."""
    chosen: Arrangement
    first_error: str = ""


def find_arrangement(
    model: nn.Module, trials: Sequence[Trial], found: Roles, stack: Stack | None, size: int
) -> Arrangement:
    """What is to be arranged for all ranks to pass a rehearsal; PlanError if nothing helps."""
    roles = found.roles
    always = Arrangement(_without_fast_paths(model, roles), shares=tuple(found.shares.items()))
    kinds = _kinds(model, roles, stack, size)
    kind_of = {region: kind for kind in kinds for region in kind.regions}
    while True:
        arrangement = _joined(
            [always, *(kind.chosen.within(place) for kind in kinds for place in kind.regions.values())]
        )
        try:
            for trial in trials:
                rehearse_all(trial, roles, arrangement, stack, size)
        except Mismatch as mismatch:
            kind = None if mismatch.region is None else kind_of[mismatch.region]
            if isinstance(mismatch, OwnDecision):
                raise PlanError(_undecided(mismatch, kind, roles, stack)) from mismatch
            if kind is None:
                off = "" if stack is None or _SWITCH in str(mismatch) else f"; {_SWITCH}"
                raise PlanError(f"tensor parallelism over {size} ranks: {mismatch}{off}") from mismatch
            kind.first_error = kind.first_error or str(mismatch)
            following = next(kind.options, None)
            if following is None:
                region, place = next(iter(kind.regions.items()))
                rows = [role for role in roles.values() if role.region == region and role.style == "row"]
                by_heads = rows[0].heads < rows[0].layer.inputs
                raise PlanError(
                    f"tensor parallelism: cannot find out how to shard {place or rows[0].module}: over {size} ranks it "
                    f"does not compute what it did ({kind.first_error}). Have it take its sizes from the outputs of "
                    f"its layers{' (`q.view(b, t, -1, head_dim)`)' if by_heads else ''}, "
                    f"{'or' if stack is None else f'{_SWITCH}, or'} {leave_whole(place or rows[0].module)}"
                ) from mismatch
            kind.chosen = following
        else:
            return arrangement


def _undecided(mismatch: OwnDecision, kind: _Kind | None, roles: Mapping[str, Role], stack: Stack | None) -> str:
    """What is said where code decides by a part: of what the layers of a region write, or of a sequence."""
    said = (
        f"tensor parallelism: {mismatch}, of which each rank has a part, and might decide otherwise than the others. "
        "Have it compute with tensors (torch.where)"
    )
    if stack is not None:
        said += f", or {_SWITCH}"
    if kind is None:
        return said
    region, place = next(iter(kind.regions.items()))
    name = place or next(role.module for role in roles.values() if role.region == region)
    return f"{said}, or {leave_whole(name)}"


def _without_fast_paths(model: nn.Module, roles: Mapping[str, Role]) -> tuple[Change, ...]:
    """In evaluation torch's TransformerEncoderLayer computes with the weights of its layers, whatever these are."""
    sharded = {name.rpartition(".")[0] for name, role in roles.items() if role.style != "whole"}
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer) and name in sharded and module.activation_relu_or_gelu:
            found.append(Change(name, "activation_relu_or_gelu", module.activation_relu_or_gelu, 0))
        elif isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
            found.append(Change(name, "use_nested_tensor", True, False))
    return tuple(found)


def _joined(parts: Sequence[Arrangement]) -> Arrangement:
    return Arrangement(
        tuple(change for part in parts for change in part.changes),
        tuple(override for part in parts for override in part.overrides),
        tuple(share for part in parts for share in part.shares),
    )


def _kinds(model: nn.Module, roles: Mapping[str, Role], stack: Stack | None, size: int) -> list[_Kind]:
    regions: dict[int, list[Role]] = {}
    for role in roles.values():
        if role.region is not None:
            regions.setdefault(role.region, []).append(role)
    alike: dict[object, dict[int, str]] = {}
    for number, members in regions.items():
        place = _common([role.module for role in members])
        short = tuple((role.module[len(place) :], role.style, role.bands) for role in members)
        alike.setdefault((type(model.get_submodule(place)), short), {})[number] = place
    kinds = []
    for places in alike.values():
        members = regions[next(iter(places))]
        options = _options(model, list(places.values()), members, stack, size)
        kinds.append(_Kind(places, options, next(options)))
    return kinds


def _common(names: Sequence[str]) -> str:
    """The module in which all of them lie."""
    paths = [name.split(".")[:-1] for name in names]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in shared)


def _options(
    model: nn.Module, places: Sequence[str], members: Sequence[Role], stack: Stack | None, size: int
) -> Iterator[Arrangement]:
    """The least change first; those of a configuration after all others, and last what may count groups of heads."""
    numbers, overrides = _numbers(members, size), _overrides(places[0], members, stack, size)
    groups = {number: [part for part in parts if part not in numbers.get(number, ())]
              for number, parts in _groups(members, size).items()}  # fmt: skip
    own = _candidates(model, places, numbers, "")
    of_config = _candidates(model, places, numbers, "config")
    of_groups = [changes for holder in ("", "config") for changes in _candidates(model, places, groups, holder)]
    yield from _combinations([], own, overrides)
    if of_config:
        yield from _combinations(own, of_config, overrides)
    if of_groups:
        yield from _combinations([*own, *of_config], of_groups, overrides)


def _combinations(
    known: Sequence[list[Change]], more: Sequence[list[Change]], overrides: Sequence[tuple[str, ShapeOverride] | None]
) -> Iterator[Arrangement]:
    """With one of `more` at least, unless there are none `known`."""
    tried = 0
    new = {id(changes) for changes in more}
    for effort in range(len(known) + len(more) + 2):
        for override in overrides:
            count = effort - (override is not None)
            for chosen in itertools.combinations([*known, *more], count) if count >= 0 else ():
                if known and not any(id(changes) in new for changes in chosen):
                    continue
                for changes in itertools.product(*chosen):
                    if tried == _TRIES:
                        return
                    tried += 1
                    yield Arrangement(changes, () if override is None else (override,))


def _groups(members: Sequence[Role], size: int) -> dict[int, list[int]]:
    """The same of what divides the heads: in a fused projection of grouped queries nothing says how many groups."""
    heads = {role.heads for role in members if role.style == "row" and role.heads < role.layer.inputs}
    return {
        groups: [groups // size] for number in heads for groups in range(size, number) if number % groups == 0
        and groups % size == 0
    }  # fmt: skip


def _numbers(members: Sequence[Role], size: int) -> dict[int, list[int]]:
    """Count in the whole region -> what it may be on one rank: heads, key-value heads, their ratio, and widths."""
    found: dict[int, list[int]] = {}

    def add(whole: int, part: int) -> None:
        if whole != part and part not in found.setdefault(whole, []):
            found[whole].append(part)

    for row in (role for role in members if role.style == "row"):
        head = row.layer.inputs // row.heads
        add(row.heads, row.heads // size)
        add(row.layer.inputs, row.layer.inputs // size)
        for column in (role for role in members if role.bands is not None):
            assert column.bands is not None
            shards = size // column.bands.copies
            add(column.layer.outputs, column.layer.outputs // shards)
            for band in column.bands.sizes:
                add(band, band // shards)
                if band % (head * shards) == 0:
                    groups = band // head
                    add(groups, groups // shards)
                    if row.heads % groups == 0 and (row.heads // size) % (groups // shards) == 0:
                        add(row.heads // groups, row.heads // size // (groups // shards))
    return found


def _candidates(
    model: nn.Module, places: Sequence[str], numbers: Mapping[int, list[int]], holder: str
) -> list[list[Change]]:
    """The changes that might be made, by attribute: integers that all regions of the kind have alike.

    `holder` is empty for attributes of modules, else the name of the attribute whose attributes are meant.
    """

    def attributes(module: nn.Module) -> dict[str, Any]:
        held = getattr(module, holder, None) if holder else module
        return getattr(held, "__dict__", {})

    found = []
    for name, module in model.get_submodule(places[0]).named_modules():
        if layer_of(module) is not None:
            continue
        for attribute, value in attributes(module).items():
            if type(value) is not int or value not in numbers:
                continue
            others = (attributes(model.get_submodule(joined(place, name))) for place in places[1:])
            if all(other.get(attribute) == value for other in others):
                attribute = f"{holder}.{attribute}".lstrip(".")
                found.append([Change(name, attribute, value, part) for part in numbers[value]])
    return found


def _overrides(
    place: str, members: Sequence[Role], stack: Stack | None, size: int
) -> list[tuple[str, ShapeOverride] | None]:
    """What inputs might report, in the module that calls the column layers, and in the one where the region lies."""
    columns = [role for role in members if role.style == "column"]
    width = columns[0].layer.inputs
    dim, factor = (stack.dim, size) if stack is not None else (1, 1)
    said = [ShapeOverride(None, dim, factor)] if factor > 1 else []
    if width % size == 0:
        said.append(ShapeOverride((width, width // size), dim, factor))
    caller = columns[0].module.rpartition(".")[0][len(place) :].strip(".")
    return [None, *((name, override) for override in said for name in dict.fromkeys((caller, "")))]
