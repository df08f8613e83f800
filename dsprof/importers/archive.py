"""The files of a tar archive, plain or gzipped, unpacked so that nothing in it can do harm.

Only regular files are taken, each under a folder of its own and a plain name, so that no name, link or device of the
archive matters. What it unpacks to is bounded by what it is, and by what the disk has left; what no format knows is not
kept.
"""

from __future__ import annotations

import re
import shutil
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final, cast

from dsprof.run import RunError

SUFFIXES: Final = (".tar", ".tar.gz", ".tgz")
GZIP: Final = b"\x1f\x8b"
BLOCK: Final = 1 << 20
READ: Final = 1 << 14
HEADERS: Final = 1 << 20
"""Bytes that what stands before a file may take: its names and times."""
MOST_FILES: Final = 100_000
MOST_RATIO: Final = 200
RATIO_FROM: Final = 64 << 20
"""So many times as large as it is a gzipped archive may become, unless it becomes no larger than this."""
SPARE: Final = 64 << 20
"""Bytes of the disk that are left free."""
PLAIN: Final = re.compile(r"[^A-Za-z0-9_.=-]+")
MOST_NAMED: Final = 3


def is_archive(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES)


class _Refused(Exception):
    """What is wrong with an archive, and what to do."""


class _Limited:
    """The archive's bytes, unpacked as they are read. More than `allowed` are refused: tarfile holds a header as a
    whole, whatever size it claims."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._gzipped = file.read(2) == GZIP
        file.seek(0)
        self._inflate, self._left = zlib.decompressobj(31), b""
        self._taken = self._given = 0
        self.allowed = HEADERS

    def read(self, size: int) -> bytes:
        data = self._inflated(size) if self._gzipped else self._file.read(size)
        self.allowed -= len(data)
        if self.allowed < 0:
            raise _Refused("the description of a file in it is too large; pack it again with tar")
        return data

    def _inflated(self, size: int) -> bytes:
        parts, wanted = list[bytes](), size
        while wanted:
            if not self._left:
                if self._inflate.eof:
                    self._inflate = zlib.decompressobj(31)
                self._left = self._file.read(READ)
                self._taken += len(self._left)
                if not self._left:
                    break
            part = self._inflate.decompress(self._left, wanted)
            self._left = self._inflate.unused_data.lstrip(b"\0") if self._inflate.eof else self._inflate.unconsumed_tail
            if self._left and self._inflate.eof:
                self._inflate = zlib.decompressobj(31)
            parts.append(part)
            wanted -= len(part)
            self._given += len(part)
            if self._given > max(RATIO_FROM, MOST_RATIO * self._taken):
                raise _Refused(f"becomes more than {MOST_RATIO} times as large as it is, as no archive of traces does")
        return b"".join(parts)


def unpack(path: Path, room: Path, wanted: Callable[[Path], bool]) -> tuple[list[Path], list[str]]:
    """Files of the archive that are `wanted`, each in a folder below `room` that has the name of its folder there; and
    what is to be said of the archive. Raises RunError."""
    found, left_out, notes = list[Path](), list[str](), list[str]()
    try:
        with path.open("rb") as file:
            source = _Limited(file)
            try:
                with tarfile.open(fileobj=cast(BinaryIO, source), mode="r|") as tar:
                    for number in range(MOST_FILES + 1):
                        source.allowed = HEADERS
                        info = tar.next()
                        if info is None:
                            break
                        if number == MOST_FILES:
                            raise _Refused(f"holds more than {MOST_FILES:,} files; pack the traces alone")
                        source.allowed = info.size + HEADERS if info.size >= 0 else HEADERS
                        if not info.isreg() or info.issparse():
                            if not info.isdir():
                                left_out.append(info.name)
                            vars(tar)["members"] = []  # it would hold all of them
                            continue
                        target = _extracted(tar, info, room / f"{number:06d}", source)
                        if wanted(target):
                            found.append(target)
                        else:
                            target.unlink()
                        vars(tar)["members"] = []  # it would hold all of them
            except (tarfile.TarError, zlib.error, EOFError, ValueError, OverflowError, RecursionError) as error:
                if not found:
                    raise RunError(
                        f"{path}: no tar archive that can be read ({error}); pack it again with tar"
                    ) from error
                notes.append(f"{path.name[:200]} breaks off or is damaged: what follows in it is missing")
    except _Refused as error:
        raise RunError(f"{path}: {error}") from error
    except OSError as error:
        raise RunError(f"{path}: cannot be unpacked in {room.parent} ({error.strerror}); set TMPDIR") from error
    if left_out:
        named = ", ".join(PLAIN.sub("_", name)[:80] for name in left_out[:MOST_NAMED])
        notes.append(f"{path.name[:200]}: {len(left_out):,} of its entries are links or no files, left out ({named})")
    return found, notes


def _extracted(tar: tarfile.TarFile, info: tarfile.TarInfo, place: Path, source: _Limited) -> Path:
    free = shutil.disk_usage(place.parent).free
    if info.size + SPARE > free:
        raise _Refused(
            f"to unpack it takes {info.size >> 20:,} MiB more, and {place.parent.parent} has {free >> 20:,} MiB left; "
            "set TMPDIR to a larger disk"
        )
    parts = [PLAIN.sub("_", part).lstrip(".")[-150:] for part in info.name.replace("\\", "/").split("/") if part]
    folder, name = (["", *parts])[-2:] if parts else ("", "")
    target = place / (folder or "archive") / (name or "file")
    target.parent.mkdir(parents=True)
    content = tar.extractfile(info)
    with target.open("xb") as file:
        while content is not None and (block := content.read(BLOCK)):
            file.write(block)
    return target
