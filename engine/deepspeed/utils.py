"""Small things that DeepSpeed's tutorials call."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from .accelerator import get_accelerator, host_memory


def set_random_seed(seed: int) -> None:
    """Seed Python's, numpy's (if it is in use) and torch's random numbers."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of `item` with its tensors on `device`, however nested: a view would be saved with all it is a view of.
    Tied weights stay tied."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        if not tensor.numel() or key not in copies:
            copies[key] = tensor.detach().to(device, copy=True)
        return copies[key]

    return map_tensors(item, copy)


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """`item` with its tensors on `device`, however nested; with `criterion_func` those of which it is true."""
    return map_tensors(item, lambda tensor: tensor.to(device), criterion_func)


def map_tensors(
    item: Any, change: Callable[[torch.Tensor], torch.Tensor], wanted: Callable[[Any], bool] | None = None
) -> Any:
    """`item` with its `wanted` tensors changed, in dicts, lists and tuples of the same kind."""
    if isinstance(item, torch.Tensor):
        return change(item) if wanted is None or wanted(item) else item
    if isinstance(item, Mapping):
        return type(item)({key: map_tensors(value, change, wanted) for key, value in item.items()})  # type: ignore[call-arg]
    if isinstance(item, list | tuple):
        make = getattr(type(item), "_make", type(item))  # a named tuple takes its fields one by one
        return make(map_tensors(value, change, wanted) for value in item)
    return item


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print memory in use on rank 0, if `force`d, as DeepSpeed does only then; peaks count from here on anew."""
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    gc.collect()
    device = get_accelerator()
    sizes = {
        "MA": device.memory_allocated(), "Max_MA": device.max_memory_allocated(),
        "CA": device.memory_reserved(), "Max_CA": device.max_memory_reserved(),
    }  # fmt: skip
    total, available = host_memory()
    print(message)
    print("  ".join(f"{name} {size / 2**30:.2f} GB" for name, size in sizes.items()))
    used = total - available
    print(f"CPU Virtual Memory:  used = {used / 2**30:.2f} GB, percent = {100 * used / total:.1f}%")
    device.reset_peak_memory_stats()
