"""Parameters that several ranks have although they train on the same data.

A weight tied across pipeline stages has a copy on each and gets a part of its gradient on each; so does a replicated
parameter that tensor-parallel ranks apply to different activations. Their gradients are summed after the reduction over
the data-parallel ranks, shard by shard, so every ZeRO stage does it the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from ..comm.comm import Comm
from ..tree import batches
from .shard import ShardedParam

STRETCH: Final = 1 << 24
"""Elements that are summed at once."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Parameters that all ranks of `comm` have, in the same order."""

    comm: Comm
    params: Sequence[nn.Parameter]
    counted: bool
    """Whether it is this rank that counts them, into the norm and into checkpoints; of each group one does."""
    partial: bool
    """Whether each rank's gradient is a part of theirs, and not all of it."""


class SharedParameters:
    """What this rank shares with others of its replica."""

    def __init__(self, sharings: Sequence[Sharing] = (), elsewhere: Iterable[nn.Parameter] = ()) -> None:
        """`elsewhere` are further parameters that another rank counts."""
        self._sharings = [sharing for sharing in sharings if sharing.params and sharing.comm.size > 1]
        self._elsewhere = {param for each in self._sharings if not each.counted for param in each.params}
        self._elsewhere.update(elsewhere)

    def counts(self, param: nn.Parameter) -> bool:
        """Whether this rank counts `param` into the norm of the gradients, and writes it to checkpoints."""
        return param not in self._elsewhere

    @torch.no_grad()
    def agree(self) -> None:
        """Give every rank the weights of the first that has them. On all ranks."""
        for sharing in self._sharings:
            for param in sharing.params:
                sharing.comm.broadcast(param.data, 0, "parameter").wait()

    @torch.no_grad()
    def sum_gradients(self, find: Callable[[nn.Parameter], ShardedParam | None]) -> None:
        """Bring the masters' gradients of each to their sum over the ranks that have a part. On all ranks.

        A parameter that none of them used keeps no gradient.
        """
        for sharing in self._sharings:
            if sharing.partial:
                found = [find(param) for param in sharing.params]
                masters = [each.master for each in found if each is not None and each.trainable]
                for batch in batches(masters, STRETCH, Tensor.numel, lambda master: (master.dtype, master.device)):
                    _sum(batch, sharing.comm)

    def close(self) -> None:
        """End the lanes, and destroy their groups. On all ranks."""
        for sharing in self._sharings:
            sharing.comm.close()


def _sum(masters: Sequence[nn.Parameter], comm: Comm) -> None:
    """All gradients in a row, with a number for each that says whether there is one."""
    width = sum(master.numel() for master in masters)
    row = torch.zeros(width + len(masters), dtype=masters[0].dtype, device=comm.device or masters[0].device)
    parts = list(zip(masters, row[:width].split([master.numel() for master in masters]), strict=True))
    for number, (master, part) in enumerate(parts):
        if master.grad is not None:
            part.copy_(master.grad.view(-1))
            row[width + number] = 1
    comm.all_reduce(row, "gradient").wait()
    used = row[width:].tolist()
    for number, (master, part) in enumerate(parts):
        if used[number]:
            master.grad = part.view(master.shape).to(master.device)
