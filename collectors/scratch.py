"""Where a capture is written: into the run folder, or, where that lies on a network file system, to a local disk first.

A mapping of a file on a network can stall a rank or kill it. So the rank writes locally, and a process beside it
(`copier.py`) brings the capture into the run folder.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsprof import permissions, regular_files
from dsprof.names import CaptureName
from dsprof.schema import COPYING_FILE

from . import copier
from .copier import stand_in

NETWORK: Final = frozenset(
    {
        "9p", "acfs", "afs", "beegfs", "beegfs_nodev", "ceph", "cifs", "coda", "fuse", "gfs2", "glusterfs", "gpfs",
        "lustre", "mmfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs",
    }
)  # fmt: skip
"""File systems that are not on a disk of this host, as /proc/mounts names them; also fuse.ANYTHING."""
LOCAL_ALL_THE_SAME: Final = frozenset({"fuse.fuse-overlayfs"})
"""Under containers without root."""
LEAST_FREE: Final = 256 << 20
"""Bytes that must be free for captures."""
HOSTS_PROCESSES: Final = 0xEFFFFFFC
"""Number of the first process namespace (PROC_PID_INIT_INO of Linux)."""
OFF: Final = ("0", "off", "false", "no")
START_S: Final = 10.0
LARGEST_STATE: Final = 1 << 16
"""Bytes of copying.json."""
HOME: Final = Path(__file__).parent.parent.parent
"""Where dsprof is imported from."""
COPIER: Final = """
import sys
sys.path.append({home!r})
from dsprof.collectors.copier import main
sys.exit(main(sys.argv[1:]))
"""
"""Without site-packages: it starts quickly, and nothing of the job's is run."""


@dataclass(frozen=True)
class Place:
    """folder: the local one that stands for the run folder; None: captures go into the run folder itself.
    note: what the user should know of it; empty: nothing."""

    folder: Path | None
    note: str = ""


def file_system(path: Path, mounts: str = "/proc/self/mountinfo") -> str:
    """The type of the file system that `path` is on, or will be when it is made; empty where that is not known."""
    try:
        with open(mounts, errors="surrogateescape") as file:
            points = [_mount(line) for line in file]
        # By its name first: to follow its links is to ask the file system, which may not answer.
        named = _holding(os.path.abspath(path), points)
        return named if on_network(named) else _holding(os.path.realpath(path), points)
    except (OSError, IndexError):
        return ""


def _mount(line: str) -> tuple[str, str]:
    """Where something is mounted, and its type (proc_pid_mountinfo(5))."""
    fields, _, rest = line.partition(" - ")
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), fields.split()[4]), rest.split()[0]


def _holding(path: str, points: list[tuple[str, str]]) -> str:
    best, found = -1, ""
    for point, kind in points:
        holds = point == "/" or path == point or path.startswith(point + "/")
        if holds and len(point) >= best:  # of two mounted there, the later one hides the other
            best, found = len(point), kind
    return found


def on_network(kind: str) -> bool:
    """Whether a file system of that type is one that may stall."""
    return kind not in LOCAL_ALL_THE_SAME and (kind in NETWORK or kind.startswith("fuse."))


def choose(run: Path, given: str = "", type_of: Callable[[Path], str] = file_system) -> Place:
    """Where the captures of the run folder `run` are written. `given`: DSPROF_SCRATCH."""
    if given.lower() in OFF:
        return Place(None)
    kind = type_of(run)
    if not given and not on_network(kind):
        return Place(None)
    reasons = []
    for parent in [Path(given)] if given else list(dict.fromkeys((Path(tempfile.gettempdir()), Path("/tmp")))):
        reason = _unfit(parent, type_of)
        if not reason:
            return Place(stand_in(run, parent))
        reasons.append(f"{parent} {reason}")
    where = f"on a network file system ({kind})" if on_network(kind) else "directly"
    return Place(
        None, f"captured into the run folder {where}: {', '.join(reasons)}; name a local folder by DSPROF_SCRATCH"
    )


def is_stand_in(local: Path, run: Path) -> bool:
    """Whether the path is one that a capture of this run may have on any host, of whichever user."""
    if len(local.parents) < 4 or CaptureName.of(local.name) is None:
        return False
    wanted = stand_in(run, local.parents[3])
    below = (local.parents[1].name, local.parent.name)
    return below == (wanted.name, "capture") and re.fullmatch(r"dsprof-\d+", local.parents[2].name) is not None


def make_private(local: Path) -> None:
    """Make the folder `local`, which stands for one of the run's captures, in this user's own. Raises OSError."""
    mine = permissions.own_folder(local.parents[3])
    for folder in (mine / local.parents[1].name, local.parent, local):
        permissions.make_folder(folder, mode=permissions.PRIVATE_FOLDER)


def absolute(given: str) -> str:
    """DSPROF_SCRATCH, for a process that may be in another folder when it reads it."""
    return os.path.abspath(given) if given and given.lower() not in OFF else given


def _unfit(parent: Path, type_of: Callable[[Path], str]) -> str:
    """Why no capture can be written there; empty: one can."""
    try:
        if on_network(type_of(parent)):
            return "is on a network file system too"
        mine = permissions.own_folder(parent)
        if not os.access(mine, os.W_OK):
            return "cannot be written"
        free = shutil.disk_usage(mine).free
    except OSError as error:
        if error.errno == errno.EPERM:
            return f"cannot be used: {permissions.own_name()} in it {error.strerror}"
        if error.errno == errno.ELOOP:
            return f"cannot be used: {permissions.own_name()} in it is {error.strerror}"
        return f"cannot be written ({error.strerror})"
    return f"has {free >> 20} MiB free" if free < LEAST_FREE else ""


def start_copier(local: Path, run: Path, host: str) -> None:
    """Have the capture folder `local` of this process copied below `run`. Raises OSError or SubprocessError."""
    program = [sys.executable, "-I", "-S", "-c", COPIER.format(home=str(HOME)), str(local), str(run), host]
    subprocess.run(
        [*program, str(os.getpid())],
        env={**os.environ, permissions.SHARED: "1" if permissions.is_shared() else "0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        timeout=START_S,
        check=True,
    )


def close(
    local: Path, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> None:
    """The capture is closed. In a container, whose processes all end with its first, wait until it is copied, or nobody
    copies it any more."""
    try:
        (local / copier.CLOSED_FILE).touch(mode=permissions.file_mode())
        if not _in_container():
            return
        deadline = clock() + copier.PATIENCE_S
        while local.exists() and not _is_left(local) and clock() < deadline:
            sleep(copier.LOOK_EVERY_S)
    except OSError:
        pass  # the copier sees the end of this process all the same


def _is_left(local: Path) -> bool:
    """Whether the copier of this capture, which told of itself before it was asked for anything, is gone."""
    state = _state(local / COPYING_FILE)
    return state is not None and copier.began(state.copier) != state.copier_began


def _in_container() -> bool:
    """Whether this process has a process namespace that is not the host's."""
    return os.readlink("/proc/self/ns/pid") != f"pid:[{HOSTS_PROCESSES}]"


# --- for the launcher ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Waiting:
    """A capture that is not all in its run folder: `name` under capture/, `state` as its copier told."""

    name: str
    state: copier.CopyState

    @property
    def rank(self) -> int:
        """-1: its name does not tell."""
        name = CaptureName.of(self.name)
        return -1 if name is None else name.rank

    def under_way(self, host: str) -> bool:
        """Whether somebody copies it still, as far as `host`, this one, can tell."""
        if self.state.given_up:
            return False
        here = self.state.host == host
        return not here or copier.began(self.state.copier) == self.state.copier_began is not None


def waiting(run: Path, scratch: Path | None) -> list[Waiting]:
    """The captures of the run that are not all in `run`, by what is told there and in this host's `scratch`."""
    found = {name: state for folder in (run, scratch) if folder for name, state in _states(folder)}
    return [Waiting(name, found[name]) for name in sorted(found)]


def _states(folder: Path) -> Iterator[tuple[str, copier.CopyState]]:
    for path in regular_files.folders(folder / "capture", "rank*"):
        state = _state(path / COPYING_FILE)
        if state is not None and CaptureName.of(path.name) is not None:
            yield path.name, state


def _state(path: Path) -> copier.CopyState | None:
    """What a copier told there; None: nothing that can be read."""
    try:
        return copier.CopyState.of(regular_files.read_json(path, LARGEST_STATE))
    except (OSError, ValueError, TypeError):
        return None


def bring(item: Waiting, run: Path, place: Path | None) -> bool:
    """Copy what a copier of this host that is gone has left in `place`, which stands for the run folder. Whether all of
    it is there now. A file in the run folder may name any other folder: none is touched."""
    if place is None or len(place.parents) < 2 or place != stand_in(run, place.parents[1]):
        return False
    if Path(item.state.local) != place / "capture" / item.name:
        return False
    try:
        copying = copier.Copier(place / "capture" / item.name, run, item.state.host)
    except OSError:  # not there any more, or not the user's own
        return False
    if copying.finish():
        return True
    copying.give_up()
    return False
