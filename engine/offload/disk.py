"""Files that are read and written beside the computation: past the page cache where that is possible, on threads.

A file has no name: it is removed from its folder as soon as it is open, so that nothing stays behind however the job
ends. It takes room on the disk (`df` shows it) as long as it is open.
"""

from __future__ import annotations

import concurrent.futures
import errno
import itertools
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from ..comm.lane import CpuLane, LaneTicket
from ..config.zero import AioConfig
from ..hooks import Attributes, Hooks
from .buffers import PAGE, aligned, as_bytes, round_up


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
