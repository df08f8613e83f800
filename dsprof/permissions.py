"""Who may read and write what dsprof makes: this module decides it for all of dsprof.

A folder is for its user alone (0700), and so is a file (0600), whatever the umask says. With DSPROF_SHARED=1 the user's
group may read them, too (0750 and 0640). Standard library only: ranks, copiers, the launcher and reports use it.

A file is created with its mode. What the umask takes away is given back through the file's own descriptor, so there is
no moment at which others may read more than they shall.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

SHARED: Final = "DSPROF_SHARED"
ON: Final = ("1", "true", "yes", "on")
PRIVATE_FILE: Final = 0o600
PRIVATE_FOLDER: Final = 0o700
SHARED_FILE: Final = 0o640
SHARED_FOLDER: Final = 0o750
OTHERS_WRITE: Final = 0o022
"""Bits of a mode that let somebody else than the owner write."""
NO_LINK: Final = os.O_NOFOLLOW | os.O_CLOEXEC
LINK: Final = "a symbolic link, which dsprof does not follow"

_remembered = ""


def remember(setting: str) -> None:
    """Keep DSPROF_SHARED as it is when a process is armed: a script may clean its environment."""
    global _remembered
    _remembered = setting


def is_shared() -> bool:
    """Whether the user's group may read what is written."""
    return (_remembered or os.environ.get(SHARED, "")).strip().lower() in ON


def file_mode() -> int:
    return SHARED_FILE if is_shared() else PRIVATE_FILE


def folder_mode() -> int:
    return SHARED_FOLDER if is_shared() else PRIVATE_FOLDER


# --- files ----------------------------------------------------------------------------------------


def create(path: str | os.PathLike[str], flags: int = os.O_WRONLY, *, mode: int | None = None,
           dir_fd: int | None = None) -> int:  # fmt: skip
    """A descriptor of a new file. Raises OSError, FileExistsError where something of that name is there, a link too."""
    wanted = file_mode() if mode is None else mode
    file = os.open(path, flags | os.O_CREAT | os.O_EXCL | NO_LINK, wanted, dir_fd=dir_fd)
    set_mode(file, wanted)
    return file


def open_to_append(path: str | os.PathLike[str], *, dir_fd: int | None = None) -> int:
    """A descriptor that writes behind the end of a file, which is made where there is none. Raises OSError where it is
    anything but a file with one name: a link, a pipe, a device."""
    with suppress(FileExistsError):
        return create(path, os.O_WRONLY | os.O_APPEND, dir_fd=dir_fd)
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | NO_LINK, dir_fd=dir_fd)
    except OSError as error:
        raise OSError(errno.ELOOP, LINK, os.fspath(path)) if error.errno == errno.ELOOP else error from None
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(file)
        what = "no file" if status.st_nlink == 1 else "a file that has another name elsewhere (a hard link)"
        raise OSError(errno.EINVAL, f"{what}, so dsprof does not write to it", os.fspath(path))
    return file


def set_mode(file: int, wanted: int | None = None) -> None:
    """Give an open file the mode that it shall have, where the umask or who wrote it made it another."""
    wanted = file_mode() if wanted is None else wanted
    if stat.S_IMODE(os.fstat(file).st_mode) != wanted:
        with suppress(OSError):  # a file system without modes
            os.fchmod(file, wanted)


# --- folders --------------------------------------------------------------------------------------


def make_folder(path: Path, *, parents: bool = False, exist_ok: bool = True, mode: int | None = None) -> None:
    """Make a folder, whose parents are made as any program makes them. One that is there stays as it is, but it has to
    be a folder: a link to one is none. Raises OSError, FileExistsError without `exist_ok`."""
    wanted = folder_mode() if mode is None else mode
    try:
        path.mkdir(mode=wanted)
    except FileNotFoundError:
        if not parents or path.parent == path:
            raise
        path.parent.mkdir(parents=True, exist_ok=True)
        make_folder(path, exist_ok=exist_ok, mode=mode)
    except FileExistsError:
        if not exist_ok:
            raise
        check_folder(path)
    else:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | NO_LINK)
        try:
            set_mode(folder, wanted)
        finally:
            os.close(folder)


def make_named_folder(path: Path, *, mode: int | None = None) -> None:
    """Make a folder that somebody named: it may be a link to one. Raises OSError."""
    if not path.is_dir():
        make_folder(path, parents=True, mode=mode)


def check_folder(path: Path) -> None:
    """Raises OSError where it is no folder; a link to one is none."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, LINK, str(path))
    if not stat.S_ISDIR(status.st_mode):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def own_name() -> str:
    """The name of this user's folder below a temporary folder."""
    return f"dsprof-{os.getuid()}"


def own_folder(parent: Path) -> Path:
    """This user's folder below a temporary one, made where there is none. Raises OSError where it is not the user's
    alone to write: in a folder for everybody, anybody may make one of that name, or a link."""
    path = parent / own_name()
    make_folder(path, parents=True, mode=PRIVATE_FOLDER)
    check_own(path)
    return path


def check_own(folder: Path, *below: str) -> None:
    """Raises OSError unless `folder`, what is `below` it, and so on are folders of this user to which nobody else may
    write. Each is opened from the one above it, and no link is followed."""
    flags = os.O_RDONLY | os.O_DIRECTORY | NO_LINK
    opened: list[int] = []
    path = folder
    try:
        for name in ("", *below):
            path = path / name
            try:
                opened.append(os.open(name, flags, dir_fd=opened[-1]) if opened else os.open(path, flags))
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
                    raise OSError(errno.ELOOP, LINK, str(path)) from None
                raise
            _check_owner(os.fstat(opened[-1]), path)
    finally:
        for one in opened:
            os.close(one)


def _check_owner(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "belongs to somebody else", str(path))
    if status.st_mode & OTHERS_WRITE:
        raise PermissionError(errno.EPERM, f"can be written by others (chmod go-w {path})", str(path))


def make_folders(top: Path, names: Sequence[str], *, mode: int | None = None) -> Path:
    """Folders below each other, `top` the first, which may be a link, as somebody named it; the last one."""
    path = top
    make_named_folder(path, mode=mode)
    for name in names:
        path = path / name
        make_folder(path, mode=mode)
    return path
