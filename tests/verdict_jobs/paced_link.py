"""A link that is really slow: the kernel paces what a process sends to one of its peers."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import torch.distributed as dist

SO_MAX_PACING_RATE = 47
"""Linux: bytes a second that TCP sends at most; the module `socket` does not name it."""


def pace(sender: int, receiver: int, bytes_per_s: int) -> int:
    """Let what rank `sender` sends to `receiver` take as long as over a link of so many bytes a second. Called on all
    ranks, once they have sent each other something. Returns how many connections it is on this rank."""
    mine = dict(_connections())
    ports: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ports, [here for here, _ in mine.values()])
    if dist.get_rank() != sender:
        return 0
    found = [number for number, (_, there) in mine.items() if there in ports[receiver]]
    for number in found:
        with socket.socket(fileno=os.dup(number)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s)
    return len(found)


def _connections() -> Iterator[tuple[int, tuple[int, int]]]:
    """Descriptor of each of this process's TCP connections, with its port and that of the other side."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), _socket(int(name)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                yield int(name), (connection.getsockname()[1], connection.getpeername()[1])


def _socket(number: int) -> socket.socket:
    """Another descriptor of the same socket. Raises OSError where it is none."""
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
