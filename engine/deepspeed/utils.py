"""Small things that DeepSpeed's tutorials call."""

from __future__ import annotations

import gc
import random
import sys

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
