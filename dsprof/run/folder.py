"""The run folder: where everything of one run lies, and run.json, which says what the run was.

dsprof-out/<name>-<UTC>-<id>/
    run.json  capture/rank00003.<restart>.<host>.<pid>/  trace/rank00003.parquet  memory/rank00003.*.parquet
    exits/<host>.json  hosts/<host>.json  hangs.json  hint.<pid>.json  error.<pid>.txt
    findings.json  report.html  tensorboard/
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from .atomic import write_atomically
from .names import CaptureName
from .schema import CONTROL_FILE, HANGS_FILE

RUN_SCHEMA: Final = 1
DEFAULT_PARENT: Final = "dsprof-out"

BY_HAND: Final = 128 + signal.SIGINT
INTERRUPTED: Final = (BY_HAND, 128 + signal.SIGTERM)
"""Status of a run that was stopped from the keyboard; of one that was stopped by somebody, a scheduler perhaps."""

Known = TypeVar("Known")
Process = TypeVar("Process", "RankExit", "RankInfo")


class RunError(Exception):
    """A run folder cannot be used; the message says which, why, and what to do instead."""


@dataclass
class RankExit:
    """How one rank's process ended, as its launcher saw it."""

    rank: int
    host: str
    pid: int
    code: int | None
    """Exit status as the operating system gave it: 0..255; None when it ended by a signal."""
    signal: int | None
    ended_ns: int | None
    """Monotonic clock of the host, for telling who died first."""
    restart: int = 0
    """Which elastic restart of the job the process belonged to."""
    stopped: bool = False
    """The launcher ended it: another rank had failed, or the job was interrupted."""
    ended_epoch_ns: int | None = None
    """The same moment by the host's wall clock, for telling who died first on which host."""

    @property
    def status(self) -> int:
        """What a shell would report: the exit code, or 128 + the signal."""
        if self.signal is not None:
            return 128 + self.signal
        return self.code or 0

    @property
    def how(self) -> str:
        """What ended it: `exit status 7`, `SIGKILL`."""
        if self.signal is None:
            return "running or unknown" if self.code is None else f"exit status {self.code}"
        try:
            return signal.Signals(self.signal).name
        except ValueError:  # a real-time signal, or one of another platform
            return f"signal {self.signal}"


def last_processes(processes: Iterable[Process]) -> list[Process]:
    """The last process of each rank, by rank: how it ended, or what it captured.

    Restarts are counted by each host's launcher: one host may be at its second while another is at its first. A rank
    that moved to another host has its last process there, and one that a shrunken job no longer has is gone.
    """
    every = list(processes)
    last: dict[str, int] = {}
    for item in every:
        last[item.host] = max(last.get(item.host, 0), item.restart)
    final = [item for item in every if item.restart == last[item.host]]
    by_rank = {item.rank: item for item in sorted(final, key=lambda item: item.restart)}
    return [by_rank[rank] for rank in sorted(by_rank)]


def failures(exits: list[RankExit]) -> list[RankExit]:
    """Ranks whose last process failed by itself, the first to end first."""
    failed = [item for item in last_processes(exits) if item.status and not item.stopped]
    return sorted(failed, key=lambda item: item.ended_epoch_ns or item.ended_ns or sys.maxsize)


@dataclass
class HostPart:
    """What a host's launcher says of its part in a run of several hosts: hosts/<host>.json."""

    host: str
    node: int | None = None
    """Its number in the job's rendezvous; that of the host of rank 0 is 0. None: the hosts have not met yet."""
    ended: str | None = None
    """When its job ended and its captures were in the run folder; UTC."""
    status: int | None = None
    """What its `dsprof run` returned."""
    concluded: bool = False
    """It has drawn the run's verdict."""
    cpu_peaks: list[dict[str, Any]] = field(default_factory=list)
    """What it measured for `RunInfo.cpu_peaks`, of its own ranks."""


@dataclass
class RankInfo:
    """One rank's capture, as merged."""

    rank: int
    restart: int
    host: str
    pid: int
    capture: str
    """Name of its folder under capture/."""
    native: bool
    last_step: int
    """Last completed step; -1: none."""
    records: int
    dropped: int
    """Records not written: the disk was full, or the capture reached its size limit."""
    damaged: int
    """Records that could not be read back: torn or corrupt."""
    errors: int
    """Errors inside the collectors: caught, counted, and of no consequence to the job."""
    closed: bool
    """The capture was closed in order (not by a kill)."""
    started_ns: int | None = None
    """When the process began, by the monotonic clock of its host; None where that is not known."""
    opened_ns: int | None = None
    """When capturing began."""
    closed_ns: int | None = None
    """When it ended; None where it was not closed in order."""
    clock: str = ""
    """Names the monotonic clock that its times are of; empty where that is not known, and its host stands for it."""

    @property
    def clock_name(self) -> str:
        """Ranks of which it is the same read one clock."""
        return self.clock or self.host


@dataclass
class RunInfo:
    """The contents of run.json."""

    id: str
    name: str
    command: list[str]
    cwd: str = ""
    started: str = ""
    ended: str | None = None
    status: int | None = None
    """What `dsprof run` returned; None while running or without a launcher of ours."""
    world_size: int | None = None
    level: str = "light"
    """Of the capture; empty of an imported trace, which has none of ours."""
    engine: str = "script"
    """What trained: `script`, what the script imports, or `dsprof`, our engine in the place of DeepSpeed."""
    versions: dict[str, str] = field(default_factory=dict)
    exits: list[RankExit] = field(default_factory=list)
    ranks: list[RankInfo] = field(default_factory=list)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Process group name -> {"ranks": [global ranks seen], "size": int, "desc": str, "backend": str, if known}."""
    facts: list[dict[str, Any]] = field(default_factory=list)
    """What the ranks said of themselves: {"fact": "ddp"|"dataloader"|..., "rank": int, "site": "file:line", ...}."""
    warnings: list[str] = field(default_factory=list)
    host: str = ""
    """The launcher's host."""
    started_ns: int | None = None
    """Just before the job was started, by the monotonic clock of `host`; None without a launcher of ours."""
    ended_ns: int | None = None
    """Just after it had ended."""
    cpu_peaks: list[dict[str, Any]] = field(default_factory=list)
    """Measured on each host when a job on CPUs had ended, at level full: {"host": str, "ranks": [global ranks],
    "threads": int, "flops": {dtype: operations a second}}."""
    oom_kills: list[dict[str, Any]] = field(default_factory=list)
    """Seen when the job had ended: {"ranks": [global ranks], "path": cgroup, "kills": processes of it that the kernel
    killed for want of memory while the job ran}."""
    nnodes: str = ""
    """Of a run of several hosts how many, as torchrun's flag says it: `2`, `1:4`. Empty: of one."""
    token: str = ""
    """Tells such a run from others that are made in the same folder."""
    hangs: list[dict[str, Any]] = field(default_factory=list)
    """The times that the launcher called the job hung (hangs.json): {"code", "kind", "words", "culprits", "waiters",
    "operation", "still_s", "went_on", "stood_s" of one that went on, "aborted", ...}; see `dsprof.launch.watch`."""
    hints: list[str] = field(default_factory=list)
    """Of a job that failed or was interrupted, and wanted to be started in another way: what to type instead."""
    schema: int = RUN_SCHEMA

    @property
    def imported(self) -> str:
        """The format of another tool's trace that this run was made of; empty: dsprof captured it."""
        return next((str(fact.get("format", "")) for fact in self.facts if fact.get("fact") == "import"), "")

    @property
    def ended_for_hanging(self) -> bool:
        """Whether dsprof ended the job since it hung, as `--on-hang abort` says."""
        return any(hang.get("aborted") and not hang.get("went_on") for hang in self.hangs[-1:])

    def group(self, name: str) -> dict[str, Any]:
        """What `groups` says of a process group, or of one made anew under its name (`0#1`); empty: nothing."""
        return self.groups.get(name) or self.groups.get(name.partition("#")[0]) or {}

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunInfo:
        data = json.loads(text)
        if not isinstance(data, dict) or "id" not in data:
            raise ValueError("not a run.json: it has no `id`")
        data["exits"] = [from_known(RankExit, item) for item in data.get("exits", [])]
        data["ranks"] = [from_known(RankInfo, item) for item in data.get("ranks", [])]
        return from_known(cls, {"name": data["id"], "command": [], **data})


@dataclass(frozen=True)
class Hint:
    """What a process left in hint.<pid>.json because it wants to be started in another way."""

    pid: int
    kind: str
    """`wants-ranks` or `wants-no-ranks`."""
    reason: str


HINT_FILE: Final = re.compile(r"hint\.(\d+)\.json")
LEFT_BY_PROCESSES: Final = re.compile(rf"error\.\d+\.txt|{HINT_FILE.pattern}")
"""What processes of the job write where there is no capture: see `collectors.errors.report_failure`, `Hint`."""


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run folder."""

    path: Path

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def capture(self) -> Path:
        return self.path / "capture"

    @property
    def trace(self) -> Path:
        return self.path / "trace"

    @property
    def memory(self) -> Path:
        """What the ranks' allocators held: side tables of the trace."""
        return self.path / "memory"

    @property
    def exits(self) -> Path:
        """One JSON file a launching host, written by `dsprof.launch.torchrun`."""
        return self.path / "exits"

    @property
    def hosts(self) -> Path:
        """One JSON file a host, of a run of several (`HostPart`)."""
        return self.path / "hosts"

    def is_run(self) -> bool:
        """Whether there is anything of a run in it."""
        return self.run_json.exists() or self.capture.is_dir() or self.trace.is_dir()

    @property
    def findings_json(self) -> Path:
        return self.path / "findings.json"

    @property
    def layer_costs_json(self) -> Path:
        return self.path / "layer_costs.json"

    @property
    def report_html(self) -> Path:
        return self.path / "report.html"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def control(self) -> Path:
        """What the ranks of a job that runs are told (`schema.CONTROL_FILE`)."""
        return self.path / CONTROL_FILE

    @property
    def hangs(self) -> Path:
        """The times that the launcher called the job hung."""
        return self.path / HANGS_FILE

    @property
    def error_log(self) -> Path:
        """Tracebacks of what failed in the launcher."""
        return self.path / "dsprof-error.log"

    @property
    def parts(self) -> tuple[Path, ...]:
        """All that dsprof writes into a run folder, whether it is there or not; of what processes leave, what is."""
        left = [path for path in self.path.glob("*.*.*") if LEFT_BY_PROCESSES.fullmatch(path.name)]
        return (
            self.run_json, self.capture, self.trace, self.memory, self.exits, self.hosts, self.findings_json,
            self.report_html, self.tensorboard, self.layer_costs_json, self.control, self.hangs, self.error_log, *left,
        )  # fmt: skip

    def remove(self) -> None:
        """Remove the run, and the folder with it unless something else lies there too. Raises OSError."""
        for part in self.parts:
            if part.is_dir() and not part.is_symlink():
                shutil.rmtree(part)
            else:
                part.unlink(missing_ok=True)
        with suppress(OSError):
            self.path.rmdir()

    def read_exits(self) -> tuple[list[RankExit], list[str]]:
        """How each rank ended, from every host that wrote into this folder; and which files could not be read."""
        exits: list[RankExit] = []
        problems: list[str] = []
        for path in sorted(self.exits.glob("*.json")):
            try:
                items = json.loads(path.read_text())
                exits += [from_known(RankExit, item) for item in items]
            except (OSError, ValueError, TypeError, AttributeError) as error:
                problems.append(f"exits/{path.name}: unreadable ({error})")
        return sorted(exits, key=lambda item: (item.restart, item.rank)), problems

    def read_hosts(self) -> list[HostPart]:
        """The hosts that take part in a run of several, by name. One whose file cannot be read is left out."""
        parts: list[HostPart] = []
        for path in sorted(self.hosts.glob("*.json")):
            try:
                parts.append(from_known(HostPart, json.loads(path.read_bytes())))
            except (OSError, ValueError, TypeError, AttributeError):
                continue
        return parts

    def write_host(self, part: HostPart) -> None:
        """Raises OSError."""
        self.hosts.mkdir(exist_ok=True)
        write_atomically(self.hosts / f"{part.host}.json", json.dumps(asdict(part), indent=2) + "\n")

    def rank_of(self, host: str, pid: int) -> tuple[int, int] | None:
        """Rank and restart of a process; None if it has not been captured, so is no rank as far as is known."""
        for path in sorted(self.capture.glob(f"rank*.{glob.escape(host)}.{pid}")):
            name = CaptureName.of(path.name)
            if name is not None and (name.host, name.pid) == (host, pid):
                return name.rank, name.restart
        return None

    def read_hangs(self) -> list[dict[str, Any]]:
        """The times that the launcher called the job hung."""
        try:
            found = json.loads(self.hangs.read_bytes())
        except (OSError, ValueError):
            return []
        return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []

    def read_hints(self) -> list[Hint]:
        """What the processes of the job left, the first to write first. One that cannot be read is left out."""
        found: list[tuple[int, Hint]] = []
        for path in self.path.glob("hint.*.json"):
            match = HINT_FILE.fullmatch(path.name)
            if match is None:
                continue
            try:
                data = json.loads(path.read_bytes())
                hint = Hint(int(match[1]), str(data["kind"]), str(data["reason"]))
                found.append((path.stat().st_mtime_ns, hint))
            except (OSError, ValueError, TypeError, KeyError):
                continue
        return [hint for _, hint in sorted(found, key=lambda item: item[0])]

    def write_info(self, info: RunInfo) -> None:
        write_atomically(self.run_json, info.to_json())

    def read_info(self) -> RunInfo:
        """run.json; a minimal one when it is absent, since a capture alone is worth reading.

        Raises RunError when it is there and cannot be read.
        """
        try:
            return RunInfo.from_json(self.run_json.read_text())
        except FileNotFoundError:
            return RunInfo(id=self.path.resolve().name, name=self.path.resolve().name, command=[])
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise RunError(
                f"{self.run_json}: cannot be read ({error}); move it away to analyze the capture without it"
            ) from error


def from_known(kind: type[Known], item: dict[str, Any]) -> Known:
    """A dataclass from JSON, without keys that it does not know: a newer dsprof may have written more.

    Raises TypeError or AttributeError where it is not an object that holds what is needed.
    """
    known = {entry.name for entry in fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: value for key, value in item.items() if key in known})


def open_run(path: str | os.PathLike[str]) -> RunFolder:
    """The existing run folder at `path`. Raises RunError if there is none."""
    folder = RunFolder(Path(path))
    if not folder.path.is_dir():
        raise RunError(f"{path}: no such run folder; runs lie under {DEFAULT_PARENT}/ unless -o said otherwise")
    if not folder.is_run():
        said = [line for file in sorted(folder.path.glob("error.*.txt")) for line in file.read_text().splitlines()]
        if said:  # of a job that was armed by DSPROF=1 alone
            raise RunError(f"{path}: no capture was begun: {'; '.join(dict.fromkeys(said))}")
        raise RunError(f"{path}: not a run folder (no run.json, capture/ or trace/ in it)")
    return folder
