"""How much captures may take in a folder: of a disk what is free, of memory (tmpfs) a part of what is available."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ..system import proc

IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
"""File systems, as /proc/mounts names them, whose files are memory of the host and of the cgroup that writes them."""
MEMORY_SHARE: Final = 4
"""Captures take at most 1 / MEMORY_SHARE of the memory that is available when they begin: the job is yet to grow."""
FIRST_USER: Final = 1000
"""Users below are the system's (SYS_UID_MAX of login.defs): systemd removes nothing of theirs."""
HOSTS_PROCESSES: Final = 0xEFFFFFFC
"""Number of the first process namespace (PROC_PID_INIT_INO of Linux)."""
HOSTS_MOUNTS: Final = range(0xEFFFFFF0, 0xF0000040)
"""The first mount namespace has one of these: others are made when hundreds of numbers are given (PROC_DYNAMIC_FIRST,
and MNT_NS_INIT_INO since Linux 6.18)."""
BATCH_JOBS: Final = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "COBALT_JOBID", "FLUX_JOB_ID", "OAR_JOB_ID")
"""Where one of them is set, the job's end kills all processes at once and may remove what it has in memory."""
LOCAL_SIZES: Final = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")


def free_bytes(folder: Path, kind: str) -> int:
    """What captures of this host may take in `folder`, which is there and on a file system of type `kind`. Raises
    OSError."""
    free = shutil.disk_usage(folder).free
    if kind not in IN_MEMORY:
        return free
    left = memory_left()
    if kind == "ramfs":  # it has no size, and says 0
        free = left or 0
    return free if left is None else min(free, left // MEMORY_SHARE)


def memory_left(host: Path = Path("/")) -> int | None:
    """Bytes that this process could still get: of the host, and of each cgroup that limits it; None: not known."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", proc.read_whole(host / "proc/meminfo"), re.MULTILINE)
    left = [int(found[1]) * 1024] if found else []
    for folder, version in proc.cgroups_of(proc.MEMORY, host / "proc", host / "sys/fs/cgroup"):
        left += _left_in(folder, version)
    return max(min(left), 0) if left else None


def _left_in(cgroup: Path, version: int) -> list[int]:
    """Nothing where it has no limit. What its files have in the page cache, and are not in use, is given back."""
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
    limit, used = (proc.read_whole(cgroup / name).strip() for name in names[version])
    if not (limit.isdigit() and used.isdigit() and int(limit) < proc.UNLIMITED):
        return []
    cached = re.search(r"^(?:total_)?inactive_file (\d+)", proc.read_whole(cgroup / "memory.stat"), re.MULTILINE)
    return [int(limit) - int(used) + (int(cached[1]) if cached else 0)]


def ranks_here(environ: Mapping[str, str], world_size: int) -> int:
    """How many ranks there are on this host, as its launcher tells; all of the job's where it does not."""
    for name in LOCAL_SIZES:
        value = environ.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value)
    # Of Slurm: one number a host, or `8(x2),4` for three of them.
    counts: list[int] = []
    for part in environ.get("SLURM_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        counts += [int(match[1])] * min(int(match[2] or 1), 1 << 16) if match else []
    node = environ.get("SLURM_NODEID", "")
    if node.isdigit() and int(node) < len(counts):
        return counts[int(node)]
    return max(world_size, 1)


def is_removed_at_logout(user: int, host: Path = Path("/")) -> bool:
    """Whether systemd would remove what this user has in /dev/shm when their last session ends (RemoveIPC of
    logind.conf), whatever still runs."""
    if user < FIRST_USER or not (host / "run/systemd/users").is_dir():
        return False
    # Of files of one name that in the later folder counts; drop-ins come in the order of their names, whatever folder
    # they are in (logind.conf(5)).
    folders = ("usr/lib/systemd", "usr/local/lib/systemd", "run/systemd", "etc/systemd")
    drop_ins = {
        file.name: file for folder in folders for file in sorted((host / folder / "logind.conf.d").glob("*.conf"))
    }
    main = [file for folder in folders if (file := host / folder / "logind.conf").is_file()][-1:]
    files = main + [drop_ins[name] for name in sorted(drop_ins)]
    said = re.findall(r"^\s*RemoveIPC\s*=\s*(\w+)", "\n".join(map(proc.read_whole, files)), re.MULTILINE)
    return not said or said[-1].lower() not in ("no", "false", "off", "0")


def ends_with_job(environ: Mapping[str, str], own: Path = Path("/proc/self/ns")) -> bool:
    """Whether what lies in memory may be gone with this job, whatever still runs: in a container, where /dev/shm is one
    of its own, and under a batch system. Raises OSError."""
    if any(environ.get(name) for name in BATCH_JOBS):
        return True
    numbers = [int(os.readlink(own / kind).strip(f"{kind}:[]")) for kind in ("pid", "mnt")]
    return numbers[0] != HOSTS_PROCESSES or numbers[1] not in HOSTS_MOUNTS
