"""The run folder: where everything of one run lies.

dsprof-out/<name>-<UTC>-<id>/
    run.json  capture/rank00003.<restart>.<host>.<pid>/  trace/rank00003.parquet  memory/rank00003.*.parquet
    exits/<host>.json  hosts/<host>.json  hangs.json  hint.<pid>.json  error.<pid>.txt  uncaught.<pid>.json
    rerun.json
    findings.json  report.html  tensorboard/
"""

from __future__ import annotations

import json
import os
import re
import shutil
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from .. import regular_files
from ..atomic import write_atomically
from ..names import CaptureName
from ..permissions import LINK, PRIVATE_FILE, make_folder, open_to_append
from ..redact import redact_text
from ..schema import CONTROL_FILE, HANGS_FILE
from .info import HostPart, RunInfo, from_known
from .ranks import RankExit

DEFAULT_PARENT: Final = "dsprof-out"


class RunError(Exception):
    """A run folder cannot be used; the message says which, why, and what to do instead."""


class FoundCapture(NamedTuple):
    """A capture's folder, and what its name tells."""

    name: CaptureName
    path: Path


@dataclass(frozen=True)
class Hint:
    """What a process left in hint.<pid>.json because it wants to be started in another way."""

    pid: int
    kind: str
    """`wants-ranks` or `wants-no-ranks`."""
    reason: str


HINT_FILE: Final = re.compile(r"hint\.(\d+)\.json")
LARGEST_HINT: Final = 1 << 16
MOST_ERROR_LINES: Final = 20
"""Of one process."""
LEFT_BY_PROCESSES: Final = re.compile(rf"error\.\d+\.txt|uncaught\.\d+\.json|trial\.\d+\.\d+\.json|{HINT_FILE.pattern}")
"""What processes of the job write where there is no capture: see `collectors.capture.without_capture`, `Hint`."""


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
        return regular_files.is_file(self.run_json) or any(map(regular_files.is_folder, (self.capture, self.trace)))

    @property
    def changed_ns(self) -> int:
        """When anything of what reports are made of was last written; 0 where there is nothing."""
        captured = [path for one in self.captures() for path in regular_files.files(one.path)]
        sources = [self.run_json, *captured, *regular_files.files(self.trace, "*.parquet")]
        return max((path.stat().st_mtime_ns for path in sources if path.exists()), default=0)

    def captures(self) -> Iterator[FoundCapture]:
        """The captures that lie below `capture/`, by the names of their folders. Not every one is whole; a rank has
        several where it was restarted, or where two processes captured as it."""
        for path in regular_files.folders(self.capture, "rank*"):
            name = CaptureName.of(path.name)
            if name is not None:
                yield FoundCapture(name, path)

    def links(self) -> list[str]:
        """The parts of it that are symbolic links, which are not followed."""
        return [part.name for part in self.parts if part.is_symlink()]

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
    def rerun_json(self) -> Path:
        """What it takes to run the job again, in which nothing is redacted: only the user may read it, and nothing else
        that dsprof writes holds any of it."""
        return self.path / "rerun.json"

    @property
    def parts(self) -> tuple[Path, ...]:
        """All that dsprof writes into a run folder, whether it is there or not; of what processes leave, what is."""
        left = [path for path in self.path.glob("*.*.*") if LEFT_BY_PROCESSES.fullmatch(path.name)]
        return (
            self.run_json, self.capture, self.trace, self.memory, self.exits, self.hosts, self.findings_json,
            self.report_html, self.tensorboard, self.layer_costs_json, self.control, self.hangs, self.error_log,
            self.rerun_json, *left,
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
        for path in regular_files.files(self.exits, "*.json"):
            try:
                items = regular_files.read_json(path)
                exits += [from_known(RankExit, item) for item in items]
            except (OSError, ValueError, TypeError, AttributeError) as error:
                problems.append(f"exits/{path.name}: unreadable ({getattr(error, 'strerror', None) or error})")
        return sorted(exits, key=lambda item: (item.restart, item.rank)), problems

    def read_hosts(self) -> list[HostPart]:
        """The hosts that take part in a run of several, by name. One whose file cannot be read is left out."""
        parts: list[HostPart] = []
        for path in regular_files.files(self.hosts, "*.json"):
            try:
                parts.append(from_known(HostPart, regular_files.read_json(path)))
            except (OSError, ValueError, TypeError, AttributeError):
                continue
        return parts

    def write_host(self, part: HostPart) -> None:
        """Raises OSError."""
        make_folder(self.hosts)
        write_atomically(self.hosts / f"{part.host}.json", json.dumps(asdict(part), indent=2) + "\n")

    def rank_of(self, host: str, pid: int) -> tuple[int, int] | None:
        """Rank and restart of a process; None if it has not been captured, so is no rank as far as is known."""
        for name, _ in self.captures():
            if (name.host, name.pid) == (host, pid):
                return name.rank, name.restart
        return None

    def read_hangs(self) -> list[dict[str, Any]]:
        """The times that the launcher called the job hung."""
        try:
            found = regular_files.read_json(self.hangs)
        except (OSError, ValueError):
            return []
        return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []

    def read_hints(self) -> list[Hint]:
        """What the processes of the job left, the first to write first. One that cannot be read is left out."""
        found: list[tuple[int, Hint]] = []
        for path in regular_files.files(self.path, "hint.*.json"):
            match = HINT_FILE.fullmatch(path.name)
            if match is None:
                continue
            try:
                data = regular_files.read_json(path, LARGEST_HINT)
                hint = Hint(int(match[1]), str(data["kind"]), str(data["reason"]))
                found.append((path.stat().st_mtime_ns, hint))
            except (OSError, ValueError, TypeError, KeyError):
                continue
        return [hint for _, hint in sorted(found, key=lambda item: item[0])]

    def write_info(self, info: RunInfo) -> None:
        write_atomically(self.run_json, info.to_json())

    def log_error(self) -> None:
        """Append the traceback of the exception that is handled to `error_log`, without secrets. Raises OSError."""
        with os.fdopen(open_to_append(self.error_log), "a") as log:
            log.write(redact_text(traceback.format_exc()))

    def write_rerun(self, content: dict[str, Any]) -> None:
        """Raises OSError."""
        write_atomically(self.rerun_json, json.dumps(content, indent=2) + "\n", mode=PRIVATE_FILE)

    def read_errors(self) -> list[tuple[int, list[str]]]:
        """What processes said that could begin no capture: the process and its lines, each once."""
        found = []
        for path in regular_files.files(self.path, "error.*.txt"):
            process = path.name.split(".")[1]
            with suppress(OSError):
                lines = regular_files.read_text(path).splitlines()[:MOST_ERROR_LINES]
                found.append((int(process) if process.isdecimal() else 0, list(dict.fromkeys(lines))))
        return found

    def read_uncaught(self) -> dict[tuple[str, int], dict[str, Any]]:
        """The exceptions that ended processes without a capture, by host and process (`schema.UNCAUGHT`, without the
        rank). One that cannot be read is left out."""
        found: dict[tuple[str, int], dict[str, Any]] = {}
        for path in regular_files.files(self.path, "uncaught.*.json"):
            process = path.name.split(".")[1]
            with suppress(OSError, ValueError):
                told = regular_files.read_json(path, LARGEST_HINT)
                if isinstance(told, dict) and process.isdecimal():
                    host = str(told.pop("host", ""))
                    found[host, int(process)] = told
        return found

    def read_info(self) -> RunInfo:
        """run.json; a minimal one when it is absent, since a capture alone is worth reading.

        Raises RunError when it is there and cannot be read.
        """
        try:
            return RunInfo.from_json(regular_files.read_bytes(self.run_json))
        except FileNotFoundError:
            return RunInfo(id=self.path.resolve().name, name=self.path.resolve().name, command=[])
        except (OSError, ValueError, TypeError, AttributeError) as error:
            why = getattr(error, "strerror", None) or error
            raise RunError(
                f"{self.run_json}: cannot be read ({why}); move it away to analyze the capture without it"
            ) from error


def open_run(path: str | os.PathLike[str]) -> RunFolder:
    """The existing run folder at `path`. Raises RunError if there is none."""
    folder = RunFolder(Path(path))
    if not folder.path.is_dir():
        raise RunError(f"{path}: no such run folder; runs lie under {DEFAULT_PARENT}/ unless -o said otherwise")
    if not folder.is_run():
        said = [line for _, lines in folder.read_errors() for line in lines]
        if said:  # of a job that was armed by DSPROF=1 alone
            raise RunError(f"{path}: no capture was begun: {'; '.join(dict.fromkeys(said))}")
        links = folder.links()
        if links:
            raise RunError(f"{path}: {links[0]} is {LINK}; put what it names into the folder itself")
        raise RunError(f"{path}: not a run folder (no run.json, capture/ or trace/ in it)")
    return folder
