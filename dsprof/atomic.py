"""Files that are there whole or not at all. Standard library only, for whoever writes one: ranks, launcher, reports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from . import permissions


@contextmanager
def replacing(path: Path, *, mode: int | None = None) -> Iterator[Path]:
    """Another file beside `path` to be written, which takes its place when all went well and is removed when not.

    It is there already, empty and with the mode that it shall have (`permissions`), and is no link.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        os.close(permissions.create(temporary, mode=mode))
    except FileExistsError:  # of a process of this number that was killed
        temporary.unlink()
        os.close(permissions.create(temporary, mode=mode))
    try:
        yield temporary
        _settle(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _settle(temporary: Path, mode: int | None) -> None:
    """Who writes may have put another file in its place (torch.profiler does)."""
    file = os.open(temporary, os.O_RDONLY | permissions.NO_LINK)
    try:
        permissions.set_mode(file, mode)
    finally:
        os.close(file)


def write_atomically(path: Path, data: str | bytes, *, mode: int | None = None) -> None:
    """Replace `path` in one step: a reader sees the old content or the new, never a part. Raises OSError."""
    with replacing(path, mode=mode) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
