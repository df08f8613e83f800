"""Attention of some queries to some keys, with the log-sum-exp of its scores, by which results for several blocks of
keys become one; and the gradients of such a block, by the log-sum-exp of all of them.

As in FlashAttention (Dao 2023, arXiv 2307.08691): a score's weight is exp(score - lse), whoever has computed lse.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]

_FLASH_ON_CPU: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_FLASH_ON_CUDA: Final = (torch.float16, torch.bfloat16)


def forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """The attention [batch, heads, queries, features], and the log-sum-exp [batch, heads, queries] in float32 or
    float64. Keys and values may have fewer heads, each for as many of the queries'. `causal`: of as many queries as
    keys, each attends to those up to its own place."""
    flash = _flash(query, value)
    if flash == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
        return out, lse
    if flash == "cuda":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, *_repeated(query, key, value), 0.0, causal, False, scale=scale
        )
        return out, lse
    key, value = _repeated(query, key, value)
    scores = _scores(query, key, causal, scale)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ value.to(scores.dtype)).to(query.dtype), lse


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float | None,
) -> Gradients:  # fmt: skip
    """Of the queries, keys and values of one block, whose part of the attention `out` over all blocks has `lse`."""
    flash = _flash(query, value)
    if flash == "cpu":
        found: Gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, causal, scale=scale
        )
        return found
    keys, values = _repeated(query, key, value)
    if flash == "cuda":
        of_query, of_keys, of_values = _flash_backward(grad, query, keys, values, out, lse, causal, scale)
    else:
        scores = _scores(query, keys, causal, scale)
        wide = scores.dtype
        weights, grad_wide = (scores - lse[..., None]).exp(), grad.to(wide)
        of_values = weights.transpose(-1, -2) @ grad_wide
        rest = (grad_wide * out.to(wide)).sum(-1, keepdim=True)
        of_scores = weights * (grad_wide @ values.to(wide).transpose(-1, -2) - rest) * _scale(query, scale)
        of_query, of_keys = of_scores @ keys.to(wide), of_scores.transpose(-1, -2) @ query.to(wide)
    return of_query, _summed(of_keys, key), _summed(of_values, value)


def _flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float | None,
) -> Gradients:  # fmt: skip
    none: Any = None  # bounds of sequences of several lengths
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # of dropout, of which there is none
    found: Gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, out, lse, none, none, query.shape[2], key.shape[2], 0.0, causal, seed, seed[:0],
        scale=scale,
    )  # fmt: skip
    return found


def _flash(query: Tensor, value: Tensor) -> str:
    """The device whose fused attention takes these; empty for plain matrix products."""
    features, device = query.shape[-1], query.device
    if value.shape[-1] != features:
        return ""
    if device.type == "cpu" and query.dtype in _FLASH_ON_CPU:
        return "cpu"
    fits = device.type == "cuda" and query.dtype in _FLASH_ON_CUDA and features % 8 == 0 and features <= 256
    return "cuda" if fits and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0) else ""


def _scale(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float | None) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) * _scale(query, scale)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def _repeated(query: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Each with as many heads as the queries."""
    times = query.shape[1] // tensors[0].shape[1]
    return [tensor.repeat_interleave(times, 1) if times > 1 else tensor for tensor in tensors]


def _summed(grad: Tensor, of: Tensor) -> Tensor:
    """The gradient of what was repeated so."""
    return grad if grad.shape[1] == of.shape[1] else grad.unflatten(1, (of.shape[1], -1)).sum(2)
