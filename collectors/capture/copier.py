"""Copies one capture from where it is written into its run folder: `main(LOCAL RUN HOST PID OPEN_EVERY_S)`.

A process of its own, which the rank PID starts and which outlives it, however that ends: where the network or the disk
stalls, the rank does not. Full chunks are copied as they close, and removed once the rank has marked them as finished
and the run folder's disk has them, so what lies here stays small; the rest is copied when the capture is closed or the
rank gone, and every OPEN_EVERY_S seconds if that is not 0. The local folder goes when all of it is in RUN/capture.
What cannot be copied stays, and `copying.json` in both folders says where and why.

The local folder is one that stands for the run (`stand_in`) below this user's own. No other is read, written or
removed, whoever names it.

Nothing is lost if the rank or this process is killed at any moment: a chunk is removed here after its copy is whole,
and whoever copies the folder next copies again what is still in it. The rank and its copier hold the folder (`hold`);
where both were killed nobody does, and the next `dsprof run` or `dsprof doctor` starts a copier that has it alone. It
needs the standard library, and no more of dsprof than does the same.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from dsprof import ondisk, permissions, regular_files
from dsprof.atomic import write_atomically
from dsprof.names import CaptureName
from dsprof.schema import CONTROL_FILE, COPYING_FILE

from ..system import proc

CLOSED_FILE: Final = ".closed"
"""Where the rank has closed its capture, and writes no more."""
LARGEST_CONTROL: Final = 4096
"""Bytes of the run's control file."""
CHUNK: Final = re.compile(r"chunk-(\d+)\.bin")
OPEN_CHUNKS: Final = 3
"""The last ones, which are still written: see `chunks.Chunks`. What comes later into others is copied at the end."""
LARGEST_FILE: Final = 4 << 30
"""Bytes of a file of a capture: a memory snapshot, or what torch.profiler saw."""
HOLD_TRIES: Final = 20
HOLD_AGAIN_S: Final = 0.01
COPY_EVERY_S: Final = 1.0
LOOK_EVERY_S: Final = 0.1
PATIENCE_S: Final = 60.0
"""For how long copying is tried again when the rank has ended."""


def stand_in(run: Path, parent: Path) -> Path:
    """The folder below `parent` that stands for the run folder `run`, of this user."""
    absolute = os.path.abspath(run)
    key = hashlib.sha256(os.fsencode(absolute)).hexdigest()[:12]
    return parent / permissions.own_name() / f"{Path(absolute).name}-{key}"


def check_stands_for(local: Path, run: Path) -> None:
    """Raises OSError unless `local` is a capture's folder below what stands for `run`, and all the way down from this
    user's own folder nobody else may write, and nothing is a link."""
    name = CaptureName.of(local.name)
    parent = Path(os.path.abspath(local)).parents[3] if len(local.parts) > 4 else Path()
    wanted = stand_in(run, parent)
    if name is None or local != wanted / "capture" / local.name:
        raise PermissionError(errno.EPERM, f"is no folder of dsprof's that stands for {run}", str(local))
    permissions.check_own(wanted.parent, wanted.name, "capture", local.name)


def remove_empty(local: Path) -> None:
    """When the capture's folder `local` is gone: remove capture/, and what stands for the run, where they are empty."""
    for parent in local.parents[:2]:
        try:
            parent.rmdir()
        except OSError:
            break


def hold(local: Path, *, alone: bool = False, tries: int | None = None) -> int:
    """A descriptor that holds the folder while it is open in any process, whatever namespace that is in: together with
    others, or alone. Raises OSError, BlockingIOError where somebody else holds it, also a moment later: who holds it
    together with others tries again, as somebody may be looking whether it is held."""
    folder = os.open(local, os.O_RDONLY | os.O_DIRECTORY | permissions.NO_LINK)
    for left in reversed(range(tries or (1 if alone else HOLD_TRIES))):
        try:
            fcntl.flock(folder, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            break
        except OSError:
            if not left:
                os.close(folder)
                raise
            time.sleep(HOLD_AGAIN_S)
    return folder


@dataclass
class CopyState:
    """The contents of copying.json."""

    host: str
    local: str
    """The folder that is copied."""
    copier: int
    """The process that copies it, by its id there, and when that began (see `began`)."""
    copier_began: int | None
    left: int = 0
    """Files of which not all is copied."""
    error: str | None = None
    """Why the last of them could not be."""
    given_up: bool = False
    gone: bool = False
    """The folder was removed, by something else, before all of it was copied."""
    run: str = ""
    """The run folder; empty in older ones."""

    @staticmethod
    def of(told: Any) -> CopyState:
        """Raises TypeError or ValueError where it is none."""
        state = CopyState(**told)
        numbers = (state.copier, state.copier_began or 0, state.left)
        texts = (state.host, state.local, state.error or "", state.run)
        if not all(isinstance(text, str) and text.isprintable() for text in texts):
            raise TypeError
        if not all(type(number) is int for number in numbers):
            raise TypeError
        return state


class Mirror:
    """A local folder, and what of it is in another already."""

    def __init__(self, local: Path, target: Path) -> None:
        self.local, self.target = local, target
        self._copied: dict[str, bytes] = {}
        """Name -> digest: stores through a mapping need not change a file's time."""

    def update(self, *, all_of_it: bool, open_too: bool = False) -> int:
        """Copy what has changed, and move the chunks that are finished; without `all_of_it`, no chunk that is open, but
        with `open_too` those as well. How many files could have changed since.

        Raises OSError.
        """
        names = [path.name for path in regular_files.files(self.local) if path.name[0] != "."]
        permissions.check_folder(self.local)  # of one that was removed, nothing is listed
        chunks = {name: int(match[1]) for name in names if (match := CHUNK.fullmatch(name))}
        closed = max(chunks.values(), default=0) - OPEN_CHUNKS
        permissions.make_folders(self.target.parents[1], ("capture", self.target.name))
        left = 0
        for name in names:
            if name in (COPYING_FILE, CONTROL_FILE):
                continue
            if all_of_it or name not in chunks:
                self._copy(name)
            elif chunks[name] <= closed:
                self._take(name)
            else:
                left += 1
                if open_too:
                    self._copy(name)
        self._remove_given_up(chunks)
        return left

    def _take(self, name: str) -> None:
        """Copy a chunk that is full. One that is finished is removed here when it is on the other disk."""
        if not _is_finished(self.local / name):
            if name not in self._copied:
                self._copy(name)
            return
        self._copy(name)
        _sync(self.target / name)
        (self.local / name).unlink(missing_ok=True)
        self._copied.pop(name, None)

    def _copy(self, name: str) -> None:
        try:
            content = regular_files.read_bytes(self.local / name, LARGEST_FILE)
        except FileNotFoundError:  # a chunk that was given up for the size limit meanwhile
            return
        digest = hashlib.blake2b(content, digest_size=16).digest()
        if self._copied.get(name) == digest:
            return
        write_atomically(self.target / name, content)
        self._copied[name] = digest

    def _remove_given_up(self, chunks: dict[str, int]) -> None:
        """A capture at its size limit gives chunks up: the newest says which. The others that are not here were moved,
        by this process or one before it."""
        given_up = range(0)
        for name in sorted(chunks, key=chunks.__getitem__, reverse=True):
            place = _place(self.local / name)
            if place is not None:
                given_up = range(place[0], place[0] + place[1])
                break
        for path in regular_files.files(self.target, "chunk-*.bin") if given_up else []:
            match = CHUNK.fullmatch(path.name)
            if match and int(match[1]) in given_up:
                path.unlink(missing_ok=True)


def _is_finished(chunk: Path) -> bool:
    """Whether the rank has marked it so: it writes nothing into it any more."""
    header = _header(chunk)
    at = ondisk.CHUNK_FINISHED_AT
    return header is not None and ondisk.CHUNK_FINISHED.unpack_from(header, at)[0] == 1


def _place(chunk: Path) -> tuple[int, int] | None:
    """How many chunks at the beginning are kept, and how many behind those were given up; None: it has no header."""
    header = _header(chunk)
    if header is None:
        return None
    kept, given_up, _ = ondisk.CHUNK_PLACE.unpack_from(header, ondisk.CHUNK_HEADER.size)
    return kept, given_up


def _header(chunk: Path) -> bytes | None:
    try:
        with regular_files.open_file(chunk) as file:
            header = file.read(ondisk.CHUNK_FINISHED_AT + ondisk.CHUNK_FINISHED.size)
    except FileNotFoundError:
        return None
    whole = len(header) == ondisk.CHUNK_FINISHED_AT + ondisk.CHUNK_FINISHED.size
    return header if whole and header.startswith(ondisk.CHUNK_MAGIC) else None


def _sync(path: Path) -> None:
    """Have the disk, or the server, take the file now, and tell if it cannot. Raises OSError."""
    try:
        with regular_files.open_file(path) as file:
            os.fsync(file.fileno())
    except FileNotFoundError:  # given up for the size limit
        return


class Copier:
    """The copying of one capture, from beginning to end."""

    def __init__(
        self, local: Path, run: Path, host: str, open_every_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises OSError where `local` is not one of this run's captures in this user's own folder.

        open_every_s: how often chunks that are still written are copied; 0: at the end only
        """
        check_stands_for(local, run)
        self._open_every_s, self._clock = open_every_s, clock
        self._open_due = clock() + open_every_s
        self.state = CopyState(host, str(local), os.getpid(), began(os.getpid()), run=os.path.abspath(run))
        self._local, self._run = local, run
        self._target = run / "capture" / local.name
        self._mirror = Mirror(local, self._target)
        self._control = b""
        self._told: dict[Path, bytes] = {}
        self._tell(local)  # before the network is asked for anything

    def step(self) -> None:
        """While the rank runs: closed chunks there, and here what somebody wrote into the run's control file."""
        open_too = self._open_every_s > 0 and self._clock() >= self._open_due
        if open_too:
            self._open_due = self._clock() + self._open_every_s
        self._attempt(all_of_it=False, open_too=open_too)
        try:
            control = regular_files.read_bytes(self._run / CONTROL_FILE, LARGEST_CONTROL)
            if control != self._control:
                write_atomically(self._local / CONTROL_FILE, control)
                self._control = control
        except OSError:
            pass

    def finish(self) -> bool:
        """When the rank has ended: copy the rest. Whether all of it is there, and the local folder gone."""
        if not self._attempt(all_of_it=True):
            return False
        for path in regular_files.files(self._local):  # what says whose it is goes last
            if path.name != COPYING_FILE:
                path.unlink(missing_ok=True)
        shutil.rmtree(self._local, ignore_errors=True)
        remove_empty(self._local)
        return True

    def give_up(self) -> None:
        """Have it stay where it is."""
        self.state.given_up = True
        self._tell(self._local, self._target)

    def _attempt(self, *, all_of_it: bool, open_too: bool = False) -> bool:
        try:
            self.state.left = self._mirror.update(all_of_it=all_of_it, open_too=open_too)
            self.state.error = None
            if all_of_it:
                (self._target / COPYING_FILE).unlink(missing_ok=True)
                return True
        except OSError as error:
            self.state.left = max(self.state.left, 1)
            self.state.error = error.strerror or str(error)
            if not self._local.is_dir():
                self.state.gone, self.state.error = True, f"{self._local} was removed"
        self._tell(self._local, self._target)
        return self.state.error is None

    def _tell(self, *folders: Path) -> None:
        content = json.dumps(asdict(self.state), indent=1).encode()
        for folder in folders:
            if self._told.get(folder) == content:
                continue
            try:
                write_atomically(folder / COPYING_FILE, content)
                self._told[folder] = content
            except OSError:  # the other one says it
                continue


def began(pid: int) -> int | None:
    """When the process began, in ticks since the host did; None where it has ended."""
    fields = proc.stat(pid)
    return None if not fields or fields[proc.STATE] in (b"Z", b"X") else int(fields[proc.START_TICKS])


def watch(
    copier: Copier,
    rank_writes: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Copy until the rank writes no more and all is there, or cannot be brought there. Whether it is."""
    due = clock()
    while rank_writes() and not copier.state.gone:
        if clock() >= due:
            copier.step()
            due = clock() + COPY_EVERY_S
        sleep(LOOK_EVERY_S)
    deadline = clock() + PATIENCE_S
    while not copier.finish():
        if copier.state.gone or clock() >= deadline:
            copier.give_up()
            return False
        sleep(COPY_EVERY_S)
    return True


def main(words: list[str]) -> int:
    """LOCAL RUN HOST PID OPEN_EVERY_S: in a child that nobody waits for. PID's begin is taken, and the child has told
    who it is, before the parent goes on. PID 0: the rank is gone, and so is its copier."""
    local, run, host, pid = Path(words[0]), Path(words[1]), words[2], int(words[3])
    check_stands_for(local, run)
    rank_began = began(pid)
    told, telling = os.pipe()
    if os.fork():
        os.close(telling)
        os.read(told, 1)  # ends when the child closes it, or is gone
        return 0
    os.close(told)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the job
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    os.nice(5)

    def rank_writes() -> bool:
        return rank_began is not None and began(pid) == rank_began and not (local / CLOSED_FILE).exists()

    try:
        hold(local, alone=rank_began is None)  # until this process ends
        copier = Copier(local, run, host, float(words[4]))
        os.close(telling)
        watch(copier, rank_writes)
    finally:  # somebody else copies it, or it is not there any more
        os._exit(0)
