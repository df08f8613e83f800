"""Floating-point operations of operators: torch's own formulas, and attention on CPU, for which torch has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import FlopCounterMode

Shape = Sequence[int]
"""[batch, heads, length, width]"""


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Scores, and their product with the values. A causal mask saves nothing, as in torch's formulas for GPUs."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (width + value[-1])


def _attention_backward(grad: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """The scores once more; gradients of queries and keys; of values and of the scores."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (3 * width + 2 * value[-1])


_ON_CPU: Final[dict[Any, Callable[..., int]]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def flop_counter() -> FlopCounterMode:
    """Counts the operations of what runs inside it as a context; a multiplication and an addition are two."""
    return FlopCounterMode(display=False, custom_mapping=_ON_CPU)


def has_formula(operator: Any) -> bool:
    """Whether it is one whose operations are counted: a matrix product, a convolution, attention."""
    packet = operator.overloadpacket if isinstance(operator, OpOverload) else operator
    return packet in flop_counter().flop_registry
