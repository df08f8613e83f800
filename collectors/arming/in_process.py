"""Capturing a part of a program that runs already: models, optimizers and DataLoaders are there, and it may be captured
again later."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..capture import facts, identity, session
from ..hooking import statements
from ..hooking.errors import count_error
from ..memory import live_tensors
from ..system.clock import now_ns
from . import free_threaded, process

FOLDER_KEY: Final = "dsprof/profile-folder"
"""With the number of the block, under which the ranks of a job agree on its run folder."""

_blocks = 0
"""How many were begun in this process. The ranks of a job are to begin the same ones, in the same order."""


@dataclass
class CapturedBlock:
    """A part of the program that is captured. founder: this rank has named the run folder."""

    folder: Path
    who: identity.Identity
    founder: bool
    bring_back: Callable[[], None]

    def end(self) -> None:
        """Take the hooks away and close the capture. Never raises."""
        try:
            session.stop()
        finally:
            self.bring_back()


def captured_already() -> bool:
    """Whether this process is profiled as a whole, by `dsprof run` or DSPROF=1, or a block is being captured."""
    return session.current() is not None or process.is_armed()


def begin(new_folder: Callable[[], Path], settings: Mapping[str, str]) -> CapturedBlock | None:
    """Open a capture; None where this rank is not to be captured (DSPROF_RANKS).

    new_folder: names a run folder, for where no other rank has named one; makes nothing on disk.
    settings:   DSPROF_* variables, in the place of those of the environment
    Raises OSError or ValueError where there can be no capture.
    """
    global _blocks
    why = free_threaded.refusal()
    if why is not None:
        raise ValueError(why)
    _blocks += 1
    who = identity.identify()
    mine = new_folder()
    folder = identity.agreed_folder(mine, f"{FOLDER_KEY}-{_blocks}", who.world_size)
    here = {"DSPROF_RUN": os.fspath(folder), identity.BEGAN_NS: str(now_ns())}
    bring_back = identity.use_settings({**settings, **here})
    try:
        statements.forget()
        _state_what_is_there()
        opened = session.start()
    except BaseException:
        bring_back()
        raise
    if opened is None:
        bring_back()
        return None
    return CapturedBlock(folder, who, folder == mine, bring_back)


@dataclass
class _Made:
    """Objects of torch's that are alive."""

    modules: list[Any] = field(default_factory=list)
    ddp: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)


def _state_what_is_there() -> None:
    """Tell of models, optimizers and DataLoaders that were made before, and of those that are made from now on."""
    try:
        live_tensors.watch()
        facts.watch_dataloaders()
        made = _find_made()
        for module in made.modules:
            live_tensors.live().modules.add(module)
        for optimizer in made.optimizers:
            live_tensors.live().optimizers.add(optimizer)
        for ddp in made.ddp:
            facts.state_ddp(ddp)
        for loader in made.loaders:
            facts.state_dataloader(loader)
    except Exception as error:  # of what is not known of them, what they do is captured all the same
        count_error("what was made before", error)


def _find_made() -> _Made:
    """Looks at every object of the process once: a tenth of a second a million."""
    from torch.nn import Module
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    made = _Made()
    lists: dict[type, list[list[Any]]] = {}
    for one in gc.get_objects():
        kind = type(one)  # what it says of its class itself may be anything
        found = lists.get(kind)
        if found is None:
            which = ((Module, made.modules), (DistributedDataParallel, made.ddp), (Optimizer, made.optimizers),
                     (DataLoader, made.loaders))  # fmt: skip
            found = lists[kind] = [kept for cls, kept in which if issubclass(kind, cls)]
        for kept in found:
            kept.append(one)
    return made
