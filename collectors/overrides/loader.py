"""DataLoader: workers, prefetching, pinned memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..hooking.uninstall import Uninstall
from .arguments import Arguments, given, override_arguments
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
    wanted = given(arguments, overrides)
    if wanted.get("num_workers") and not arguments.get("num_workers") and _is_read_whole(arguments.get("dataset")):
        overrides["num_workers"].not_applied(
            "an IterableDataset is read whole by each worker, so its samples would come several times; where it splits "
            "itself by get_worker_info(), give the DataLoader workers in the script"
        )
        del wanted["num_workers"]
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


def _is_read_whole(dataset: Any) -> bool:
    """Whether each worker may read all of a data set. Those of the package `datasets` are split between workers."""
    from torch.utils.data import IterableDataset

    return isinstance(dataset, IterableDataset) and not any(
        cls.__module__.partition(".")[0] == "datasets" for cls in type(dataset).__mro__
    )
