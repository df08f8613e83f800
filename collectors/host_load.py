"""What else the host is busy with: cores, disks, network, and what DataLoader workers are doing.

Looked at once a second, on a thread beside the training: the machine by its first rank, the process and its workers by
each (psutil). What a system does not tell is left out.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from dsprof import gauges
from dsprof.schema import Kind

from . import identity
from .beside import Beside, Looks, import_beside
from .collector import OpenCapture
from .uninstall import Uninstall

MOST_WORKERS: Final = 64
"""That are looked at."""

Reading = Iterable[tuple[str, float]]
"""Gauges with their values."""


def install(capture: OpenCapture) -> list[Uninstall]:
    """Look from now on."""
    first = identity.identify().local_rank in (0, None)
    beside = Beside("host-load", lambda: looks(capture, first, lambda: beside.stopping))
    beside.start()
    return [beside.stop]


def looks(capture: OpenCapture, first: bool, stopping: Callable[[], bool]) -> Looks:
    """first: of the ranks on this machine, so that it reads what the machine does."""
    psutil = import_beside("psutil")
    recorder = capture.recorder
    refused = (psutil.Error, OSError, NotImplementedError, AttributeError)
    readers = [functools.partial(read, psutil.Process()) for read in OF_PROCESS]
    readers += [functools.partial(read, psutil) for read in OF_MACHINE if first]
    readers.append(functools.partial(read_workers, "/proc"))
    if first:
        psutil.cpu_times_percent()  # what the next one says is since this one
    while readers:
        yield
        for reader in tuple(readers):
            try:
                found = [*reader()]
            except refused:
                readers.remove(reader)
                continue
            now = time.monotonic_ns()
            for name, value in found:
                if stopping():
                    return
                recorder.put(Kind.GAUGE, recorder.intern(name), now, now, float(value), -1)


# --- this process, a psutil.Process


def _memory(process: Any) -> Reading:
    yield gauges.RESIDENT, process.memory_info().rss


def _switches(process: Any) -> Reading:
    yield gauges.SWITCHED_OUT, process.num_ctx_switches().involuntary


def _files(process: Any) -> Reading:
    counters = process.io_counters()
    yield gauges.READ, counters.read_bytes
    yield gauges.WRITTEN, counters.write_bytes


OF_PROCESS: Final = (_memory, _switches, _files)


# --- the machine, psutil itself


def _cores(psutil: Any) -> Reading:
    cpu = psutil.cpu_times_percent()
    yield gauges.CPU_BUSY, 100 - cpu.idle - getattr(cpu, "iowait", 0.0)
    yield gauges.CPU_STOLEN, cpu.steal


def _available(psutil: Any) -> Reading:
    yield gauges.MEMORY_AVAILABLE, psutil.virtual_memory().available


def _disks(psutil: Any) -> Reading:
    disks = psutil.disk_io_counters()
    if disks is not None:  # a container has none
        yield gauges.DISK_READ, disks.read_bytes
        yield gauges.DISK_WRITTEN, disks.write_bytes


def _network(psutil: Any) -> Reading:
    cards = [card for name, card in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    yield gauges.NETWORK_SENT, sum(card.bytes_sent for card in cards)
    yield gauges.NETWORK_RECEIVED, sum(card.bytes_recv for card in cards)


OF_MACHINE: Final = (_cores, _available, _disks, _network)


# --- DataLoader workers


def read_workers(proc: str) -> Reading:
    """This process's children by `multiprocessing`, as the folder `proc` has them; nothing where there are none."""
    children = getattr(sys.modules.get("multiprocessing.process"), "_children", ())
    pids = sorted(child.pid for child in list(children) if child.pid is not None)[:MOST_WORKERS]
    states = dict(_states(proc, pids))
    if not states:
        return
    counted = Counter(states.values())
    yield gauges.WORKERS, len(states)
    yield gauges.WORKERS_BUSY, counted["R"]
    yield gauges.WORKERS_ON_DISK, counted["D"]
    places = Counter(_text(f"{proc}/{pid}/wchan").strip() for pid, state in states.items() if state == "D")
    for function, count in places.items():
        if function not in ("", "0"):  # not told
            yield gauges.WORKERS_IN + function, count


def _states(proc: str, pids: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Of those that have not ended, the state (proc(5)): R runs or wants to, D waits and cannot be interrupted."""
    for pid in pids:
        state = _text(f"{proc}/{pid}/stat").rpartition(")")[2].split()[:1]
        if state and state[0] not in "ZX":
            yield pid, state[0]


def _text(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read(1024)
    except OSError:  # it has ended, or is not ours to look at
        return ""
