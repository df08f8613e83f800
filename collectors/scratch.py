"""Where a capture is written: into the run folder, or, where that lies on a network file system, to a local disk first.

A mapping of a file on a network can stall a rank or kill it. So the rank writes locally, and a process beside it
(`copier.py`) brings the capture into the run folder.
"""

from __future__ import annotations

import hashlib
import json
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

from dsprof.names import CaptureName
from dsprof.schema import COPYING_FILE

from . import copier

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


def stand_in(run: Path, parent: Path) -> Path:
    """The folder below `parent` that stands for the run folder `run`, of this user."""
    absolute = os.path.abspath(run)
    key = hashlib.sha256(os.fsencode(absolute)).hexdigest()[:12]
    return parent / f"dsprof-{os.getuid()}" / f"{Path(absolute).name}-{key}"


def absolute(given: str) -> str:
    """DSPROF_SCRATCH, for a process that may be in another folder when it reads it."""
    return os.path.abspath(given) if given and given.lower() not in OFF else given


def _unfit(parent: Path, type_of: Callable[[Path], str]) -> str:
    """Why no capture can be written there; empty: one can."""
    try:
        if on_network(type_of(parent)):
            return "is on a network file system too"
        mine = parent / f"dsprof-{os.getuid()}"
        mine.mkdir(parents=True, exist_ok=True, mode=0o700)
        if mine.stat().st_uid != os.getuid():
            return "has a folder of that name which belongs to somebody else"
        if not os.access(mine, os.W_OK):
            return "cannot be written"
        free = shutil.disk_usage(mine).free
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    return f"has {free >> 20} MiB free" if free < LEAST_FREE else ""


def start_copier(local: Path, run: Path, host: str) -> None:
    """Have the capture folder `local` of this process copied below `run`. Raises OSError or SubprocessError."""
    program = [sys.executable, "-I", "-S", "-c", COPIER.format(home=str(HOME)), str(local), str(run), host]
    subprocess.run(
        [*program, str(os.getpid())],
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
        (local / copier.CLOSED_FILE).touch()
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
    for path in folder.glob(f"capture/rank*/{COPYING_FILE}"):
        state = _state(path)
        if state is not None:
            yield path.parent.name, state


def _state(path: Path) -> copier.CopyState | None:
    """What a copier told there; None: nothing that can be read."""
    try:
        return copier.CopyState(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def bring(item: Waiting, run: Path) -> bool:
    """Copy what a copier of this host that is gone has left. Whether all of it is there now."""
    local = Path(item.state.local)
    if not local.is_dir():
        return False
    copying = copier.Copier(local, run, item.state.host)
    if copying.finish():
        return True
    copying.give_up()
    return False
