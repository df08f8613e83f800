"""The run folder: where everything of one run lies.

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
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ..atomic import write_atomically
from ..names import CaptureName
from ..schema import CONTROL_FILE, HANGS_FILE
from .info import HostPart, RunInfo, from_known
from .ranks import RankExit

DEFAULT_PARENT: Final = "dsprof-out"


class RunError(Exception):
    """A run folder cannot be used; the message says which, why, and what to do instead."""


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
