"""Which process groups there are: their ranks, what the job calls them, and their backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ..capture.open_capture import OpenCapture
from ..hooking import private
from ..hooking.hook_parts import HookPart, install_each
from ..hooking.statements import Fact
from ..hooking.uninstall import Uninstall

WORLD: Final = "torch.distributed.distributed_c10d:_world"
"""What torch knows of this process's groups."""


def install(capture: OpenCapture) -> list[Uninstall]:
    """State, after each step, the groups that were made since the last one."""
    from torch.distributed import is_available, is_initialized

    if not is_available():
        return []
    seen = 0

    def state(_: int = 0) -> None:
        nonlocal seen
        groups = private.find(f"{WORLD}.pg_map")
        there = int(is_initialized()) if groups is None else len(groups)
        if there != seen:
            seen = there
            state_groups(capture.write_fact)

    def install() -> None:
        capture.samples.append(state)
        state()  # a job may hang or fail before its first step

    return install_each("process-groups", [HookPart("process groups are not known", install, decisive=True)])


def state_groups(write_fact: Callable[[Fact], None]) -> None:
    """State the groups that there are; of a torch that does not tell any more, the default one."""
    import torch.distributed as dist

    names, backends, ranks = (private.find(f"{WORLD}.{name}") for name in ("pg_names", "pg_map", "pg_group_ranks"))
    if names is not None and backends is not None and ranks is not None:
        for group, name in list(names.items()):
            if group in ranks:
                _state(write_fact, group, name, str(backends[group][0]))
    elif dist.is_initialized():
        default: Any = dist.group.WORLD
        _state(write_fact, default, default.group_name, dist.get_backend(default))


def _state(write_fact: Callable[[Fact], None], group: Any, name: str, backend: str) -> None:
    import torch.distributed as dist

    described = {"ranks": dist.get_process_group_ranks(group), "desc": group.group_desc}
    write_fact({"fact": "group", "name": name, **described, "backend": cpu_backend(backend)})


def cpu_backend(config: str) -> str | None:
    """What a process group uses on CPU, of a backend as `init_process_group` takes it; None: torch chose."""
    of_device = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    chosen = of_device.get("cpu") if of_device else config
    return None if chosen in (None, "", "undefined") else chosen
