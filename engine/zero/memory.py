"""Parameters that share memory without being one: they would be trained apart."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .holder import holder


def refuse_overlaps(model: nn.Module) -> None:
    """Raise ValueError for two that have elements in common, as `b.weight = nn.Parameter(a.weight.data)` makes them:
    torch trains these as one, and an engine, which moves them, as two."""
    spans: dict[int, list[tuple[int, int, str, nn.Parameter]]] = {}
    for name, param in model.named_parameters():
        if is_lazy(param) or param.is_meta or param.layout != torch.strided or holder(param) is not None:
            continue
        if param.numel() == 0:
            continue
        start = param.data_ptr()
        stop = start + param.numel() * param.element_size()
        spans.setdefault(param.untyped_storage()._cdata, []).append((start, stop, name, param))
    for same in spans.values():
        same.sort(key=lambda span: span[:2])
        for (start, stop, name, param), (other_start, _, other_name, other) in itertools.pairwise(same):
            # Rows and columns of one tensor lie between each other's without having any in common.
            dense = param.is_contiguous() and other.is_contiguous()
            if not (start == other_start or (dense and other_start < stop)):
                continue
            if param.requires_grad or other.requires_grad:
                raise ValueError(
                    f"initialize: {name} and {other_name} are two parameters in the same memory, which the engine "
                    "would train apart: tie them as one (b.weight = a.weight), or give each its own (.detach().clone())"
                )
