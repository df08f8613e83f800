"""Bytes that the TCP connections of a host have carried so far, from the kernel's sock_diag(7).

A process's own counters (proc_pid_io(5)) have what it reads and writes, not what goes through recv(2) and send(2). This
needs no rights, and sees the connections of its own network namespace. They are those of processes by their inodes.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

SOCK_DIAG: Final = 4
"""The family of netlink."""
BY_FAMILY: Final = 20
REQUEST_AND_DUMP: Final = 0x301
DONE, ERROR = 3, 2
INFO: Final = 2
"""The attribute with a `struct tcp_info`."""
OPEN: Final = 1 << 1 | 1 << 8
"""States of TCP: established, and ended by the other side only."""
HEADER: Final = struct.Struct("=IHHII")
REQUEST: Final = struct.Struct("=BBBxI48x")
ATTRIBUTE: Final = struct.Struct("=HH")
INODE_AT: Final = 68
ATTRIBUTES_AT: Final = 72
"""In a `struct inet_diag_msg`, and behind it."""
COUNTS: Final = struct.Struct("=120xQQ")
"""Of a `struct tcp_info`: bytes that the other side has acknowledged, and bytes received."""
AT_ONCE: Final = 1 << 16
WAIT_S: Final = 1.0
MOST_FILES: Final = 4096
"""Open files of a process that are looked at."""


class Carried(NamedTuple):
    """By one connection so far, bytes."""

    received: int
    sent: int


def connections() -> dict[int, Carried]:
    """Inode -> what each open TCP connection of this network namespace has carried; empty where the kernel does not
    tell that of all."""
    try:
        return {**dict(_connections(socket.AF_INET)), **dict(_connections(socket.AF_INET6))}
    except (OSError, AttributeError, struct.error):  # another system, a filter of calls, an old kernel
        return {}


def inodes(process: int) -> set[int]:
    """Of the sockets of a process."""
    found: set[int] = set()
    with suppress(OSError):
        for file in os.listdir(f"/proc/{process}/fd")[:MOST_FILES]:
            with suppress(OSError):
                kind, _, inode = os.readlink(f"/proc/{process}/fd/{file}").partition(":[")
                if kind == "socket":
                    found.add(int(inode[:-1]))
    return found


def _connections(family: int) -> Iterator[tuple[int, Carried]]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, SOCK_DIAG) as kernel:
        kernel.settimeout(WAIT_S)
        request = REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (INFO - 1), OPEN)
        kernel.send(HEADER.pack(HEADER.size + len(request), BY_FAMILY, REQUEST_AND_DUMP, 1, 0) + request)
        while True:
            answer, at = kernel.recv(AT_ONCE), 0
            while at < len(answer):
                size, kind, *_ = HEADER.unpack_from(answer, at)
                if kind == DONE:
                    return
                if kind == ERROR or size < HEADER.size:
                    raise OSError("sock_diag is not answered")
                yield from _connection(answer[at + HEADER.size : at + size])
                at += _aligned(size)


def _connection(message: bytes) -> Iterator[tuple[int, Carried]]:
    """Of one `struct inet_diag_msg` with its attributes; nothing where the kernel tells no bytes."""
    (inode,) = struct.unpack_from("=I", message, INODE_AT)
    at = ATTRIBUTES_AT
    while at < len(message):
        size, kind = ATTRIBUTE.unpack_from(message, at)
        if size < ATTRIBUTE.size:
            return
        if kind == INFO and size >= ATTRIBUTE.size + COUNTS.size:
            sent, received = COUNTS.unpack_from(message, at + ATTRIBUTE.size)
            yield inode, Carried(received, sent)
        at += _aligned(size)


def _aligned(size: int) -> int:
    return size + 3 & ~3
