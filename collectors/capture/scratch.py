"""Where a capture is written: into the run folder, to a local disk first, or to shared memory first.

A mapping of a file on a network can stall a rank or kill it; of one on a local disk, a store waits while the kernel
holds back whoever dirties pages (`benchmarks/stores.py`). So the rank writes to a local disk, or to memory where that
survives it, and a process beside it (`copier.py`) brings the capture into the run folder.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsprof import permissions, regular_files
from dsprof.names import CaptureName
from dsprof.ranges import DEFAULT_LIMIT
from dsprof.schema import COPYING_FILE

from . import copier, free_space
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
LEAST_LIMIT: Final = 4 << 20
"""Bytes that a rank's capture must have."""
SHARED_MEMORY: Final = Path("/dev/shm")
OPEN_EVERY_S: Final = 10.0
"""How often what is written to memory is copied while it is still written: a report of a running job has it."""
OFF: Final = ("0", "off", "false", "no")
START_S: Final = 10.0
LARGEST_STATE: Final = 1 << 16
"""Bytes of copying.json."""
LOOK_EVERY_S: Final = 0.02
BRING_TRIES: Final = 200
"""To hold a capture alone, in 2 s: a killed rank holds it until its last thread has ended."""
HOME: Final = Path(__file__).parent.parent.parent.parent
"""Where dsprof is imported from."""
COPIER: Final = """
import sys
sys.path.append({home!r})
from dsprof.collectors.capture.copier import main
sys.exit(main(sys.argv[1:]))
"""
"""Without site-packages: it starts quickly, and nothing of the job's is run."""


@dataclass(frozen=True)
class Place:
    """folder: the local one that stands for the run folder; None: captures go into the run folder itself.
    note: what the user should know of it; empty: nothing.
    limit: bytes that each rank may write there, where that is less than it was to; None: as many.
    in_memory: it was chosen so that no store waits for a disk."""

    folder: Path | None
    note: str = ""
    limit: int | None = None
    in_memory: bool = False


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


def choose(
    run: Path,
    given: str = "",
    limit: int = DEFAULT_LIMIT,
    ranks: int = 1,
    type_of: Callable[[Path], str] = file_system,
    free_bytes: Callable[[Path, str], int] = free_space.free_bytes,
) -> Place:
    """Where the captures of the run folder `run` are written, of `limit` bytes each by so many ranks of this host.
    `given`: DSPROF_SCRATCH."""
    if given.lower() in OFF:
        return Place(None)
    kind = type_of(run)
    if not given and not on_network(kind):
        return _in_memory(run, kind, limit * ranks, type_of, free_bytes)
    reasons, most, roomiest = [], 0, None
    for parent in parents(given):
        reason = _unfit(parent, type_of)
        if not reason:
            free, what = free_bytes(_mine(parent), type_of(parent)), _free_words(type_of(parent))
            if free >= limit * ranks:
                return Place(stand_in(run, parent))
            reason = f"has {free >> 20} MiB {what}"
            if free >= max(LEAST_FREE, LEAST_LIMIT * ranks) and free > most:
                most, roomiest, why = free, parent, reason
        reasons.append(f"{parent} {reason}")
    if roomiest is not None:
        lowered = most // ranks >> 20 << 20
        of = "one rank" if ranks == 1 else f"the {ranks} ranks of this host"
        return Place(
            stand_in(run, roomiest),
            f"its capture may take {lowered >> 20} MiB, not {limit >> 20} MiB (--limit): {roomiest} {why}, for {of}; "
            "name a larger local folder by --scratch DIR, or write a smaller --limit",
            lowered,
        )
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


def places(run: Path, given: str = "") -> tuple[Path, ...]:
    """Every folder in which a rank of this host may have put its capture: which, it decides by what was free then."""
    if given.lower() in OFF:
        return ()
    within = parents(given) if given else [*parents(""), SHARED_MEMORY]
    return tuple(stand_in(run, parent) for parent in within)


def parents(given: str) -> list[Path]:
    """The folders of disks in which captures may be written first."""
    return [Path(given)] if given else list(dict.fromkeys((Path(tempfile.gettempdir()), Path("/tmp"))))


def _in_memory(
    run: Path,
    kind: str,
    needed: int,
    type_of: Callable[[Path], str],
    free_bytes: Callable[[Path, str], int],
) -> Place:
    """In shared memory, where all of it fits and nothing but this host's end could lose it; else in the run folder,
    which is on a disk of this host."""
    try:
        memory = type_of(SHARED_MEMORY)
        if (
            not kind
            or kind in free_space.IN_MEMORY
            or memory not in free_space.IN_MEMORY
            or not SHARED_MEMORY.is_dir()  # what lies below /dev may be memory, too
            or free_space.ends_with_job(os.environ)  # and what is on its disk may not
            or free_space.is_removed_at_logout(os.getuid())
            or _unfit(SHARED_MEMORY, type_of)
            or free_bytes(_mine(SHARED_MEMORY), memory) < needed
        ):
            return Place(None)
    except OSError:
        return Place(None)
    return Place(stand_in(run, SHARED_MEMORY), in_memory=True)


def _free_words(kind: str) -> str:
    return f"of memory for captures ({kind})" if kind in free_space.IN_MEMORY else "free"


def _mine(parent: Path) -> Path:
    """This user's folder below it."""
    return parent / permissions.own_name()


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
    except OSError as error:
        if error.errno == errno.EPERM:
            return f"cannot be used: {permissions.own_name()} in it {error.strerror}"
        if error.errno == errno.ELOOP:
            return f"cannot be used: {permissions.own_name()} in it is {error.strerror}"
        return f"cannot be written ({error.strerror})"
    return ""


def start_copier(local: Path, run: Path, host: str, open_every_s: float = 0.0, rank: int | None = None) -> None:
    """Have the capture folder `local` copied below `run`; `open_every_s`: see `copier`. `rank`: the process that writes
    it, this one without; 0: none does. Raises OSError or SubprocessError."""
    program = [sys.executable, "-I", "-S", "-c", COPIER.format(home=str(HOME)), str(local), str(run), host]
    subprocess.run(
        [*program, str(os.getpid() if rank is None else rank), str(open_every_s)],
        env={**os.environ, permissions.SHARED: "1" if permissions.is_shared() else "0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        timeout=START_S,
        check=True,
    )


_held: Final[dict[Path, int]] = {}
"""Of this process, as a rank: its capture's local folder, and the descriptor that holds it (`copier.hold`)."""


def hold(local: Path) -> None:
    """Nobody takes the capture `local` for left behind until this process closes it or ends. Raises OSError."""
    _held[local] = copier.hold(local)


def _let_go(local: Path) -> None:
    held = _held.pop(local, None)
    if held is not None:
        os.close(held)


def _let_go_of_all() -> None:
    for local in list(_held):
        _let_go(local)


os.register_at_fork(after_in_child=_let_go_of_all)  # the parent holds it, for no longer than it lives


def close(
    local: Path,
    run: Path,
    host: str,
    patience_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """The capture is closed: wait a while until it is copied, as all processes of a container, or of a job of Slurm's,
    end with the rank. Then the copier goes on alone; where it was killed, another one does."""
    try:
        (local / copier.CLOSED_FILE).touch(mode=permissions.file_mode())
        if _is_left(local):
            start_copier(local, run, host)
        deadline = clock() + patience_s
        while local.exists() and not _is_left(local) and clock() < deadline:
            sleep(LOOK_EVERY_S)
    except (OSError, subprocess.SubprocessError):
        pass  # the copier sees the end of this process all the same
    finally:
        _let_go(local)


def _is_left(local: Path) -> bool:
    """Whether the copier of this capture, which told of itself before it was asked for anything, is gone, or has given
    up."""
    state = state_of(local / COPYING_FILE)
    return state is not None and (state.given_up or copier.began(state.copier) != state.copier_began)


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


def waiting(run: Path, places: Iterable[Path] = ()) -> list[Waiting]:
    """The captures of the run that are not all in `run`, by what is told there and in this host's `places`."""
    found = {name: state for folder in (run, *places) for name, state in _states(folder)}
    return [Waiting(name, found[name]) for name in sorted(found)]


def _states(folder: Path) -> Iterator[tuple[str, copier.CopyState]]:
    for path in regular_files.folders(folder / "capture", "rank*"):
        state = state_of(path / COPYING_FILE)
        if state is not None and CaptureName.of(path.name) is not None:
            yield path.name, state


def state_of(path: Path) -> copier.CopyState | None:
    """What a copier told in that file; None: nothing that can be read."""
    try:
        return copier.CopyState.of(regular_files.read_json(path, LARGEST_STATE))
    except (OSError, ValueError, TypeError):
        return None


def bring(item: Waiting, run: Path, places: Iterable[Path]) -> bool:
    """Copy what a copier of this host that is gone has left in one of `places`, which stand for the run folder. Whether
    all of it is there now. A file in the run folder may name any other folder: none is touched."""
    local = Path(item.state.local)
    if local not in [place / "capture" / item.name for place in places if _stands_for(place, run)]:
        return False
    try:
        held = copier.hold(local, alone=True, tries=BRING_TRIES)
    except OSError:  # not there any more, or the rank lives on
        return False
    try:
        copying = copier.Copier(local, run, item.state.host)
        if copying.finish():
            return True
        copying.give_up()
    except OSError:  # not the user's own
        pass
    finally:
        os.close(held)
    return False


def _stands_for(place: Path, run: Path) -> bool:
    return len(place.parents) >= 2 and place == stand_in(run, place.parents[1])
