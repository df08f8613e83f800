"""Python's garbage collector, and the cores that a rank may use."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any, Final

from ..hooking.uninstall import Uninstall, in_reverse
from .override import Override

AFTER_STEPS: Final = 3
"""What a script sets up is there by then; before that `freeze` would keep too little."""

PINNED: Final = "DSPROF_PINNED"
"""Variable by which what a rank starts knows that the rank has its cores: its LOCAL_RANK."""


def install(overrides: list[Override]) -> Uninstall:
    apply: dict[str, Callable[[Override], Uninstall]] = {
        "gc.freeze": _freeze,
        "gc.every": _every,
        "affinity.cores": _pin,
    }
    return in_reverse([apply[override.key](override) for override in overrides])


def after_steps(step: Callable[[int], None]) -> Uninstall:
    """Call `step` with the number of steps taken, after each. Where several optimizers step in turns, that is one
    step: the next begins when one of them steps again."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    stepped: weakref.WeakSet[Any] = weakref.WeakSet()
    taken = [0]
    installed = [True]

    def after(optimizer: Any, *_: Any) -> None:
        if not installed[0]:
            return
        if optimizer in stepped or not taken[0]:
            stepped.clear()
            taken[0] += 1
            step(taken[0])
        stepped.add(optimizer)

    # Never removed: torch iterates over these hooks while it calls them.
    register_optimizer_step_post_hook(after)

    def uninstall() -> None:
        installed[0] = False

    return uninstall


def _freeze(override: Override) -> Uninstall:
    """What is there after a few steps is never looked at again."""
    if not override.value:
        override.not_applied("the script's own gc.freeze is not undone")
        return lambda: None

    def step(number: int) -> None:
        if number == AFTER_STEPS:
            gc.collect()
            gc.freeze()
            override.applied(False, by_call=False)

    return after_steps(step)


def _every(override: Override) -> Uninstall:
    """Garbage is collected after every Nth step, on all ranks at once, and at no other time; 0: never."""

    before: list[bool] = []

    def step(number: int) -> None:
        if not before:
            before.append(gc.isenabled())
            override.applied("automatic" if before[0] else "off", by_call=False)
        gc.disable()  # each time: the script may switch it on itself
        if override.value and number % override.value == 0:
            gc.collect()

    def enable() -> None:
        if before and before[0]:
            gc.enable()

    return in_reverse([enable, after_steps(step)])


def _pin(override: Override) -> Uninstall:
    """Each rank of a host has cores of its own."""
    from torch.utils.data import get_worker_info

    rank, ranks = os.environ.get("LOCAL_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if get_worker_info() is not None or os.environ.get(PINNED) == rank:
        return lambda: None  # a process that a rank has started: it has the rank's cores
    if not rank.isdecimal() or not ranks.isdecimal() or int(ranks) < 1:
        override.not_applied("LOCAL_RANK and LOCAL_WORLD_SIZE are not set: start the ranks with torchrun's flags")
        return lambda: None
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // int(ranks) if override.value == "spread" else int(override.value)
    own = cores[int(rank) * each : (int(rank) + 1) * each]
    if not own:
        override.not_applied(f"{len(cores)} cores are not enough for {ranks} ranks with {max(each, 1)} each")
        return lambda: None
    os.sched_setaffinity(0, own)
    os.environ[PINNED] = rank
    override.applied(",".join(map(str, cores)), by_call=False)

    def uninstall() -> None:
        os.sched_setaffinity(0, cores)
        os.environ.pop(PINNED, None)

    return uninstall
