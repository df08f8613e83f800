"""What a process and its children use of CPU, files and TCP connections: whether one that is waited for works, or
sleeps."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from .sockets import Carried, connections, inodes

TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
BUSY: Final = 0.05
"""Of a core: below, a process wakes now and then and does nothing."""
BUSY_BYTES: Final = 64 << 10
"""Read or written in a second: the same."""
MOST_PROCESSES: Final = 256
"""Children and theirs that are looked at."""
MOST_THREADS: Final = 128
MOST_SEARCHED: Final = 1024
"""Threads of a rank among which dsprof's own are looked for."""
SHORTEST_S: Final = 2.0
"""Over which it is told."""
OWN_THREADS: Final = "dsprof-"
"""Begins the names of dsprof's own threads in a rank: what they use is not the rank's work."""
LONGEST_NAME: Final = 15
"""Of a thread, to Linux."""


@dataclass(frozen=True)
class Moved:
    """Bytes that processes have read and written so far: by system calls on files and pipes, and from and to storage,
    which is all that is seen of files that are mapped into memory."""

    read: int = 0
    written: int = 0
    from_storage: int = 0
    to_storage: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.read + other.read,
            self.written + other.written,
            self.from_storage + other.from_storage,
            self.to_storage + other.to_storage,
        )

    def __sub__(self, other: Moved) -> Moved:
        return self + Moved(-other.read, -other.written, -other.from_storage, -other.to_storage)


@dataclass(frozen=True)
class Usage:
    """So far: CPU time in s, bytes of files, bytes of each TCP connection by its inode, and of which processes."""

    at_s: float
    cpu_s: float
    files: Moved
    connections: Mapping[int, Carried]
    processes: frozenset[int]


def usage(process: int, at_s: float) -> Usage | None:
    """Of a process and its descendants; None where it is gone, or the system does not tell."""
    own = _cpu_seconds(f"/proc/{process}")
    if own is None:
        return None
    not_its_work, files = _own_threads(process)
    cpu, files, sockets = -not_its_work, Moved() - files, set[int]()
    processes = [process, *descendants(process)]
    for one in processes:
        cpu += _cpu_seconds(f"/proc/{one}") or 0.0
        files += _moved(f"/proc/{one}")
        sockets |= inodes(one)
    carried = {inode: one for inode, one in connections().items() if inode in sockets} if sockets else {}
    return Usage(at_s, cpu, files, carried, frozenset(processes))


def descendants(process: int) -> list[int]:
    """Its children and theirs, as many as are looked at."""
    found: list[int] = []
    left = [process]
    while left:
        for child in _children(left.pop()):
            if child not in found and len(found) < MOST_PROCESSES:
                found.append(child)
                left.append(child)
    return found


def bytes_between(samples: Sequence[Usage]) -> int:
    """Read and written from the first to the last of samples of a process, in their order.

    What comes by read(2) from a disk or a connection is in two counters: of each direction the largest counts. A
    connection that was not there before is new, and all that it has carried is.
    """
    if not samples:
        return 0
    files = samples[-1].files - samples[0].files
    told = [one.connections for one in samples if one.connections]
    known = dict(told[0]) if told else {}
    received = sent = 0
    for connections_now in told[1:]:
        for inode, now in connections_now.items():
            was = known.get(inode, Carried(0, 0))
            received += max(0, now.received - was.received)
            sent += max(0, now.sent - was.sent)
        known.update(connections_now)
    return max(files.read, files.from_storage, received) + max(files.written, files.to_storage, sent)


def name_thread(name: str) -> None:
    """Have the kernel, and whatever lists threads, know the calling thread by its name."""
    with suppress(OSError), open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:
        file.write(name[:LONGEST_NAME])


def process_state(process: int) -> str:
    """Its letter in proc(5): `T` stopped, `Z` ended, `S` asleep, ...; empty: there is no such process."""
    fields = _stat(f"/proc/{process}")
    return fields[0] if fields else ""


class Activity:
    """The last usage of a process, sampled now and then."""

    def __init__(self, process: int) -> None:
        self.process = process
        self._samples: deque[Usage] = deque(maxlen=64)

    def sample(self, at_s: float) -> None:
        found = usage(self.process, at_s)
        if found is not None:
            self._samples.append(found)

    def works(self, over_s: float) -> bool | None:
        """Whether it worked, over the last `over_s` (or as long as is known); None: not known."""
        if not self._samples:
            return None
        last = self._samples[-1]
        samples = [one for one in self._samples if last.at_s - one.at_s <= max(over_s, SHORTEST_S)]
        first = samples[0]
        seconds = last.at_s - first.at_s
        if seconds < SHORTEST_S / 2:
            return None
        if last.processes != first.processes:  # some began or ended: work is handed out
            return True
        return last.cpu_s - first.cpu_s > BUSY * seconds or bytes_between(samples) > BUSY_BYTES * seconds


def kernel_threads(process: int) -> list[dict[str, Any]]:
    """Each thread of a process as the kernel knows it: number, name, state, the function of the kernel that it sleeps
    in and its system call, where those may be read."""
    try:
        numbers = sorted(map(int, os.listdir(f"/proc/{process}/task")))
    except (OSError, ValueError):
        return []
    return [_kernel_thread(process, number) for number in numbers[:MOST_THREADS]]


def kernel_children(process: int) -> list[dict[str, Any]]:
    """The main thread of each child, and of theirs, as in `kernel_threads`."""
    return [_kernel_thread(child, child) for child in descendants(process)]


def _kernel_thread(process: int, number: int) -> dict[str, Any]:
    name, _, rest = _text(process, number, "stat").partition("(")[2].rpartition(")")
    call = _text(process, number, "syscall").split()
    return {
        "task": number,
        "name": name,
        "state": rest.split()[0] if rest.split() else "",
        "wchan": _text(process, number, "wchan").strip(),
        "syscall": int(call[0]) if call and call[0].lstrip("-").isdigit() else None,
    }


def _text(process: int, thread: int, name: str) -> str:
    try:
        with open(f"/proc/{process}/task/{thread}/{name}", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _stat(place: str) -> list[str]:
    """Fields of proc_pid_stat(5) behind the name, the state first. `place`: `/proc/PID`, or a thread's `task/TID` in
    it, as below."""
    try:
        with open(f"{place}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode().split()
    except (OSError, ValueError):
        return []


def _cpu_seconds(place: str) -> float | None:
    fields = _stat(place)
    return sum(map(int, fields[11:13])) / TICKS_A_SECOND if len(fields) > 12 and fields[0] != "Z" else None


def _moved(place: str) -> Moved:
    try:
        with open(f"{place}/io", "rb") as file:
            fields = file.read().split()
        return Moved(*(int(fields[at]) for at in (1, 3, 9, 11)))  # rchar, wchar, read_bytes, write_bytes
    except (OSError, ValueError, IndexError):
        return Moved()


def _own_threads(process: int) -> tuple[float, Moved]:
    """CPU time in s and bytes of files of dsprof's own threads so far."""
    cpu, files = 0.0, Moved()
    try:
        threads = os.listdir(f"/proc/{process}/task")
    except OSError:
        return cpu, files
    for thread in threads[:MOST_SEARCHED]:
        place = f"/proc/{process}/task/{thread}"
        try:
            with open(f"{place}/comm") as file:
                own = file.read().startswith(OWN_THREADS)
        except OSError:
            continue
        if own:
            cpu += _cpu_seconds(place) or 0.0
            files += _moved(place)
    return cpu, files


def _children(process: int) -> list[int]:
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{process}/task")
    except OSError:
        return []
    for thread in threads:
        try:
            with open(f"/proc/{process}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
        except (OSError, ValueError):
            continue
    return found
