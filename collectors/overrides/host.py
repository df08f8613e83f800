"""Python's garbage collector, and the cores that a rank may use."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any, Final

from ..hooking.uninstall import Uninstall, in_reverse
from .override import Override

AFTER_STEPS: Final = 3
"""What a script sets up is there by then; before that `freeze` would keep too little."""


def install(overrides: list[Override]) -> Uninstall:
    apply: dict[str, Callable[[Override], Uninstall]] = {
        "gc.freeze": _freeze,
        "gc.every": _every,
        "affinity.cores": _pin,
    }
    return in_reverse([apply[override.key](override) for override in overrides])


def _after_steps(step: Callable[[int], None]) -> Uninstall:
    """Call `step` with the number of steps taken, after each of the first optimizer that steps."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    first: list[int] = []
    taken = [0]

    def after(optimizer: Any, *_: Any) -> None:
        if not first:
            first.append(id(optimizer))
        if id(optimizer) == first[0]:
            taken[0] += 1
            step(taken[0])

    # Never removed: torch iterates over these hooks while it calls them.
    register_optimizer_step_post_hook(after)
    return lambda: None


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

    return _after_steps(step)


def _every(override: Override) -> Uninstall:
    """Garbage is collected after every Nth step, on all ranks at once, and at no other time; 0: never."""

    def step(number: int) -> None:
        if number == 1:
            was = gc.isenabled()
            gc.disable()
            override.applied("automatic" if was else "off", by_call=False)
        if override.value and number % override.value == 0:
            gc.collect()

    return _after_steps(step)


def _pin(override: Override) -> Uninstall:
    """Each rank of a host has cores of its own."""
    from torch.utils.data import get_worker_info

    rank, ranks = os.environ.get("LOCAL_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if get_worker_info() is not None:
        return lambda: None
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
    override.applied(",".join(map(str, cores)), by_call=False)
    return lambda: os.sched_setaffinity(0, cores)
