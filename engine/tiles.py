"""What the optimizer steps at once: parameters of together at most `sub_group_size` elements here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .zero.shard import ShardedParam

if TYPE_CHECKING:
    from .config import Config


def tiles_of(params: Sequence[ShardedParam], size: int) -> list[list[ShardedParam]]:
    """Cut `params` into tiles of at most `size` elements of masters, one parameter at least; the same on every rank."""
    tiles: list[list[ShardedParam]] = [[]]
    filled = 0
    for param in params:
        if tiles[-1] and filled + param.cut.chunk > size:
            tiles.append([])
            filled = 0
        tiles[-1].append(param)
        filled += param.cut.chunk
    return tiles


def idle_pipelines(config: Config, tiles: Sequence[Sequence[ShardedParam]]) -> Iterator[str]:
    """A warning for each key that is to have the disk work beside the step, where a single tile leaves nothing to."""
    zero = config.zero_optimization
    section = zero.offload_optimizer
    if section is None or section.device != "nvme" or zero.stage < 1 or len(tiles) != 1:
        return
    elements = sum(param.cut.chunk for param in tiles[0])
    # As many tiles as there are buffers, so that one is read and one written while one is stepped.
    size = max(1, -(-elements // max(3, section.buffer_count)))
    if len(tiles_of(tiles[0], size)) > 1:
        instead = f'write "sub_group_size": {size} or less'
    else:
        instead = "there is one parameter, and a tile has one at least"
    for key in ("pipeline_read", "pipeline_write"):
        if getattr(section, key):
            yield (
                f"zero_optimization.offload_optimizer.{key}: has no effect; what a rank steps, {elements} elements, is "
                f"one tile of at most {zero.sub_group_size} (sub_group_size): {instead}"
            )
