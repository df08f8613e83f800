"""Files that are read and written beside the computation: past the page cache where that is possible, on threads.

A file has no name: it is removed from its folder as soon as it is open, so that nothing stays behind however the job
ends. It takes room on the disk (`df` shows it) as long as it is open.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from ..comm.lane import CpuLane, LaneTicket
from ..config.zero import AioConfig
from ..hooks import Attributes, Hooks, MemoryPart, holds_memory

PAGE: Final = 4096
"""Bytes. No disk has larger logical blocks, which addresses, offsets and lengths must be multiples of."""


def round_up(nbytes: int, unit: int = PAGE) -> int:
    """The next multiple of `unit`."""
    return -(-nbytes // unit) * unit


def aligned(nbytes: int, pin: bool = False) -> Tensor:
    """Host memory [nbytes], uint8, that begins on a page and ends with one; page-locked with `pin`."""
    nbytes = round_up(nbytes)
    with torch.inference_mode(False):  # it is used again, by training
        memory = torch.empty(nbytes + PAGE, dtype=torch.uint8, pin_memory=pin)
    start = -memory.data_ptr() % PAGE
    return memory[start : start + nbytes]


def as_bytes(memory: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, as system calls take them. The tensor must stay alive meanwhile."""
    return memoryview((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())).cast("B")


class Buffer:
    """Memory of a pool."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.fence: torch.cuda.Event | None = None
        """After it the device reads this memory no longer."""

    def view(self, start: int, dtype: torch.dtype, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """A tensor in this memory, from byte `start`, which its element size must divide."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return self.memory[start : start + nbytes].view(dtype).view(shape)


class Pool:
    """At most `count` buffers, made when they are first needed, and made larger when that is asked for.

    `device` is where what passes through them is used; for a GPU they are page-locked, unless `pin` is false. `part` is
    what passes, for `hooks.memory_held`.
    """

    def __init__(self, part: MemoryPart, count: int, device: torch.device, pin: bool = True) -> None:
        self._part = part
        self._count = count
        self._device = device
        self._pin = pin and device.type == "cuda"
        self._made = 0
        self._free: list[Buffer] = []
        self._leaving: deque[tuple[Buffer, LaneTicket]] = deque()
        holds_memory(self)

    def take(self, nbytes: int, wait: bool = True) -> Buffer | None:
        """A buffer of at least `nbytes`, what is in it undefined; None if there is none now, or with `wait` none to
        wait for. Raises what a write from it raised.
        """
        needed = wait and not self._free and self._made == self._count
        if self._leaving and (needed or self._leaving[0][1].done):
            buffer, ticket = self._leaving.popleft()
            self._free.append(buffer)
            if needed:
                ticket.wait()
            else:
                ticket.check()
        if not self._free:
            if self._made == self._count:
                return None
            self._made += 1
            return Buffer(aligned(nbytes, self._pin))
        buffer = self._free.pop()
        if buffer.fence is not None:
            buffer.fence.synchronize()
            buffer.fence = None
        if buffer.memory.nbytes < nbytes:
            buffer.memory = aligned(0)  # frees the old before the new is there
            buffer.memory = aligned(nbytes, self._pin)
        return buffer

    def settle(self) -> None:
        """Wait for the writes under way. What they raise, who began them has from their tickets."""
        while self._leaving:
            buffer, ticket = self._leaving.popleft()
            with contextlib.suppress(Exception):
                ticket.wait()
            self._free.append(buffer)

    def sizes(self) -> tuple[tuple[int, bool], ...]:
        """None: it has buffers."""
        return ()

    def memory(self) -> Iterator[tuple[MemoryPart, Tensor]]:
        """The buffers that nobody has taken."""
        for buffer in (*self._free, *(leaving for leaving, _ in self._leaving)):
            yield self._part, buffer.memory

    def enlarge(self, buffer: Buffer, nbytes: int) -> None:
        """Make a buffer in use larger; what is in it stays. Views of the old memory are no longer part of it."""
        if buffer.memory.nbytes < nbytes:
            memory = aligned(nbytes, self._pin)
            memory[: buffer.memory.nbytes].copy_(buffer.memory)
            buffer.memory = memory

    def give(self, buffer: Buffer, after: LaneTicket | None = None) -> None:
        """Give a buffer back, free as soon as the write `after` is over, and copies to the device that have begun."""
        if self._device.type == "cuda":
            buffer.fence = torch.cuda.Event()
            buffer.fence.record()
        if after is None:
            self._free.append(buffer)
        else:
            self._leaving.append((buffer, after))


class OffloadError(RuntimeError):
    """A folder or disk that cannot take what is offloaded to it. The text says what to change."""


FIRST_NUMBER: Final = 1 << 40
"""Of a copy, the `corr` of its spans. A profiler of a device numbers what runs there from 1."""

_numbers: Final = itertools.count(FIRST_NUMBER)


class _Way:
    """Reads or writes, in the order in which they were asked for, on a lane and what helps it."""

    def __init__(self, direction: Literal["read", "write"], aio: AioConfig, hooks: Hooks) -> None:
        self._direction = direction
        self._call: Callable[[int, Sequence[memoryview], int], int] = os.preadv if direction == "read" else os.pwritev
        self._aio = aio
        self._lane = CpuLane(f"nvme-{direction}", hooks, kind="copy", lane=f"io.nvme.{direction}")
        self._helpers = concurrent.futures.ThreadPoolExecutor(aio.intra_op_parallelism, f"dsprof-{direction}")

    def submit(self, file: File, offset: int, memory: Tensor, about: Attributes) -> LaneTicket:
        """Begin one: see `File.read` and `File.write`."""

        def work() -> None:
            try:
                self._move(file.descriptor, as_bytes(memory), offset)
            except OSError as error:
                raise file.disk.explain(error, file.what, memory.nbytes) from error

        attributes: Attributes = {**about, "bytes": memory.nbytes, "corr": next(_numbers)}
        return self._lane.submit(work, self._direction, **attributes)

    def close(self) -> None:
        self._lane.close()
        self._helpers.shutdown()

    def _move(self, descriptor: int, memory: memoryview, offset: int) -> None:
        """Move all of `memory`, the threads a share of it each."""
        share = round_up(-(-len(memory) // self._aio.intra_op_parallelism))
        starts = range(0, len(memory), share)
        if len(starts) <= 1:
            self._move_share(descriptor, memory, offset)
            return
        list(self._helpers.map(lambda at: self._move_share(descriptor, memory[at : at + share], offset + at), starts))

    def _move_share(self, descriptor: int, memory: memoryview, offset: int) -> None:
        """`queue_depth` blocks a system call, which the kernel passes to the disk together."""
        block = round_up(self._aio.block_size)
        depth = min(self._aio.queue_depth, os.sysconf("SC_IOV_MAX"))
        at = 0
        while at < len(memory):
            stop = min(at + block * depth, len(memory))
            blocks = [memory[place : min(place + block, stop)] for place in range(at, stop, block)]
            moved = self._call(descriptor, blocks, offset + at)
            if moved == 0:
                raise OSError(errno.EIO, "the file ends early")
            at += moved


class Disk:
    """Files in one folder, and two lanes: one reads, one writes.

    `key` is the configuration's name for the folder, for errors. Raises OffloadError if no file can be made there.
    """

    def __init__(self, folder: Path, aio: AioConfig, hooks: Hooks, *, rank: int = 0, key: str = "nvme_path") -> None:
        self.folder = folder
        self.key = key
        self.note = ""
        """Why files are read and written through the page cache, if they are."""
        self._rank = rank
        self._files: list[File] = []
        self._probe()
        self.reads, self.writes = _Way("read", aio, hooks), _Way("write", aio, hooks)

    def open(self, what: str) -> File:
        """An empty file for `what`, which errors name. Raises OffloadError."""
        file = File(self, what, *self._open(what))
        self._files.append(file)
        return file

    def close(self) -> None:
        """Finish what is under way, and free the room that the files take."""
        self.reads.close()
        self.writes.close()
        for file in self._files:
            file.close()

    def explain(self, error: OSError, what: str, nbytes: int = 0) -> OffloadError:
        """The error for the user while `what` was to take `nbytes` more."""
        where, code = f"{self.key}: {self.folder}", error.errno
        if code in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(self.folder).free
            text = (
                f"{where} is full: {what} needs {_size(nbytes)} more on rank {self._rank}, and {_size(free)} are "
                "free. Make room, or write a folder on a larger disk"
            )
        elif code == errno.EFBIG:
            text = f"{where}: {what} needs a file of {_size(nbytes)}, which is above the limit: raise it (`ulimit -f`)"
        elif code == errno.ENOENT:
            text = f"{where} does not exist: make it on every machine, or write another folder"
        elif code == errno.ENOTDIR:
            text = f"{where} is not a folder: write one on the local disk"
        elif code in (errno.EACCES, errno.EPERM, errno.EROFS):
            text = f"{where} cannot be written to ({error.strerror}): write a folder that this user may write to"
        else:
            text = f"{where}: {what}: {error.strerror or error}"
        return OffloadError(text)

    def _probe(self) -> None:
        """Write a page and read it, as everything is going to be."""
        plain, direct = self._open("a first page")
        try:
            if direct is None:
                self.note = f"{self.folder} has no O_DIRECT"
                return
            memory = aligned(PAGE)  # alive for as long as its bytes are read and written
            page = as_bytes(memory)
            os.pwritev(direct, [page], 0)
            os.preadv(direct, [page], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise self.explain(error, "a first page", PAGE) from error
            self.note = f"{self.folder} refuses pages with O_DIRECT"
        finally:
            _close(plain, direct)

    def _open(self, what: str) -> tuple[int, int | None]:
        """Descriptors of a new file, through the page cache and past it, if that is possible."""
        try:
            plain, name = tempfile.mkstemp(prefix=f"dsprof-rank{self._rank:05d}-", dir=self.folder)
        except OSError as error:
            raise self.explain(error, what) from error
        try:
            direct = None if self.note else os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            direct = None
        finally:
            os.unlink(name)
        return plain, direct


class File:
    """A file of a disk: parts of it are allocated, read and written. Offsets and lengths are whole pages."""

    def __init__(self, disk: Disk, what: str, plain: int, direct: int | None) -> None:
        self.disk = disk
        self.what = what
        self._descriptors = plain, direct
        self.descriptor = plain if direct is None else direct
        self.size = 0
        """Bytes allocated."""
        self.close = weakref.finalize(self, _close, plain, direct)
        """Frees the room it takes."""

    def allocate(self, nbytes: int) -> int:
        """Room for `nbytes`, rounded up to whole pages, that nobody can take away any more; where it begins.

        It reads as zeros. Raises OffloadError if the disk is full.
        """
        offset, nbytes = self.size, round_up(nbytes)
        if nbytes:
            try:
                os.posix_fallocate(self._descriptors[0], offset, nbytes)
            except OSError as error:
                whole = offset + nbytes if error.errno == errno.EFBIG else nbytes
                raise self.disk.explain(error, self.what, whole) from error
        self.size += nbytes
        return offset

    def read(self, offset: int, memory: Tensor, about: Attributes) -> LaneTicket:
        """Begin to read to `memory`: whole, aligned pages (`buffers.aligned`), not to be touched before the end."""
        return self.disk.reads.submit(self, offset, memory, about)

    def write(self, offset: int, memory: Tensor, about: Attributes) -> LaneTicket:
        """Begin to write `memory`: whole, aligned pages, not to be changed before the end."""
        return self.disk.writes.submit(self, offset, memory, about)

    def mapped(self) -> Tensor:
        """All that is allocated, uint8, as memory that the system keeps in the file and can take back at any time.

        Nothing may be read or written meanwhile. What is changed there is in the file after `sync`.
        """
        if not self.size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mmap.mmap(self._descriptors[0], self.size), dtype=torch.uint8)

    def sync(self) -> None:
        """Have in the file what was changed in memory that is mapped to it. Raises OffloadError."""
        try:
            os.fdatasync(self._descriptors[0])
        except OSError as error:
            raise self.disk.explain(error, self.what) from error


def _close(*descriptors: int | None) -> None:
    for descriptor in descriptors:
        if descriptor is not None:
            os.close(descriptor)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
