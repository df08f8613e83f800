"""torch's own nn.MultiheadAttention, sharded by head. It calls no layers, but computes with its weights itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .collectives import enter, join, reduce
from .layers import Exit


class HeadsAttention(nn.MultiheadAttention):
    """Holds the projections of some of the heads. Arguments and results are nn.MultiheadAttention's."""

    tensor: Exit

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention [as query] and, with `need_weights`, the weights [batch, (heads,) queries, keys]."""
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask: pass that too")
        tensor = self.tensor
        entered = {id(x): enter(x, tensor.comm, tensor.sequence_dim, tensor.name) for x in (query, key, value)}
        batched = query.dim() == 3
        q, k, v = (
            self._batch_first(F.linear(entered[id(x)], weight, bias), batched)
            for x, (weight, bias) in zip((query, key, value), self._projections(), strict=True)
        )
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        hint = is_causal and key_padding_mask is None and not need_weights
        mask = None if hint else self._mask(q, attn_mask, key_padding_mask)
        if tensor.stream is not None and self.training:
            tensor.stream.enter(q.device, tensor.name)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            y = weights @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=hint)
        if tensor.stream is not None:
            tensor.stream.leave()
        return self._leave(y.transpose(1, 2).flatten(2), batched), self._whole(weights, average_attn_weights, batched)

    def _projections(self) -> list[tuple[Tensor, Tensor | None]]:
        weights: tuple[Tensor, ...] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return list(zip(weights, biases, strict=True))

    def _batch_first(self, x: Tensor, batched: bool) -> Tensor:
        if not batched:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _mask(self, q: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> Tensor | None:
        """What is added to the scores [batch, this rank's heads, queries, keys], in a shape that broadcasts to it."""
        mask = None
        if attn_mask is not None:
            mask = _additive(attn_mask, q.dtype)
            if mask.dim() == 3:  # for each sample and head
                mine = self.num_heads // self.tensor.comm.size
                mask = mask.unflatten(0, (-1, self.num_heads)).narrow(1, self.tensor.comm.rank * mine, mine)
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, q.dtype).view(-1, 1, 1, key_padding_mask.shape[-1])
            mask = padding if mask is None else mask + padding
        return mask

    def _leave(self, y: Tensor, batched: bool) -> Tensor:
        y = F.linear(y, self.out_proj.weight)
        y = y.squeeze(0) if not batched else y if self.batch_first else y.transpose(0, 1)
        return self.tensor.sum(y, self.out_proj.bias)

    def _whole(self, weights: Tensor | None, average: bool, batched: bool) -> Tensor | None:
        if weights is None:
            return None
        comm, name = self.tensor.comm, self.tensor.name
        whole = reduce(weights.sum(1) / self.num_heads, comm, name) if average else join(weights, comm, 1, name)
        return whole if batched else whole.squeeze(0)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """In a mask of booleans True means that a key is not seen."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -torch.inf)
