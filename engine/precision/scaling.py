"""Casts to float8 with a scale, and the product of what was cast.

A scale is a power of two: to multiply by it rounds nothing, and a tensor that is cast along its rows and along its
columns has the same numbers in both. It is the largest that brings the largest element of a tensor (`tensorwise`) or
of a row (`rowwise`) into float8's range. An element that is not finite makes what it is scaled with NaN, so overflow is
found in gradients as without float8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from .gain import MULTIPLE, Recipe

E4M3: Final = torch.float8_e4m3fn
"""Three bits of mantissa, up to 448."""
E5M2: Final = torch.float8_e5m2
"""Two bits of mantissa, up to 57344: for gradients, whose elements differ more."""

SMALLEST: Final = 1e-30
"""Largest elements are taken to be this, at least: a scale for zeros is finite."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """A matrix [rows, columns] in float8: it means `data * scale`. The scale is float32: [] or [rows, 1]."""

    data: Tensor
    scale: Tensor

    def turned(self) -> Scaled:
        """Its transpose, with zeros behind its columns; of one that is scaled as a whole."""
        return Scaled(padded(self.data.t()), self.scale)

    def rounded(self) -> Tensor:
        """What it means, in float32."""
        return self.data.float() * self.scale


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """By which numbers are divided whose largest is `largest`, float32 of any shape, to fit into `dtype`."""
    fitting = torch.finfo(dtype).max / largest.clamp(min=SMALLEST)
    return torch.exp2(-torch.floor(torch.log2(fitting)))


def cast(x: Tensor, dtype: torch.dtype, recipe: Recipe, scale: Tensor | None = None) -> Scaled:
    """The matrix `x` in float8; `scale`: one that is known already."""
    if scale is None:
        dims = (-1,) if recipe == "rowwise" else (0, 1)
        largest = torch.linalg.vector_norm(x, torch.inf, dims, keepdim=recipe == "rowwise", dtype=torch.float32)
        scale = scale_of(largest, dtype)
    factor = scale.reciprocal()
    # fp16 cannot hold all of these factors, and a tensor of one element does not make the product float32.
    scaled = x.float() * factor if x.dtype is torch.float16 else x * factor.to(x.dtype)
    return Scaled(scaled.to(dtype).contiguous(), scale)


def padded(x: Tensor) -> Tensor:
    """`x` [rows, columns], contiguous, with as many columns of zeros behind as make their number divide: a sum over
    them is the same."""
    missing = -x.shape[1] % MULTIPLE
    if not missing:
        return x.contiguous()
    whole = torch.zeros(x.shape[0], x.shape[1] + missing, dtype=torch.uint8, device=x.device).view(x.dtype)
    whole[:, : x.shape[1]] = x
    return whole


def product(a: Scaled, b: Scaled, dtype: torch.dtype, *, quick: bool = False, emulated: bool = False) -> Tensor:
    """a [rows, inner] times the transpose of b [columns, inner], in `dtype`.

    quick: summed up in less than float32, as NVIDIA's devices can
    emulated: in float32, of the numbers that float8 has rounded
    """
    if emulated:
        return (a.rounded() @ b.rounded().t()).to(dtype)
    by_row = a.scale.dim() > 0
    out = torch.bfloat16 if by_row and a.data.is_cuda else dtype  # the only one there is of these
    found = torch._scaled_mm(
        a.data, b.data.t(), scale_a=a.scale, scale_b=b.scale.t(), out_dtype=out, use_fast_accum=quick
    )
    return found.to(dtype)
