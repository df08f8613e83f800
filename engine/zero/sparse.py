"""Gradients of embeddings as the rows that were used: indices and rows travel, not the table."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import Tensor, nn

from ..comm.comm import Comm
from ..config import Config
from .gradients import MicrobatchSums, has_samples, travels_in
from .shard import ShardedParam


def sparse_params(model: nn.Module, *, dense_too: bool) -> set[Tensor]:
    """Weights of embeddings whose gradients are sparse, and with `dense_too` (`sparse_gradients`) of all others.

    A weight that is tied to another module has a gradient in every row; it is not among the latter.
    """
    users: dict[torch.Tensor, int] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                users[param] = users.get(param, 0) + 1
    return {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and module.weight.requires_grad
        and (module.sparse or (dense_too and users[module.weight] == 1))
    }


class SparseReducer:
    """The counterpart of `Reducer` for gradients of few rows (stages 0 and 1). Micro-batches add up on this rank, and
    the rows of all ranks are gathered when the last one's backward is over."""

    def __init__(self, params: Sequence[ShardedParam], comm: Comm, config: Config) -> None:
        self._params = list(params)
        self._comm = comm
        self._config = config
        self._accumulated = MicrobatchSums(self._params, config)
        self._gathered: dict[ShardedParam, list[tuple[Tensor, Tensor]]] = {}
        """Indices and rows of all ranks, of each backward."""

    def finish(self, last: bool) -> None:
        """Backward is over; after the `last` micro-batch's, gather."""
        if not self._params:
            return
        if not last:
            self._accumulated.add(self._params)
            return
        self._accumulated.add(list(self._accumulated))
        rows = [_rows(self._accumulated.pop(param, param.param.grad)) for param in self._params]
        for param in self._params:
            param.param.grad = None
        if not has_samples(self._config):
            rows = [None] * len(rows)
        device = self._params[0].param.device
        counts = torch.empty(self._comm.size, len(rows), dtype=torch.int64, device=device)
        mine = [-1 if row is None else len(row[0]) for row in rows]
        counts[self._comm.rank] = torch.tensor(mine, device=device)
        self._comm.all_gather(counts, "gradient").wait()
        for param, row, of_ranks in zip(self._params, rows, counts.T.tolist(), strict=True):
            if max(of_ranks) >= 0:
                self._gathered.setdefault(param, []).append(self._gather(param, row, of_ranks))

    def collect(self, scale: float) -> None:
        """Put the means, dense and times `scale`, on the masters' `grad`: optimizers with momentum step every row."""
        for param, parts in self._gathered.items():
            master = param.master
            whole = torch.zeros(param.shape, dtype=master.dtype, device=param.device)
            for indices, values in parts:
                whole.index_add_(0, indices, values.to(master.dtype), alpha=scale)
            master.grad = whole.view(-1)[param.start : param.stop].view(master.shape)

    def gradients(self, masters: Set[int]) -> list[Tensor]:
        """The gradients of those `masters`, by id."""
        grads = [param.master.grad for param in self._params if id(param.master) in masters]
        return [grad for grad in grads if grad is not None]

    def clear(self) -> None:
        """After the step: forget the gradients."""
        self._gathered.clear()
        self._accumulated.clear()
        for param in self._params:
            param.param.grad = None

    def _gather(
        self, param: ShardedParam, mine: tuple[Tensor, Tensor] | None, counts: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Indices [n] and rows [n, width] of all ranks, the latter divided by the number of ranks for the mean."""
        width = param.shape[1:].numel()
        if mine is None:
            mine = torch.empty(0, dtype=torch.int64, device=param.device), param.param.new_empty((0, width))
        if self._comm.size > 1:
            mine = mine[0], mine[1].to(travels_in(param, self._config))
        most = max(counts)
        if most == 0:
            return mine
        indices = torch.zeros(self._comm.size, most, dtype=torch.int64, device=mine[0].device)
        values = torch.zeros(self._comm.size, most, width, dtype=mine[1].dtype, device=mine[1].device)
        indices[self._comm.rank, : len(mine[0])] = mine[0]
        torch.div(mine[1], self._comm.size, out=values[self._comm.rank, : len(mine[0])])
        for rows in (indices, values.view(self._comm.size, -1)):
            self._comm.all_gather(rows, "gradient").wait()
        kept = [slice(0, max(0, count)) for count in counts]
        return (
            torch.cat([row[keep] for row, keep in zip(indices, kept, strict=True)]),
            torch.cat([row[keep] for row, keep in zip(values, kept, strict=True)]),
        )


def _rows(grad: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Indices [n] and rows [n, width] of what is not zero in a gradient of two dimensions; None for none."""
    if grad is None:
        return None
    if grad.is_sparse:
        grad = grad.coalesce()
        return grad.indices()[0], grad.values().reshape(grad.indices().shape[1], -1)
    flat = grad.reshape(grad.shape[0], -1)
    indices = flat.ne(0).any(dim=1).nonzero().view(-1)
    return indices, flat[indices]
