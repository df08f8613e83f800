"""Muon for hidden matrices, AdamW for everything else.

Muon's update is the momentum of a whole matrix, orthogonalized. Where matrices are sharded, so are the momenta, and
each matrix of a tile has one owner: the pieces of the updates travel to their owners, which orthogonalize, and back, in
two all-to-alls for all matrices. Both ways in bf16, the precision of the orthogonalization, so nothing is lost. On
average a rank receives two pieces of each matrix; gathering would bring it the whole, and every rank the same work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .tiled import Shard, Shards, Tile, TiledOptimizer, comm_of, whole


class Muon(TiledOptimizer):
    """B = mu * B + (1 - mu) * g, then p = (1 - lr * decay) * p - lr * s * orthogonal((1 - mu) * g + mu * B).

    s = sqrt(max(1, rows / columns)). Parameter groups have a key `use_muon`; those with it true are stepped so, the
    others by `adam`, torch's AdamW or Adam, which gets them as they are. The orthogonalization is that of
    torch.optim.Muon, five Newton-Schulz iterations in bf16.

    Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon.
    """

    def __init__(
        self,
        params: list[dict[str, Any]],
        adam: type[torch.optim.Adam] = torch.optim.AdamW,
        *,
        fused: bool = False,
        shards: Shards,
    ) -> None:
        super().__init__(params, {}, comm_of(shards))
        self._shards = shards
        others = [group for group in self.param_groups if not group["use_muon"]]
        self._adam: Optimizer | None = adam(others, fused=fused) if others else None
        self._iterations = iterations()

    def _step(self, tiles: list[Tile]) -> None:
        if self._adam is not None:  # linked anew each time, because loading a state replaces both
            self._adam.param_groups = [group for group in self.param_groups if not group["use_muon"]]
            self._adam.state = self.state
            self._adam.step()
        matrices = [tile for tile in tiles if tile.group["use_muon"]]
        shards = [self._shard(param) for tile in matrices for param in tile.params]
        updates = iter(self._orthogonal([update for tile in matrices for update in self._updates(tile)], shards))
        scales = iter([math.sqrt(max(1.0, rows / columns)) for rows, columns in (shard.matrix for shard in shards)])
        for group, params, _ in matrices:
            lr = float(group["lr"])
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            for param in params:
                param.add_(next(updates).view(param.shape), alpha=-lr * next(scales))

    def _updates(self, tile: Tile) -> list[Tensor]:
        """The momentum to be orthogonalized of each piece, flattened, in bf16."""
        group, params, grads = tile
        momenta = self._moments(params, "momentum_buffer")
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        return [update.flatten().bfloat16() for update in torch._foreach_lerp(grads, momenta, group["momentum"])]

    def _shard(self, param: Tensor) -> Shard:
        shard = self._shards.get(param) or whole(param)
        if len(shard.shape) < 2:
            raise ValueError(
                f"Muon: a parameter of shape {tuple(shard.shape)} is in a group with use_muon; it steps matrices only"
            )
        return shard

    def _orthogonal(self, pieces: list[Tensor], shards: list[Shard]) -> list[Tensor]:
        """This rank's piece of the orthogonalized matrix, for its piece of each."""
        if self._comm.size == 1 or not pieces:
            return orthogonalize(pieces, shards, self._iterations)
        owned = owners([shard.matrix for shard in shards], self._comm.size)
        mine = owned[self._comm.rank]
        sizes = {at: shards[at].sizes() for at in mine}
        # Elements of: each rank's piece of each matrix that this rank owns; this rank's pieces, owner by owner.
        theirs = [[sizes[at][rank] for at in mine] for rank in range(len(owned))]
        ours = [[pieces[at].numel() for at in places] for places in owned]

        sent = torch.cat([pieces[at] for places in owned for at in places])
        got = self._all_to_all(sent, ours, theirs)
        columns = list(zip(*got, strict=True))  # the pieces of one matrix, in the order of the ranks
        matrices = orthogonalize(
            [_assemble(column, shards[at]) for at, column in zip(mine, columns, strict=True)],
            [shards[at] for at in mine],
            self._iterations,
        )
        answers = [
            matrix[start:stop]
            for rank in range(len(owned))
            for at, matrix in zip(mine, matrices, strict=True)
            for start, stop in [shards[at].bounds[rank]]
        ]
        back = self._all_to_all(torch.cat([sent[:0], *answers]), theirs, ours)
        result = list(pieces)
        for places, parts in zip(owned, back, strict=True):
            for at, part in zip(places, parts, strict=True):
                result[at] = part
        return result

    def _all_to_all(self, sent: Tensor, sizes: list[list[int]], expected: list[list[int]]) -> list[list[Tensor]]:
        """Send rank r parts of `sizes[r]` elements of `sent`; the parts of `expected[r]` elements that it sends."""
        incoming = [sum(parts) for parts in expected]
        got = sent.new_empty(sum(incoming))
        self._comm.all_to_all(sent, got, "optimizer", [sum(parts) for parts in sizes], incoming).wait()
        parts = iter(torch.split(got, [size for rank in expected for size in rank]))
        return [list(itertools.islice(parts, len(rank))) for rank in expected]


def owners(matrices: Sequence[tuple[int, int]], ranks: int) -> list[list[int]]:
    """Which matrices, by number, each rank orthogonalizes: the dearest first, each to who has least to do so far."""
    cost = [rows * columns * min(rows, columns) for rows, columns in matrices]
    owned: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for at in sorted(range(len(matrices)), key=lambda at: -cost[at]):
        rank = load.index(min(load))
        owned[rank].append(at)
        load[rank] += cost[at]
    return owned


def iterations() -> torch.optim.Muon:
    """An optimizer whose step from zero is minus the orthogonalized gradient, at rate 1 and without momentum and decay:
    torch has the iterations inside its optimizer only."""
    none_yet = nn.Parameter(torch.zeros(1, 1))
    return torch.optim.Muon([none_yet], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False)


def orthogonalize(matrices: Sequence[Tensor], shards: Sequence[Shard], optimizer: torch.optim.Muon) -> list[Tensor]:
    """Flattened matrices in bf16 with the singular vectors of these, and all singular values about 1.

    `optimizer` is one of `iterations`. It steps wide matrices, which it does not scale.
    """
    if not matrices:
        return []
    wide, tall = [], []
    for matrix, shard in zip(matrices, shards, strict=True):
        rows, columns = shard.matrix
        tall.append(rows > columns)
        wide.append(matrix.view(rows, columns).T if rows > columns else matrix.view(rows, columns))
    steps = [nn.Parameter(torch.zeros_like(matrix)) for matrix in wide]
    for step, matrix in zip(steps, wide, strict=True):
        step.grad = matrix
    optimizer.param_groups[0]["params"] = steps
    optimizer.step()
    optimizer.param_groups[0]["params"] = []
    optimizer.state.clear()
    return [
        (step.detach().T if flip else step.detach()).neg().flatten() for step, flip in zip(steps, tall, strict=True)
    ]


def _assemble(pieces: Sequence[Tensor], shard: Shard) -> Tensor:
    """The whole flattened matrix from every rank's piece."""
    matrix = pieces[0].new_empty(shard.shape.numel())
    for piece, (start, stop) in zip(pieces, shard.bounds, strict=True):
        matrix[start:stop] = piece
    return matrix
