"""Reading a folder that somebody else may have made: only plain files of a bounded size, and no link is followed.

A run folder may come by mail, from a shared disk, or out of an archive. So whoever reads one opens its files here.
Nothing waits (a pipe would), no device is opened, and nothing outside the folder is read because a link in it says so.
All that is refused is an OSError whose `strerror` says why. Standard library only.
"""

from __future__ import annotations

import errno
import fnmatch
import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

from .permissions import LINK

LARGEST_JSON: Final = 128 << 20
"""Bytes of a JSON file that is read. run.json of four thousand ranks has some 40 MB."""
LARGEST_TEXT: Final = 16 << 20
KINDS: Final = (
    (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISBLK, "a device"),
    (stat.S_ISCHR, "a device"),
)  # fmt: skip
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_LIST: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_file(path: Path, most: int | None = None) -> BinaryIO:
    """The file at `path`, to be read. Raises OSError where it is a link, no plain file, or larger than `most` bytes."""
    _check(path, path.lstat(), most)  # before it is opened: to open a device may already do something
    try:
        descriptor = os.open(path, _READ)
    except OSError as error:
        raise OSError(errno.ELOOP, LINK, str(path)) if error.errno == errno.ELOOP else error from None
    file = open(descriptor, "rb")  # noqa: SIM115
    try:
        _check(path, os.fstat(descriptor), most)
    except OSError:
        file.close()
        raise
    return file


def _check(path: Path, status: os.stat_result, most: int | None) -> None:
    refused = why_not(status)
    if refused:
        raise OSError(errno.ELOOP if refused == LINK else errno.EINVAL, refused, str(path))
    if most is not None and status.st_size > most:
        raise OSError(errno.EFBIG, f"{status.st_size:,} bytes, more than the {most:,} that are read", str(path))


def why_not(status: os.stat_result) -> str:
    """Why what has this `lstat` is not read, in words; empty: it is a plain file."""
    if stat.S_ISLNK(status.st_mode):
        return LINK
    return next((f"{name}, and no file" for is_kind, name in KINDS if is_kind(status.st_mode)), "")


def is_file(path: Path) -> bool:
    """Whether a plain file is there, and no link to one."""
    with suppress(OSError):
        return not why_not(path.lstat())
    return False


def is_folder(path: Path) -> bool:
    """Whether a folder is there, and no link to one."""
    with suppress(OSError):
        return stat.S_ISDIR(path.lstat().st_mode)
    return False


def read_bytes(path: Path, most: int = LARGEST_JSON) -> bytes:
    """All of the file. Raises OSError."""
    with open_file(path, most) as file:
        return file.read()


def read_text(path: Path, most: int = LARGEST_TEXT) -> str:
    """All of the file; what is no UTF-8 is replaced. Raises OSError."""
    return read_bytes(path, most).decode("utf-8", "replace")


def read_json(path: Path, most: int = LARGEST_JSON) -> Any:
    """What the file says. Raises OSError or ValueError."""
    return parse_json(read_bytes(path, most))


def parse_json(text: str | bytes) -> Any:
    """As `json.loads`, but whatever is wrong with it is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists or objects lie in each other too deep") from None


def entries(folder: Path, pattern: str = "*") -> Iterator[os.DirEntry[str]]:
    """What lies in the folder under such names, in no order; nothing where it is no folder, or a link to one."""
    try:
        descriptor = os.open(folder, _LIST)
    except OSError:
        return
    try:
        with os.scandir(descriptor) as found:
            yield from (entry for entry in found if fnmatch.fnmatchcase(entry.name, pattern))
    except OSError:
        return
    finally:
        os.close(descriptor)


def files(folder: Path, pattern: str = "*") -> list[Path]:
    """The plain files in the folder that have such names, by name; no links."""
    return sorted(folder / entry.name for entry in entries(folder, pattern) if entry.is_file(follow_symlinks=False))


def folders(folder: Path, pattern: str = "*") -> list[Path]:
    """The folders right below the folder that have such names, by name; no links."""
    return sorted(folder / entry.name for entry in entries(folder, pattern) if entry.is_dir(follow_symlinks=False))
