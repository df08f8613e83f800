"""What a device does of float8, and how fast: looked up, tried and measured, once for an engine."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Final

import torch

from ..comm.comm import Comm
from ..comm.consensus import failing_together, gather_objects
from .gain import CAPABILITY, Rates, Recipe, listed_rates
from .linear import Arithmetic
from .scaling import E4M3, cast, product

_SIZES: Final = {"cpu": 256, "cuda": 4096}
"""Rows and columns of the matrices that are multiplied to measure a device that no data sheet is known of."""
_REPEAT: Final = 3


def arithmetic(device: torch.device, recipe: Recipe) -> Arithmetic:
    """How `device` computes in float8. Raises ValueError for one that has none."""
    if device.type == "cpu":
        return Arithmetic(recipe, emulated=not _multiplies(device, recipe))
    if device.type != "cuda" or torch.version.hip is not None:
        raise ValueError(f"fp8: CPUs and NVIDIA's devices compute float8 here, and this is {_name(device)}; {_OFF}")
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        raise ValueError(
            f"fp8: {_name(device)} has no float8, which begins at capability {'.'.join(map(str, CAPABILITY))} (Ada, "
            f"Hopper); {_OFF}"
        )
    if not _multiplies(device, recipe):
        other = "tensorwise" if recipe == "rowwise" else "rowwise"
        raise ValueError(
            f'fp8.recipe: torch {torch.__version__} does not multiply "{recipe}" on {_name(device)}; write "{other}"'
        )
    try:
        from .triton_casts import triton_cast, triton_turned

        tried = triton_cast(torch.ones(16, 16, dtype=torch.bfloat16, device=device), E4M3, recipe)
        if recipe == "tensorwise":
            triton_turned(tried)
    except Exception as error:  # no Triton, or no compiler for it: whatever it says, casts work without
        said = f"{type(error).__name__}: {error}"
        warnings.warn(f"fp8: casts take several kernels each, and are slower: {said}", stacklevel=2)
        return Arithmetic(recipe)
    return Arithmetic(recipe, triton_cast, triton_turned, fused=True)


_OFF: Final = 'write "fp8": {"enabled": false}'


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"a device of type {device.type}"


def _multiplies(device: torch.device, recipe: Recipe) -> bool:
    """Whether this torch multiplies float8 on the device."""
    ones = cast(torch.ones(16, 16, dtype=torch.bfloat16, device=device), E4M3, recipe)
    try:
        product(ones, ones, torch.bfloat16)
    except (RuntimeError, AttributeError, ValueError):
        return False
    return True


def rates(device: torch.device, dtype: torch.dtype, by: Arithmetic, everyone: Comm) -> Rates:
    """What rank 0's device reaches in `dtype` and in float8: from its data sheet, or measured. The same on all ranks,
    whatever devices the others have: layers are then chosen alike. On all ranks."""
    mine = None
    with failing_together("initialize", everyone):
        if everyone.rank == 0:
            mine = _rates(device, dtype, by)
    found = gather_objects(mine, everyone)[0]
    assert found is not None  # rank 0 has found it
    return found


def _rates(device: torch.device, dtype: torch.dtype, by: Arithmetic) -> Rates:
    name, tf32 = str(dtype).removeprefix("torch."), torch.get_float32_matmul_precision() != "highest"
    listed = listed_rates(_name(device), name, tf32=tf32, fused=by.fused) if device.type == "cuda" else None
    return _measured(device, dtype, by) if listed is None else listed[1]


def _measured(device: torch.device, dtype: torch.dtype, by: Arithmetic) -> Rates:
    size = _SIZES[device.type]
    x = torch.ones(size, size, dtype=dtype, device=device)
    eight, small = cast(x, E4M3, by.recipe), x[:1, :1]
    operations = 2.0 * size**3
    return Rates(
        flops=operations / _seconds(device, lambda: x @ x),
        float8=operations / _seconds(device, lambda: by.product(eight, eight, dtype, forward=True)),
        bytes=2.0 * x.nbytes / _seconds(device, lambda: x + 1),
        launch=_seconds(device, lambda: small + 1),
        item_bytes=dtype.itemsize,
        fused=by.fused,
    )


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """The shortest of a few times that `work` takes."""
    found = []
    for _ in range(_REPEAT + 1):  # the first one warms up
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begun)
    return min(found[1:])
