"""What a communication backend does that a replay must know: how many operations a group runs at once, and in which
collectives a rank depends on others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Backend:
    """workers: operations of one process group that run at once, first issued first served; None: any number.
    messages_queue: whether sends and receives need a worker of their group too; else each runs beside the rest.
    """

    workers: int | None
    messages_queue: bool


BACKENDS: Final = {
    "gloo": Backend(workers=2, messages_queue=False),  # ProcessGroupGloo: two threads a group; unbound buffers
    "nccl": Backend(workers=1, messages_queue=False),  # a stream a communicator; batched messages share a kernel
    "stream": Backend(workers=1, messages_queue=True),  # a device's stream, or a lane of dsprof's engine
    "unlimited": Backend(workers=None, messages_queue=False),
}
DEFAULT: Final = "gloo"
"""Of a group whose backend was not captured: what is timed here ran on CPU."""


def backend_of(group: str, groups: Mapping[str, Mapping[str, Any]]) -> Backend:
    """The backend of a process group, by what `RunInfo.groups` says of it."""
    about = groups.get(group) or groups.get(group.partition("#")[0]) or {}
    return BACKENDS.get(str(about.get("backend") or DEFAULT), BACKENDS[DEFAULT])
