"""One-off facts that a concrete fix needs: how DDP, DataLoader and process groups were set up, and on which line.

They wait in `statements` until the capture opens.
"""

from __future__ import annotations

import itertools
import os
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from ..hooking import constructors, private
from ..hooking.caller import caller
from ..hooking.constructors import is_watched
from ..hooking.statements import Fact as Fact
from ..hooking.statements import send_to as send_to
from ..hooking.statements import state as state

LOADER: Final = "_dsprof_number"
"""Attribute by which the rows of a DataLoader find its facts: the number is their `value`."""

ITERATOR: Final = "torch.utils.data.dataloader:_BaseDataLoaderIter"

STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers that training changes, of BatchNorm and its like."""

ENGINES_DATA: Final = "dsprof.engine.data"
"""The module in which dsprof's engine makes its DataLoader."""


class Described:
    """What was said of objects as they were made, by identity, as long as somebody keeps them."""

    def __init__(self) -> None:
        self._facts: dict[int, tuple[weakref.ref[Any], Fact]] = {}

    def note(self, made: Any, fact: Fact) -> None:
        key = id(made)
        self._facts[key] = (weakref.ref(made, lambda _: self._facts.pop(key, None)), fact)

    def of(self, made: Any) -> Fact | None:
        """None: nobody looked on when it was made."""
        known = self._facts.get(id(made))
        return known[1] if known is not None and known[0]() is made else None


_described = Described()
_numbers = itertools.count(1)
_ddp_numbers = itertools.count(1)
"""Of DataLoaders, and of models in DistributedDataParallel: two of one shape are two facts."""


def by_engine() -> bool:
    """Whether dsprof's engine is making what is being made, of a data set that the script gave it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == ENGINES_DATA:
            return True
        frame = frame.f_back
    return False


def process() -> Fact:
    """The process itself: its script, and how much of the host it may use."""
    import torch

    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    cores = os.cpu_count() if cpus is None else len(cpus)
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return {
        "fact": "process", "script": script, "cores": cores, "cpus": cpus, "host_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }  # fmt: skip


def watch_dataloaders() -> None:
    """State the settings of every DataLoader made from now on, and have its iterators bear its number.

    They bear it from the beginning: one may well be made before the capture opens.
    """
    from torch.utils.data import DataLoader

    made_by_user: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
    """id of a data set -> the loader that the user made of it, and `sites` by its number."""
    sites: dict[int, str | None] = {}

    def tell(loader: Any, *_: Any, **__: Any) -> None:
        number = _number(loader)
        site, framework = caller()
        model = made_by_user.get(id(loader.dataset))
        if framework is None:
            made_by_user[id(loader.dataset)], sites[number] = loader, site
        elif model is not None and model.dataset is loader.dataset:
            # accelerate and Lightning make another in the image of the user's: his is the call to change
            site, framework = sites.get(getattr(model, LOADER), site), None
        fact = {**_of_loader(loader, number), "by_engine": by_engine(), "site": site, "framework": framework}
        _described.note(loader, fact)
        state(fact)

    def number(iterator: Any, loader: Any, *_: Any, **__: Any) -> None:
        setattr(iterator, LOADER, getattr(loader, LOADER, None))

    _each_made(DataLoader, tell)
    _each_made(private.need(ITERATOR), number)


def _number(loader: Any) -> int:
    """Have a DataLoader bear its number."""
    number = next(_numbers)
    object.__setattr__(loader, LOADER, number)
    return number


def _of_loader(loader: Any, number: int) -> Fact:
    from torch.utils.data import IterableDataset

    return {
        "fact": "dataloader",
        "number": number,
        "num_workers": loader.num_workers,
        "batch_size": loader.batch_size,
        "pin_memory": bool(loader.pin_memory),
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": bool(loader.persistent_workers),
        "iterable": isinstance(loader.dataset, IterableDataset),
    }


def watch_ddp() -> None:
    """State the settings of every DistributedDataParallel made from now on."""
    from torch.nn.parallel import DistributedDataParallel

    after_init(DistributedDataParallel, _of_ddp)


def _of_ddp(ddp: Any) -> Fact:
    sizes = [p.numel() * p.element_size() for p in ddp.parameters() if p.requires_grad]
    buffers = dict(ddp.module.named_buffers())
    return {
        "fact": "ddp",
        "number": next(_ddp_numbers),
        "bucket_cap_mb": ddp.bucket_bytes_cap / 2**20,
        "find_unused_parameters": bool(ddp.find_unused_parameters),
        "static_graph": bool(ddp.static_graph),
        "gradient_as_bucket_view": bool(ddp.gradient_as_bucket_view),
        "broadcast_buffers": bool(ddp.broadcast_buffers),
        "buffer_bytes": sum(buffer.numel() * buffer.element_size() for buffer in buffers.values()),
        "statistics": any(name.rpartition(".")[2] in STATISTICS for name in buffers),
        # In the order DDP fills its buckets: the last registered comes first out of backward.
        "gradient_bytes": sizes[::-1],
    }


def state_ddp(ddp: Any) -> None:
    """State the settings of one that is there already."""
    _state_made(ddp, _of_ddp)


def state_dataloader(loader: Any) -> None:
    """State the settings of one that is there already; iterators of it from now on bear its number."""
    _state_made(loader, lambda loader: {**_of_loader(loader, _number(loader)), "by_engine": False})


def _state_made(made: Any, describe: Callable[[Any], Fact]) -> None:
    """What was said of it as it was made, with the line, where somebody looked on; else what `describe` tells now."""
    known = _described.of(made)
    if known is None:
        known = {**describe(made), "site": None, "framework": None}
        _described.note(made, known)
    state(known)


def after_init(cls: type, describe: Callable[[Any], Fact]) -> None:
    """State what `describe` tells of every object of `cls` made from now on, with the line that made it."""

    def tell(made: Any, *_: Any, **__: Any) -> None:
        site, framework = caller()
        fact = {**describe(made), "site": site, "framework": framework}
        _described.note(made, fact)
        state(fact)

    _each_made(cls, tell)


def _each_made(cls: type, tell: Callable[..., None]) -> None:
    """Call `tell` after each object of `cls` is made, from now on for good: it may be before a capture opens."""
    if not is_watched(cls):
        constructors.after_init(cls, tell, "facts")
