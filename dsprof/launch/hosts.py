"""One run of several hosts, on each of which `dsprof run` is started with the same folder.

The first host to come makes the run; the others join it. Whether they are of one job the folder cannot tell: an earlier
run may lie there that was killed. So nothing is written into a run that was found before its hosts have met in the
job's own rendezvous, where each says which run it is in. A run that nobody there knows is left alone, and the job gets
another folder. The host of rank 0 waits for the others' ends and draws the verdict.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from dsprof.atomic import write_atomically
from dsprof.names import host_name
from dsprof.permissions import PRIVATE_FILE, PRIVATE_FOLDER
from dsprof.run import HostPart, RunError, RunFolder, RunInfo

from .claim import claim
from .talk import Talk, shown

MEETING: Final = "DSPROF_MEETING"
"""Tells the agent, and no rank, the file by which it and the launcher speak (`Agreed`)."""
LOCK_S: Final = 10.0
"""How long another host may take to make the run folder."""
CONFIRM_S: Final = 10.0
"""How long a host that found a run waits, when all have met, for one that knows it."""
ENDS_S: Final = 60.0
"""How long the host of rank 0 waits for the others' ends."""
LOOK_EVERY_S: Final = 0.1


@dataclass
class Agreed:
    """Which run this host is in."""

    folder: str
    token: str
    known: bool
    """This host made the run, or has met one that is in it."""
    node: int | None = None
    """Its number in the last rendezvous."""
    info: str = ""
    """run.json, should another run have to be made."""


def take_part(path: Path, info: RunInfo, *, force: bool, elastic: bool) -> Agreed:
    """Join the run that another host of the job has made at `path`, or make it. Raises RunError."""
    folder = RunFolder(Path(os.path.abspath(path)))
    with _lock(folder.path):
        token = _open_run(folder, info.nnodes, elastic)
        if token is None:
            info.token = secrets.token_hex(8)
            claim(folder.path, info, force=force)
            folder.write_host(HostPart(host_name()))
        else:
            info.token = token
    return Agreed(str(folder.path), info.token, known=token is None, info=info.to_json())


def _open_run(folder: RunFolder, nnodes: str, elastic: bool) -> str | None:
    """The token of a run in `folder` that goes on, and that this host may belong to."""
    if not folder.run_json.exists():
        return None
    with suppress(RunError):
        there = folder.read_info()
        came = {part.host for part in folder.read_hosts()}
        if there.token and there.ended is None and there.nnodes == nnodes and (elastic or host_name() not in came):
            return there.token
    return None


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Only one host at a time makes the folder, or makes room for it: a directory, which every file system can."""
    lock = path.with_name(f".{path.name}.lock")
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            lock.mkdir(mode=PRIVATE_FOLDER)
            break
        except FileExistsError:
            if time.monotonic() >= deadline:
                raise RunError(f"{shown(lock)}: another host is making the run folder; if none is, remove it") from None
            time.sleep(LOOK_EVERY_S)
        except OSError as error:
            raise RunError(f"{shown(path)}: cannot be written ({error.strerror}); give another folder") from error
    try:
        yield
    finally:
        with suppress(OSError):
            lock.rmdir()


class Meeting:
    """The agent's side: the hosts agree on their run when they have met."""

    def __init__(
        self,
        file: Path,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._file, self._clock, self._sleep, self._say = file, clock, sleep, Talk().warn
        self._agreed = Agreed(**json.loads(file.read_bytes()))

    @property
    def folder(self) -> RunFolder:
        return RunFolder(Path(self._agreed.folder))

    @property
    def agreed(self) -> bool:
        return self._agreed.known

    def meet(self, store: Any, node: int) -> None:
        """Agree with the other hosts in a rendezvous, where this one is number `node`. Raises OSError, RunError."""
        if not self._agreed.known and not self._is_known(store):
            self._move(store)
        mine = self._agreed
        mine.known, mine.node = True, node
        store.set(f"dsprof/run/{mine.token}", mine.folder)
        first = os.fsdecode(store.compare_set("dsprof/first", "", f"{mine.token} {mine.folder}"))
        if first.partition(" ")[0] != mine.token:
            other = first.partition(" ")[2]
            self._say(
                f"warning: another host of the job is in a run of its own ({other}), so this one is not of all hosts; "
                "give -o the same folder on each, in a file system that all of them see"
            )
        self.folder.write_host(HostPart(host_name(), node))
        write_atomically(self._file, json.dumps(asdict(mine)), mode=PRIVATE_FILE)

    def _is_known(self, store: Any) -> bool:
        """Whether a host that has met us is in the run that we found. It may have been replaced since."""
        deadline = self._clock() + CONFIRM_S
        while not store.check([f"dsprof/run/{self._agreed.token}"]):
            if self._clock() >= deadline:
                return False
            self._sleep(LOOK_EVERY_S)
            with suppress(RunError):
                self._agreed.token = self.folder.read_info().token or self._agreed.token
        return True

    def _move(self, store: Any) -> None:
        """Make another run, with those that are in the same position."""
        found = self._agreed.folder
        mine = f"{found}-{secrets.token_hex(3)}"
        path = Path(os.fsdecode(store.compare_set("dsprof/instead", "", mine)))
        info = RunInfo.from_json(self._agreed.info)
        info.id = path.name
        self._agreed = take_part(path, info, force=False, elastic=True)
        self._say(
            f"warning: the run in {shown(Path(found))} is not of this job, none of whose hosts knows it; it is left as "
            f"it is, and the run folder is {shown(path)}"
        )


class Participation:
    """The launcher's side: this host's part in the run."""

    def __init__(
        self,
        agreed: Agreed,
        talk: Talk,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._talk, self._clock, self._sleep = talk, clock, sleep
        self.founded = agreed.known
        self._cpu_peaks: list[dict[str, Any]] = []
        try:
            descriptor, name = tempfile.mkstemp(prefix="dsprof-meeting-")
            os.close(descriptor)
            self.file = Path(name)
            self.file.write_text(json.dumps(asdict(agreed)))
        except OSError as error:
            raise RunError(f"{tempfile.gettempdir()}: cannot be written ({error.strerror}); set TMPDIR") from error

    @property
    def agreed(self) -> Agreed:
        """As it is now."""
        return Agreed(**json.loads(self.file.read_bytes()))

    @property
    def folder(self) -> RunFolder:
        return RunFolder(Path(self.agreed.folder))

    @property
    def token(self) -> str:
        return self.agreed.token

    def close(self) -> None:
        self.file.unlink(missing_ok=True)

    def end(self, status: int, ended: str, cpu_peaks: Sequence[dict[str, Any]] = ()) -> bool:
        """This host's job has ended: tell it, and wait for the others' if the verdict is ours. Whether it is."""
        self._cpu_peaks = list(cpu_peaks)
        agreed, folder, host = self.agreed, self.folder, host_name()
        where = shown(folder.path)
        if not agreed.known:
            self._talk.warn(
                f"warning: this host took no part in the run in {where}: the hosts never met, or did not agree"
            )
            return False
        self._write(HostPart(host, agreed.node, ended, status, cpu_peaks=self._cpu_peaks))
        others = [part for part in folder.read_hosts() if part.host != host]
        # Where hosts came and went, there may have been several of rank 0.
        first = min((part for part in others if part.node == 0), key=lambda part: part.ended is not None, default=None)
        if agreed.node is None or (agreed.node == 0 and (first is None or first.ended is not None)):
            self._wait(folder, host)
            return True
        if first is None:
            self._talk.warn(f"warning: nothing is heard of the host of rank 0; for the verdict: dsprof report {where}")
        elif first.concluded:
            self._talk.warn(f"{first.host} drew the verdict before this host ended; anew: dsprof report {where}")
        else:
            self._talk.say(f"the verdict will be drawn on {first.host}, the host of rank 0, and lie in {where}")
        return False

    def concluded(self, status: int, ended: str) -> None:
        """The verdict is drawn."""
        part = HostPart(host_name(), self.agreed.node, ended, status, concluded=True, cpu_peaks=self._cpu_peaks)
        self._write(part)

    def _wait(self, folder: RunFolder, host: str) -> None:
        deadline, said = self._clock() + ENDS_S, False
        with suppress(KeyboardInterrupt):
            while missing := _under_way(folder, host):
                names = ", ".join(missing)
                if self._clock() >= deadline:
                    self._talk.warn(f"warning: {names}: no end {ENDS_S:.0f} s after that of {host}; going on without")
                    return
                if not said:
                    said = True
                    self._talk.say(f"waiting for the end of {names}, at most {ENDS_S:.0f} s (Ctrl-C: no longer)")
                self._sleep(LOOK_EVERY_S)

    def _write(self, part: HostPart) -> None:
        try:
            self.folder.write_host(part)
        except OSError as error:
            self._talk.warn(f"warning: {shown(self.folder.hosts)}: cannot be written ({error.strerror or error})")


def _under_way(folder: RunFolder, host: str) -> list[str]:
    """The other hosts that have met, and have not told of their end."""
    return [
        part.host for part in folder.read_hosts() if part.host != host and part.node is not None and part.ended is None
    ]
