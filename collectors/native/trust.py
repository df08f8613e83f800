"""Whether a file may be loaded into the job: nobody but the user and root can have put it there, or can change it.

A shared library runs with all that the job may do, so what ssh asks of its keys is asked here of the file, of every
folder above it, and of every symbolic link on the way.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

ROOT: Final = 0
MOST_LINKS: Final = 40
"""On the way to one file, as Linux has it."""
WRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH
"""By the group, or by others. An access control list that lets somebody write shows in the group's bits, too."""

Lstat = Callable[[Path], os.stat_result]


class Untrusted(Exception):
    """The message says which file or folder somebody else could change, and what to do."""


def trusted(path: Path, user: int | None = None, lstat: Lstat = os.lstat) -> Path:
    """Where `path` leads to, without symbolic links: what is to be opened is this, as links may change.

    user: who is going to load it, else the user of this process
    Raises Untrusted where others than that user and root could change it, OSError where it is not there.
    """
    owners = (ROOT, os.geteuid() if user is None else user)
    left, reached, links = list(reversed(Path(os.path.abspath(path)).parts[1:])), Path("/"), 0
    _check(reached, lstat(reached), owners)
    while left:
        part = left.pop()
        if part in ("", "."):
            continue
        if part == "..":  # of a link's target: where it leads to was checked on the way there
            reached = reached.parent
            continue
        entry = reached / part
        status = lstat(entry)
        _check(entry, status, owners)
        if not stat.S_ISLNK(status.st_mode):
            reached = entry
            continue
        links += 1
        if links > MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
        target = os.readlink(entry)
        left += reversed(target.split("/"))
        if target.startswith("/"):
            reached = Path("/")
    return reached


def _check(entry: Path, status: os.stat_result, owners: tuple[int, int]) -> None:
    """Raises Untrusted where others than the owners may change this file, folder or link."""
    if status.st_uid not in owners:
        raise Untrusted(
            f"{entry} belongs to {_user(status.st_uid)}, who could change what is loaded into the job; use a folder of"
            " your own (set DSPROF_CACHE, or `dsprof build -o` and DSPROF_NATIVE_PATH)"
        )
    if stat.S_ISLNK(status.st_mode):  # has no permissions of its own
        return
    # In a folder such as /tmp only its owner may rename or remove an entry, and who owns that is asked of each.
    shared = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & WRITABLE and not shared:
        who = "everybody" if status.st_mode & stat.S_IWOTH else "its group"
        raise Untrusted(
            f"{who} may write to {entry}, and so could change what is loaded into the job; type `chmod go-w {entry}`"
        )


def _user(number: int) -> str:
    try:
        return f"the user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"the user number {number}"
