"""How long a store into a chunk takes while the disk is busy: in a file on a disk, and in one in memory (tmpfs).

    python benchmarks/stores.py                       # a minute; writes benchmarks/results/stores.json
    python benchmarks/stores.py --slow-disk 100MiB    # root: and on a disk that writes so much a second, of its own

One thread makes chunks as `collectors/recorder/chunks.py` does (space reserved, MAP_SHARED, MAP_POPULATE) in both
places, and in turns stores 64 bytes into the next page of the newest chunk ("new page") and 8 bytes into a page of one
of the last 40 chunks ("old page", as the end of a communication does), in each place. Beside it another process does
nothing ("quiet"), or writes a checkpoint of 4 GiB, syncs it, removes it and begins again ("checkpoint").

The slow disk is an ext4 in a file, through a loop device whose writes are limited in the cgroup (as those of a cloud's
disk are), and of which 256 MiB may be unwritten before the kernel holds back whoever dirties its pages, as a twentieth
to a fifth of the memory may of an ordinary disk. Nothing outside that device is changed.

A store that takes 5 ms or more is a stall. `blocked` are those in which the thread slept inside the store (its
voluntary context switches went up): it waited for the disk. In the others it was ready, and the machine ran something
else. `making a chunk` is what a thread of its own does in a capture.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from dsprof.collectors.recorder.chunks import CHUNK_BYTES  # noqa: E402
from dsprof.ranges import parse_size  # noqa: E402

STALL_NS: Final = 5_000_000
PAGE: Final = mmap.PAGESIZE
MAPPED: Final = 40
UNWRITTEN: Final = 256 << 20
THROTTLE: Final = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")
CHECKPOINT: Final = """
import os, sys
block = os.urandom(8 << 20)
while True:
    with open(sys.argv[1], "wb", buffering=0) as file:
        for _ in range(512):
            file.write(block)
        os.fsync(file.fileno())
    os.unlink(sys.argv[1])
"""


@dataclass
class Times:
    """Of one kind of store in one place, ns."""

    taken: list[int] = field(default_factory=list)
    blocked: list[int] = field(default_factory=list)
    """Those of at least STALL_NS in which the thread slept."""

    def measure(self, chunk: mmap.mmap, at: int, content: bytes) -> None:
        switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        began = time.perf_counter_ns()
        chunk[at : at + len(content)] = content
        took = time.perf_counter_ns() - began
        self.note(took, switches)

    def note(self, took: int, switches: int) -> None:
        self.taken.append(took)
        if took >= STALL_NS and resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw > switches:
            self.blocked.append(took)

    def summary(self) -> dict[str, Any]:
        ordered = sorted(self.taken)
        of = {"median": 0.5, "p99": 0.99, "p99.9": 0.999, "most": 1.0}
        stalls = [took for took in ordered if took >= STALL_NS]
        return {
            "stores": len(ordered),
            "us": {name: ordered[min(int(share * len(ordered)), len(ordered) - 1)] / 1e3 for name, share in of.items()},
            "stalls": len(stalls),
            "blocked": len(self.blocked),
            "longest_blocked_ms": max(self.blocked, default=0) / 1e6,
        }


class Place:
    """The chunks in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._chunks: list[mmap.mmap] = []
        self._number = 0
        self.times = {kind: Times() for kind in ("new page", "old page", "making a chunk")}

    def make(self) -> None:
        switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        began = time.perf_counter_ns()
        path = self._folder / f"chunk-{self._number:05d}.bin"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.posix_fallocate(file, 0, CHUNK_BYTES)
        self._chunks.append(mmap.mmap(file, CHUNK_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
        os.close(file)
        self.times["making a chunk"].note(time.perf_counter_ns() - began, switches)
        self._number += 1
        if len(self._chunks) > MAPPED:
            self._chunks.pop(0).close()
            os.unlink(self._folder / f"chunk-{self._number - MAPPED - 1:05d}.bin")

    def store(self, page: int, old: float, old_page: int) -> None:
        self.times["new page"].measure(self._chunks[-1], page * PAGE, b"r" * 64)
        chunk = self._chunks[int(old * len(self._chunks))]
        if chunk is not self._chunks[-1] or old_page <= page:
            self.times["old page"].measure(chunk, old_page * PAGE, b"e" * 8)


def measure(disk: Path, memory: Path, seconds: float) -> dict[str, Any]:
    """The times of stores in a folder on the disk and in one in memory, in turns."""
    places = {"disk": Place(disk), "memory": Place(memory)}
    pages, draw, until = CHUNK_BYTES // PAGE, random.Random(0), time.monotonic() + seconds
    count = 0
    while time.monotonic() < until:
        for place in places.values():
            if count % pages == 0:
                place.make()
        old, old_page = draw.random(), draw.randrange(pages)
        for place in places.values():
            place.store(count % pages, old, old_page)
        count += 1
        time.sleep(0.001)
    return {name: {kind: times.summary() for kind, times in place.times.items()} for name, place in places.items()}


@contextlib.contextmanager
def writing(folder: Path | None) -> Iterator[None]:
    """A process beside it that writes checkpoints into the folder; None: nothing."""
    if folder is None:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", CHECKPOINT, str(folder / "checkpoint")])
    try:
        yield
    finally:
        process.kill()
        process.wait()
        (folder / "checkpoint").unlink(missing_ok=True)


@contextlib.contextmanager
def slow_disk(folder: Path, bytes_a_second: int) -> Iterator[Path]:
    """A folder on a disk of its own that writes so much a second. Needs root, a loop device and cgroup v1."""
    image, mounted = folder / "disk.img", folder / "disk"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(6 << 30)
    device = _run("losetup", "--find", "--show", str(image))
    number = Path("/sys/block", Path(device).name, "dev").read_text().strip()
    unwritten = Path("/sys/class/bdi", number)
    try:
        _run("mkfs.ext4", "-q", device)
        _run("mount", device, str(mounted))
        THROTTLE.write_text(f"{number} {bytes_a_second}\n")
        (unwritten / "strict_limit").write_text("1")
        (unwritten / "max_bytes").write_text(str(UNWRITTEN))
        yield mounted
    finally:
        with contextlib.suppress(OSError):
            (unwritten / "strict_limit").write_text("0")
            (unwritten / "max_ratio").write_text("100")
            THROTTLE.write_text(f"{number} 0\n")
        subprocess.run(["umount", str(mounted)], check=False)
        _run("losetup", "--detach", device)


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def measured(disk: Path, memory: Path, seconds: float, prefix: str = "") -> dict[str, Any]:
    """Both arms."""
    found = {}
    for name, busy in ((f"{prefix}quiet", False), (f"{prefix}checkpoint", True)):
        with (
            tempfile.TemporaryDirectory(dir=disk) as on_disk,
            tempfile.TemporaryDirectory(dir=memory) as in_memory,
            writing(Path(on_disk) if busy else None),
        ):
            found[name] = measure(Path(on_disk), Path(in_memory), seconds)
        for place, kinds in found[name].items():
            for kind, times in kinds.items():
                print(f"{name:25} {place:7} {kind:15} {json.dumps(times)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each arm")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a folder on a tmpfs")
    parser.add_argument("--slow-disk", type=parse_size, help="bytes a second of a disk made for this (root)")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "stores.json")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was made is taken away
    arms = measured(given.disk, given.memory, given.seconds)
    if given.slow_disk:
        with (
            tempfile.TemporaryDirectory(dir=given.disk) as folder,
            slow_disk(Path(folder), given.slow_disk) as disk,
        ):
            arms |= measured(disk, given.memory, given.seconds, "slow disk, ")
    setting = {
        "disk": _run("stat", "-f", "-c", "%T", str(given.disk)),
        "memory": _run("stat", "-f", "-c", "%T", str(given.memory)),
        "slow_disk_bytes_a_second": given.slow_disk,
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * PAGE / 2**30, 1),
        "seconds": given.seconds,
    }
    given.output.write_text(json.dumps({"setting": setting, "arms": arms}, indent=1) + "\n")


if __name__ == "__main__":
    main()
