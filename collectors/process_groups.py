"""Which process groups there are: their ranks, what the job calls them, and their backend."""

from __future__ import annotations

from collections.abc import Callable

from .collector import OpenCapture
from .facts import Fact
from .uninstall import Uninstall


def install(capture: OpenCapture) -> list[Uninstall]:
    """State, after each step, the groups that were made since the last one."""
    from torch.distributed import is_available

    if not is_available():
        return []
    from torch.distributed import distributed_c10d as c10d

    seen = 0

    def state(_: int = 0) -> None:
        nonlocal seen
        there = len(c10d._world.pg_map)
        if there != seen:
            seen = there
            state_groups(capture.write_fact)

    capture.samples.append(state)
    state()  # a job may hang or fail before its first step
    return []


def state_groups(write_fact: Callable[[Fact], None]) -> None:
    """State the groups that there are."""
    from torch.distributed import distributed_c10d as c10d

    for group, name in list(c10d._world.pg_names.items()):
        if group in c10d._world.pg_group_ranks:
            described = {"ranks": c10d.get_process_group_ranks(group), "desc": group.group_desc}
            backend = cpu_backend(str(c10d._world.pg_map[group][0]))
            write_fact({"fact": "group", "name": name, **described, "backend": backend})


def cpu_backend(config: str) -> str | None:
    """What a process group uses on CPU, of a backend as `init_process_group` takes it; None: torch chose."""
    of_device = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    chosen = of_device.get("cpu") if of_device else config
    return None if chosen in (None, "", "undefined") else chosen
