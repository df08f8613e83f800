"""Reading what the kernel tells in /proc (proc(5)) and in /sys/fs/cgroup (cgroups(7))."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ..hooking.signals import by_handler

PROC: Final = "/proc"
CGROUPS: Final = "/sys/fs/cgroup"
CPU, MEMORY = "cpu", "memory"
"""Controllers of cgroups."""
TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
"""In which /proc/<pid>/stat counts time."""
PAGE: Final = os.sysconf("SC_PAGE_SIZE")
"""Bytes."""
STATE, USER_TICKS, SYSTEM_TICKS, START_TICKS, LAST_CORE = 0, 11, 12, 19, 36
"""Fields of `stat`: R runs or wants to, D waits and cannot be interrupted, Z and X have ended; CPU time of the process
itself; when it began, since the host did; the core that it ran on last."""
UNLIMITED: Final = 1 << 60
"""Bytes. What cgroup v1 writes for no limit is near 2**63."""
FIRST_CGROUP_NAMESPACE: Final = 0xEFFFFFFB
"""Number of the cgroup namespace that the kernel begins with (PROC_CGROUP_INIT_INO)."""
ONCE: Final = 1 << 10
"""Bytes of a file of a line or a few."""


def read(path: str | os.PathLike[str], most: int = ONCE) -> bytes:
    """The first `most` bytes of a small file. Empty where it is gone, or not ours to look at."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # `open` takes longer than the kernel
    except OSError as error:
        if by_handler(error):
            raise
        return b""
    try:
        return os.read(file, most)
    except OSError as error:
        if by_handler(error):
            raise
        return b""
    finally:
        os.close(file)


def keep_open(path: str) -> int:
    """A descriptor for `os.pread`, for what is read over and over; -1 where the file is not there, or not ours."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if by_handler(error):
            raise
        return -1


def read_whole(path: Path) -> str:
    """A file of any length. Empty where it is gone, or not ours to look at."""
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        if by_handler(error):
            raise
        return ""


def stat(process: int | str, proc: str = PROC) -> list[bytes]:
    """What /proc/<process>/stat says behind the command's name, by STATE and those beside it; empty where the process
    is gone."""
    return read(f"{proc}/{process}/stat").rpartition(b")")[2].split()


def cgroups_of(controller: str, proc: Path = Path(PROC), cgroups: Path = Path(CGROUPS)) -> Iterator[tuple[Path, int]]:
    """The folder of this process's cgroup of a controller (CPU, MEMORY) and of each above it, as far as they are
    seen from here, with the version of cgroups, 1 or 2."""
    for line in read_whole(proc / "self" / "cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroups / controller if controllers else cgroups
        # In a container the root that is mounted may be the process's own cgroup, whatever its path is called.
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents) if folder.is_dir() else (root,):
            yield place, 1 if controllers else 2
            if place == root:
                break


def sees_every_cgroup(controller: str, proc: Path = Path(PROC), cgroups: Path = Path(CGROUPS)) -> bool:
    """Whether `cgroups_of` gives all cgroups above this process's, up to the root of the host: those of a container are
    in a namespace of their own, or mounted without what is above them."""
    try:
        if os.stat(proc / "self" / "ns" / "cgroup").st_ino != FIRST_CGROUP_NAMESPACE:
            return False
    except OSError as error:
        if by_handler(error):
            raise
        return False
    paths = [line.split(":", 2) for line in read_whole(proc / "self" / "cgroup").splitlines() if line.count(":") >= 2]
    mine = [(of, path) for _, of, path in paths if not of or controller in of.split(",")]
    return bool(mine) and all((cgroups / (controller if of else "") / path.lstrip("/")).is_dir() for of, path in mine)
