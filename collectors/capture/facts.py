"""One-off facts that a concrete fix needs: how DDP, DataLoader and process groups were set up, and on which line.

They wait in `statements` until the capture opens.
"""

from __future__ import annotations

import itertools
import os
import sys
import sysconfig
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

from ..hooking import private
from ..hooking.errors import count_error
from ..hooking.statements import Fact as Fact
from ..hooking.statements import send_to as send_to
from ..hooking.statements import state as state
from ..hooking.wrap import stands_for

HOME: Final = Path(__file__).parent.parent.parent
"""Where dsprof is."""

LOADER: Final = "_dsprof_number"
"""Attribute by which the rows of a DataLoader find its facts: the number is their `value`."""

ITERATOR: Final = "torch.utils.data.dataloader:_BaseDataLoaderIter"

FRAMEWORKS: Final = {
    "transformers": "transformers",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "lightning_fabric": "lightning",
    "deepspeed": "deepspeed",
}
"""Package that makes things on the user's behalf -> its name in a fact: he has its settings, not the call's."""
STANDARD_LIBRARY: Final = os.path.dirname(os.__file__)
COMMANDS: Final = frozenset(
    [os.path.dirname(sys.executable), *(sysconfig.get_path("scripts", of) for of in sysconfig.get_scheme_names())]
)
"""Where pip puts the commands of packages: their few lines are nobody's code."""


def caller_site() -> str | None:
    """`file:line` of the nearest frame in the user's own code; if there is none, in the package whose program runs."""
    return _caller()[0]


def _caller() -> tuple[str | None, str | None]:
    """`caller_site`, and which of FRAMEWORKS lies between it and the call: the outermost, if several do."""
    torch_home = str(Path(sys.modules["torch"].__file__ or "").parent)
    ours = (torch_home, str(HOME), "<")
    installed: list[tuple[str, str]] = []
    """Package and site of each frame in one."""
    framework: str | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(ours):
            module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            package = FRAMEWORKS.get(module)
            framework = package or framework
            site = f"{name}:{frame.f_lineno}"
            if package or "site-packages" in name or "dist-packages" in name:
                home = name.rpartition("-packages/")[2].partition("/")[0]
                installed.append((home if module == "__main__" else module, site))
            elif not name.startswith(STANDARD_LIBRARY) and os.path.dirname(name) not in COMMANDS:
                return site, framework
        frame = frame.f_back
    return next((site for package, site in installed if package == installed[-1][0]), None), framework


def by_engine() -> bool:
    """Whether dsprof's engine is making what is being made, of a data set that the script gave it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == str(HOME / "engine" / "dataloader.py"):
            return True
        frame = frame.f_back
    return False


def process() -> Fact:
    """The process itself: its script, and how much of the host it may use."""
    import torch

    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    cores = os.cpu_count() if cpus is None else len(cpus)
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return {"fact": "process", "script": script, "cores": cores, "cpus": cpus, "threads": torch.get_num_threads()}


def watch_dataloaders() -> None:
    """State the settings of every DataLoader made from now on, and have its iterators bear its number.

    They bear it from the beginning: one may well be made before the capture opens.
    """
    from torch.utils.data import DataLoader, IterableDataset

    numbers = itertools.count(1)
    made_by_user: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
    """id of a data set -> the loader that the user made of it, and `sites` by its number."""
    sites: dict[int, str | None] = {}

    def tell(loader: Any, *_: Any, **__: Any) -> None:
        number = next(numbers)
        object.__setattr__(loader, LOADER, number)
        site, framework = _caller()
        model = made_by_user.get(id(loader.dataset))
        if framework is None:
            made_by_user[id(loader.dataset)], sites[number] = loader, site
        elif model is not None and model.dataset is loader.dataset:
            # accelerate and Lightning make another in the image of the user's: his is the call to change
            site, framework = sites.get(getattr(model, LOADER), site), None
        fact = {
            "fact": "dataloader",
            "number": number,
            "num_workers": loader.num_workers,
            "batch_size": loader.batch_size,
            "pin_memory": bool(loader.pin_memory),
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": bool(loader.persistent_workers),
            "iterable": isinstance(loader.dataset, IterableDataset),
            "by_engine": by_engine(),
            "site": site,
            "framework": framework,
        }
        state(fact)

    def number(iterator: Any, loader: Any, *_: Any, **__: Any) -> None:
        setattr(iterator, LOADER, getattr(loader, LOADER, None))

    _after_call_of_init(DataLoader, tell)
    _after_call_of_init(private.need(ITERATOR), number)


def watch_ddp() -> None:
    """State the settings of every DistributedDataParallel made from now on."""
    from torch.nn.parallel import DistributedDataParallel

    def describe(ddp: Any) -> Fact:
        sizes = [p.numel() * p.element_size() for p in ddp.parameters() if p.requires_grad]
        return {
            "fact": "ddp",
            "bucket_cap_mb": ddp.bucket_bytes_cap / 2**20,
            "find_unused_parameters": bool(ddp.find_unused_parameters),
            "static_graph": bool(ddp.static_graph),
            "gradient_as_bucket_view": bool(ddp.gradient_as_bucket_view),
            # In the order DDP fills its buckets: the last registered comes first out of backward.
            "gradient_bytes": sizes[::-1],
        }

    after_init(DistributedDataParallel, describe)


def after_init(cls: type, describe: Callable[[Any], Fact]) -> None:
    """State what `describe` tells of every object of `cls` made from now on, with the line that made it."""

    def tell(made: Any, *_: Any, **__: Any) -> None:
        fact = describe(made)
        site, framework = _caller()
        state({**fact, "site": site, "framework": framework})

    _after_call_of_init(cls, tell)


def _after_call_of_init(cls: type, tell: Callable[..., None]) -> None:
    construct = cls.__init__  # type: ignore[misc]
    if getattr(construct, "_dsprof", False):
        return

    @stands_for(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        try:
            tell(self, *args, **kwargs)
        except Exception as error:
            count_error("facts", error)

    __init__._dsprof = True  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]
