"""DataLoader: workers, prefetching, pinned memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..hooking.uninstall import Uninstall
from .arguments import Arguments, override_arguments
from .override import Override

OF_WORKERS: Final = {"prefetch_factor": None, "persistent_workers": False}
"""Arguments that only a loader with workers may have, and their values in one without."""


def install(overrides: list[Override]) -> Uninstall:
    """Apply them to every DataLoader made from now on."""
    from torch.utils.data import DataLoader

    arguments = {override.name: override for override in overrides}
    return override_arguments(DataLoader, "__init__", arguments, "DataLoader", _with_workers)


def _with_workers(arguments: Arguments, overrides: Mapping[str, Override]) -> Mapping[str, Any]:
    """What DataLoader takes together: one without workers has neither prefetching nor persistent workers."""
    wanted = {name: override.value for name, override in overrides.items()}
    workers = wanted.get("num_workers", arguments.get("num_workers", 0))
    if workers:
        return wanted
    for name, without in OF_WORKERS.items():
        if name in wanted:
            overrides[name].not_applied("the loader has no workers; set loader.num_workers, too")
            del wanted[name]
        elif name in arguments:
            wanted[name] = without
    if "timeout" in arguments:
        wanted["timeout"] = 0
    if "multiprocessing_context" in arguments:
        wanted["multiprocessing_context"] = None
    return wanted
