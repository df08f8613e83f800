"""Counting GPUs without importing torch."""

from __future__ import annotations

from collections.abc import Mapping


def visible_gpus(environ: Mapping[str, str]) -> int:
    """How many NVIDIA GPUs a rank started with `environ` would see; 0 where there is no driver."""
    total = installed_gpus()
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    return total if chosen is None else min(total, count_visible(chosen, total))


def count_visible(chosen: str, total: int) -> int:
    """How many devices CUDA_VISIBLE_DEVICES names: it stops at the first that does not exist, as CUDA does."""
    seen: list[str] = []
    for entry in (part.strip() for part in chosen.split(",")):
        exists = int(entry) < total if entry.isdigit() else entry.startswith(("GPU-", "MIG-"))
        if not exists:
            break
        if entry in seen:  # CUDA shows none at all
            return 0
        seen.append(entry)
    return len(seen)


def installed_gpus() -> int:
    """GPUs the driver knows of."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no library, no driver, no permission
        return 0
