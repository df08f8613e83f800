"""Casts to float8 on NVIDIA's devices: kernels written with Triton, which torch's builds for CUDA bring.

A tile is read along the rows of what is cast and written along those of what it becomes, so a transpose costs what a
plain cast does: on an H100, 35 us either way for [8192, 4096] in bf16, where kernels that torch.compile makes for any
shape took 50 to 136, and copying what was cast to its transpose 233.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gain import MULTIPLE, Recipe
from .scaling import SMALLEST, Scaled

TILE: Final = 64
"""Rows and columns of what a program reads and writes."""
SCALES: Final = 1024
"""That a program finds."""


@triton.jit  # type: ignore[untyped-decorator]
def _tile_kernel(  # type: ignore[no-untyped-def]
    x, out, scale, rows, columns, x_row, x_column, out_row, out_column, scale_row, TILE: tl.constexpr
):
    """out = x / scale. Of each: its strides."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    value = tl.load(x + row[:, None] * x_row + column[None, :] * x_column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.math.div_rn(1.0, tl.load(scale + row * scale_row, mask=row < rows, other=1.0))
    value = (value * factor[:, None]).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * out_row + column[None, :] * out_column, value, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _scale_kernel(  # type: ignore[no-untyped-def]
    largest, scale, count, top, smallest, COUNT: tl.constexpr
):
    """The power of two by which the largest element is divided to be `top` at most, and more than half of it."""
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    found = tl.load(largest + at, mask=at < count, other=1.0)
    fitting = tl.math.div_rn(top, tl.where(found < smallest, smallest, found))
    exponent = (fitting.to(tl.int32, bitcast=True) >> 23) & 255  # of the largest power of two in it, with torch's bias
    power = ((254 - exponent) << 23).to(tl.float32, bitcast=True)  # the reciprocal of that
    tl.store(scale + at, tl.where(found < float("inf"), power, float("nan")), mask=at < count)


def triton_cast(x: Tensor, dtype: torch.dtype, recipe: Recipe, scale: Tensor | None = None) -> Scaled:
    """What `scaling.cast` makes of the matrix `x`, bit for bit where all elements are finite."""
    if scale is None:
        scale = _scale(x, dtype, recipe)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _write(x, out, scale)
    return Scaled(out, scale)


def triton_turned(of: Scaled) -> Scaled:
    """What `Scaled.turned` makes."""
    rows, columns = of.data.shape
    missing = -rows % MULTIPLE
    whole = torch.empty(columns, rows + missing, dtype=of.data.dtype, device=of.data.device)
    if missing:
        whole.view(torch.uint8)[:, rows:] = 0
    _write(of.data.t(), whole[:, :rows], torch.ones((), device=of.data.device))
    return Scaled(whole, of.scale)


def _write(x: Tensor, out: Tensor, scale: Tensor) -> None:
    """out [rows, columns] = x / scale; the scale is [] or [rows, 1]."""
    rows, columns = x.shape
    grid = triton.cdiv(rows, TILE), triton.cdiv(columns, TILE)
    by_row = scale.stride(0) if scale.dim() else 0
    with torch.cuda.device_of(x):
        _tile_kernel[grid](x, out, scale, rows, columns, *x.stride(), *out.stride(), by_row, TILE)


def _scale(x: Tensor, dtype: torch.dtype, recipe: Recipe) -> Tensor:
    """float32: [] or, by rows, [rows, 1]."""
    by_row = recipe == "rowwise"
    largest = torch.linalg.vector_norm(
        x, torch.inf, (-1,) if by_row else (0, 1), keepdim=by_row, dtype=torch.float32
    ).contiguous()
    scale = torch.empty_like(largest)
    count = largest.numel()
    with torch.cuda.device_of(x):
        _scale_kernel[triton.cdiv(count, SCALES),](largest, scale, count, torch.finfo(dtype).max, SMALLEST, SCALES)
    return scale
