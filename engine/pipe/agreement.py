"""What the ranks of a job must have alike before one waits for another: the row of layers, its division, a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from .layers import PipelineLayer
from .p2p import PipelineError


def everyones(mine: Any) -> list[Any]:
    """What each rank of the job says, `mine` being this rank's. On all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, mine)
    return said


def agree(mine: Mapping[str, Any]) -> None:
    """Raise PipelineError on all ranks, which call this, if one of them says otherwise than rank 0, and name the first
    that does, and what it says."""
    check(everyones(dict(mine)))


def check(said: Sequence[Mapping[str, Any]]) -> None:
    """As `agree`, of what all ranks have said."""
    for rank, other in enumerate(said):
        for what in dict.fromkeys([*said[0], *other]):
            one, two = said[0].get(what), other.get(what)
            if one != two:
                raise PipelineError(
                    f"the ranks of the job have different pipelines: {_difference(what, one, two, rank)}; give all "
                    "ranks the same"
                )


def row_of(layers: Sequence[PipelineLayer], shared: Mapping[str, Any]) -> dict[str, Any]:
    """What ranks have to have alike of the row: each layer in words, and which parameters several of them share."""
    told = [f"{each.name} ({each.kind}{'' if each.key is None else f', tied as {each.key!r}'})" for each in layers]
    return {"layers": told, "shared parameters": {name: list(where) for name, (_, where) in shared.items()}}


def _difference(what: str, one: Any, two: Any, rank: int) -> str:
    """What rank 0 says and what `rank` does, in words; of rows of layers the first that differs."""
    if what == "layers" and one is not None and two is not None:
        if len(one) != len(two):
            return f"layers: rank {rank} has {len(two)} of them, and rank 0 has {len(one)}"
        one, two = next((mine, other) for mine, other in zip(one, two, strict=True) if mine != other)
    return f"{what}: rank {rank} has {two}, and rank 0 has {one}"
