"""What else the host is busy with: cores, disks, network, and what DataLoader workers are doing.

Looked at on a thread beside the training: the process and its workers once a second by each rank, the machine every two
seconds by its first rank (psutil). What a system does not tell is left out. With the training's data in the caches a
reading of psutil takes 0.1 to 0.25 ms, several times what the file takes that it reads: the process's own
are read here.
"""

from __future__ import annotations

import functools
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from dsprof import gauges
from dsprof.schema import Kind

from ..capture import identity
from ..capture.open_capture import OpenCapture
from ..capture.side_thread import Poller, SideThread, import_on_side_thread
from ..hooking.uninstall import Uninstall
from ..system import proc
from ..system.clock import now_ns
from . import hindrances, machine_pace

MOST_WORKERS: Final = 64
"""That are looked at."""
MACHINE_EVERY: Final = 2
"""Of so many looks one is at the machine, too."""

Reading = Iterable[tuple[str, float]]
"""Gauges with their values."""


def install(capture: OpenCapture) -> list[Uninstall]:
    """Look from now on."""
    first = identity.identify().local_rank in (0, None)
    beside = SideThread("host-load", lambda: looks(capture, first, lambda: beside.stopping))
    beside.start()
    return [beside.stop]


def looks(capture: OpenCapture, first: bool, stopping: Callable[[], bool], root: str = proc.PROC) -> Poller:
    """first: of the ranks on this machine, so that it reads what the machine does."""
    recorder = capture.recorder
    hindrances.state_limit(root)
    machine_pace.state_machine(root)
    refused: tuple[type[Exception], ...] = (OSError, NotImplementedError, AttributeError, LookupError, ValueError)
    # Each with how many looks there are to one reading.
    readers = [(functools.partial(read, root), 1) for read in OF_PROCESS]
    if first:
        psutil = import_on_side_thread("psutil")
        refused = (*refused, psutil.Error)
        readers += [(functools.partial(read, psutil), MACHINE_EVERY) for read in OF_MACHINE]
        psutil.cpu_times_percent()  # what the next one says is since this one
    number = 0
    while readers:
        yield
        number += 1
        for reader in tuple(readers):
            read, every = reader
            if number % every:
                continue
            try:
                found = [*read()]
            except refused:
                readers.remove(reader)
                continue
            now = now_ns()
            for name, value in found:
                if stopping():
                    return
                recorder.put(Kind.GAUGE, recorder.intern(name), now, now, float(value), -1)


# --- this process, by the folder /proc


def _memory(root: str) -> Reading:
    yield gauges.RESIDENT, int(proc.read(f"{root}/self/statm").split()[1]) * proc.PAGE


def _switches(_: str) -> Reading:
    yield gauges.SWITCHED_OUT, resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _files(root: str) -> Reading:
    counters = dict(line.split(": ") for line in proc.read(f"{root}/self/io").decode().splitlines())
    yield gauges.READ, int(counters["read_bytes"])
    yield gauges.WRITTEN, int(counters["write_bytes"])


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


def read_workers(root: str) -> Reading:
    """This process's children by `multiprocessing`, as the folder `root` has them; nothing where there are none."""
    children = getattr(sys.modules.get("multiprocessing.process"), "_children", ())
    pids = sorted(child.pid for child in list(children) if child.pid is not None)[:MOST_WORKERS]
    states = dict(_states(root, pids))
    if not states:
        return
    counted = Counter(states.values())
    yield gauges.WORKERS, len(states)
    yield gauges.WORKERS_BUSY, counted["R"]
    yield gauges.WORKERS_ON_DISK, counted["D"]
    stuck = [pid for pid, state in states.items() if state == "D"]
    places = Counter(proc.read(f"{root}/{pid}/wchan").decode(errors="replace").strip() for pid in stuck)
    for function, count in places.items():
        if function not in ("", "0"):  # not told
            yield gauges.WORKERS_IN + function, count


def _states(root: str, pids: Iterable[int]) -> Iterator[tuple[int, str]]:
    """The state of those that have not ended (`proc.STATE`)."""
    for pid in pids:
        fields = proc.stat(pid, root)
        if fields and fields[proc.STATE] not in (b"Z", b"X"):
            yield pid, fields[proc.STATE].decode()


OF_PROCESS: Final = (_memory, _switches, _files, read_workers, *hindrances.READERS, *machine_pace.READERS)
