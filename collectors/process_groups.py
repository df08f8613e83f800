"""Which process groups there are: their ranks, what the job calls them, and their backend."""

from __future__ import annotations

from .collector import OpenCapture
from .uninstall import Uninstall


def install(capture: OpenCapture) -> list[Uninstall]:
    """State, after each step, the groups that were made since the last one."""
    seen = 0

    def state() -> None:
        nonlocal seen
        from torch.distributed import distributed_c10d as c10d

        if len(c10d._world.pg_map) == seen:
            return
        seen = len(c10d._world.pg_map)
        for group, name in list(c10d._world.pg_names.items()):
            if group in c10d._world.pg_group_ranks:
                described = {"ranks": c10d.get_process_group_ranks(group), "desc": group.group_desc}
                backend = cpu_backend(str(c10d._world.pg_map[group][0]))
                capture.write_fact({"fact": "group", "name": name, **described, "backend": backend})

    capture.after_step.append(state)
    return []


def cpu_backend(config: str) -> str | None:
    """What a process group uses on CPU, of a backend as `init_process_group` takes it; None: torch chose."""
    of_device = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    chosen = of_device.get("cpu") if of_device else config
    return None if chosen in (None, "", "undefined") else chosen
