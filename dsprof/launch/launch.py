"""`dsprof run`: makes the run folder, starts the job armed, outlives it, and turns its captures into a verdict.

Whatever happens to the profiler, the job runs and its own status comes back.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import dsprof
from dsprof.collectors.capture import scratch
from dsprof.collectors.overrides.install import VARIABLE as OVERRIDES
from dsprof.names import host_name, new_run_id
from dsprof.ranges import NEVER, parse_hang_timeout, parse_size
from dsprof.redact import redact_data, redact_words
from dsprof.run import RunFolder, RunInfo, now
from dsprof.settings import Settings

from . import left_behind
from .claim import claim
from .commit import checked_out
from .conclude import Conclusion
from .hints import launch_hints
from .hosts import MEETING, Participation, take_part
from .job import Job, LaunchError, home
from .outputs import printed_to
from .supervise import Ending, Supervisor, end_with
from .talk import Talk, shown
from .watch import HangWatch

KINETO_SILENT: Final = "6"
"""KINETO_LOG_LEVEL at which torch.profiler's library says nothing on the job's stderr when it begins and ends; one
lower tells of both."""
LITTLE_SPACE: Final = 64 << 20
"""Free bytes below which a capture may well not fit."""


class Stopped(BaseException):
    """SIGTERM or SIGHUP while no job runs, as KeyboardInterrupt is SIGINT."""

    def __init__(self, number: int) -> None:
        self.status = 128 + number


@dataclass(frozen=True)
class Launch:
    """A job, and how it is to be profiled."""

    job: Job
    settings: Settings = field(default_factory=Settings)
    output: Path | None = None
    """The run folder; by default a new one under `settings.dir`."""
    force: bool = False
    quiet: bool = False
    as_json: bool = False
    typed: tuple[str, ...] = ()
    """The command line, for run.json."""
    own_flags: tuple[str, ...] = ()
    """Of it, dsprof's own flags: they stay where another line is advised."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """What --set asks for, by key."""

    def run(self) -> int:
        """Run the job under the profiler and return its status. Raises LaunchError or RunError before it starts."""
        talk = Talk(self.quiet)
        self.job.check()
        command = list(self.typed or ("dsprof", "run", *self.job.words))
        info = RunInfo(
            id="",
            name=self.job.name,
            command=redact_words(command),
            cwd=os.getcwd(),
            started=now(),
            world_size=self.job.world_size,
            host=host_name(),
            level=self.settings.level,
            engine=self.settings.engine,
            versions=versions(),
            commit=checked_out(Path.cwd()),
            knobs={key: redact_data({key: value})[key] for key, value in self.knobs.items()},
        )
        path = self.output or Path(self.settings.dir) / new_run_id(self.job.name)
        info.id = Path(os.path.abspath(path)).name
        with stoppable(), ExitStack() as stack:
            part = self._take_part(path, info, talk)
            if part is not None:
                stack.callback(part.close)
            folder = claim(path, info, force=self.force) if part is None else part.folder
            if part is None or part.founded:
                note_rerun(folder, command)
            try:
                ending = self._run_job(folder, info, talk, part)
            except BaseException as error:  # no job, no run
                with suppress(OSError):
                    if part is None or part.founded:
                        folder.remove()
                if isinstance(error, Stopped):
                    return error.status
                raise
            folder = folder if part is None else part.folder
            try:
                self._conclude(folder, info, ending, talk, part)
            except (KeyboardInterrupt, Stopped):
                talk.warn(f"analysis stopped; the capture is kept, for dsprof report {shown(folder.path)}")
        return ending.status

    def _take_part(self, path: Path, info: RunInfo, talk: Talk) -> Participation | None:
        """This host's part in a run of several; None where it has one of its own. Raises RunError."""
        if not self.job.nnodes:
            return None
        if self.output is None:
            talk.warn(
                f"warning: --nnodes {self.job.nnodes} without -o: this run will be of this host's ranks only; for one "
                "run of all hosts give -o the same folder on each, in a file system that all of them see"
            )
            return None
        info.nnodes = self.job.nnodes
        return Participation(take_part(path, info, force=self.force, elastic=self.job.elastic), talk)

    def _conclude(
        self, folder: RunFolder, info: RunInfo, ending: Ending, talk: Talk, part: Participation | None
    ) -> None:
        places = scratch.places(folder.path, self.settings.scratch)
        advice = partial(launch_hints, folder, self.job, self.own_flags)
        is_process = not (self.job.has_ranks or self.job.is_command)
        conclusion = Conclusion(folder, talk, self.settings.report, self.as_json, advice, is_process, places)
        if part is None:
            conclusion.draw(info, ending)
            return
        conclusion.gather()
        ended = now()
        if part.end(ending.status, ended, conclusion.measure_peaks(info, ending.status)):
            info.id, info.token = folder.path.name, part.token
            conclusion.draw(info, ending)
            part.concluded(ending.status, ended)
        elif ending.status:
            talk.say(f"the job ended with status {ending.status} on this host")

    def _run_job(self, folder: RunFolder, info: RunInfo, talk: Talk, part: Participation | None = None) -> Ending:
        """How the job ended. What is raised here is raised before the job has started."""
        warn_of_little_space(folder, talk)
        build_native_helper(self.settings, talk)
        installed = is_installed()
        armed_by_torch = installed and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
        # A script may import deepspeed before torch: only Python's start is early enough.
        bootstrap = not armed_by_torch or self.settings.engine == "dsprof"
        env = environment(os.environ, folder, self.settings, bootstrap=bootstrap, knobs=self.knobs)
        command = self.job.command(folder, installed=installed)
        if part is not None:
            env[MEETING] = str(part.file)
            joined = "made" if part.founded else "found"
            talk.say(f"one run of {info.nnodes} hosts, {joined} here; the host of rank 0 will draw the verdict")
        talk.say(f"run folder: {shown(folder.path)}")
        for text in left_behind.tidy(folder.path, self.settings.scratch):
            talk.say(text)
        limit, ranks = parse_size(self.settings.limit), self.job.world_size or 1
        place = scratch.choose(folder.path, self.settings.scratch, limit, ranks)
        if place.folder is not None and not place.in_memory:
            talk.say(f"captures are written to {place.folder} and copied into it")
        if self.settings.engine == "dsprof":
            talk.say("engine: dsprof, where the script imports deepspeed")
        before = None if self.job.is_command or self.job.has_ranks else partial(end_with, os.getpid())
        info.started_ns = time.monotonic_ns()
        with suppress(OSError):  # of a launcher that is killed, this is all that is known
            if part is None or part.founded:
                folder.write_info(info)
        watch = self._hang_watch(lambda: folder if part is None else part.folder, talk)
        try:
            ending = Supervisor(talk.say, None if watch is None else watch.look).run(command, env, before=before)
        except OSError as error:
            raise LaunchError(f"{command[0]}: cannot be started ({error.strerror or error})", status=126) from error
        if ending.hung and watch is not None:
            watch.end_ranks()
        return ending

    def _hang_watch(self, folder: Callable[[], RunFolder], talk: Talk) -> HangWatch | None:
        timeout_s = parse_hang_timeout(self.settings.hang_timeout)
        if not timeout_s:
            return None
        places = scratch.places(folder().path, self.settings.scratch)
        return HangWatch(folder, talk, timeout_s, abort=self.settings.on_hang == "abort", places=places)


def note_rerun(folder: RunFolder, command: list[str]) -> None:
    """Keep what it takes to run the job again, in a file of the user's own. The environment is that of whoever runs it
    again: it is not written anywhere."""
    with suppress(OSError):  # no profile is lost with it
        again = {"command": command, "cwd": os.getcwd(), "python": sys.executable, "printed": printed_to()}
        folder.write_rerun(again)


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into Stopped, where they would have ended the process."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise Stopped(number)

    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def warn_of_little_space(folder: RunFolder, talk: Talk) -> None:
    """Say so before the job starts if its capture may not fit."""
    with suppress(OSError):
        free = shutil.disk_usage(folder.path).free
        if free < LITTLE_SPACE:
            space = f"{free / 2**20:.1f} MiB free for {shown(folder.path)}"
            talk.warn(f"warning: {space}; what does not fit is not captured")


def build_native_helper(settings: Settings, talk: Talk) -> None:
    """Have the native helper ready before the ranks want it. Only `native = on` makes a failure a LaunchError."""
    from dsprof.collectors.arming import free_threaded
    from dsprof.collectors.native import build

    why = free_threaded.refusal()
    if why is not None and settings.native == "on":
        raise LaunchError(f"no native helper: {why}")
    if why is not None:
        talk.warn(f"warning: {why}")
    if settings.native == "off" or why is not None:
        return
    try:
        build.ensure(Path(sys.executable), talk.say)
    except build.NoHelper as error:
        if settings.native == "on":
            raise LaunchError(f"no native helper: {error}; --native auto records in Python instead") from error
        instead = "a job on the CPU is recorded in Python, which is slower, and of one on GPUs only phases and steps"
        talk.warn(f"warning: no native helper: {error}; {instead}")


def is_installed() -> bool:
    """Whether torch will find our entry point: dsprof may also be merely importable, from a checkout."""
    return any(point.name == "dsprof" for point in importlib.metadata.entry_points(group="torch.backends"))


def environment(
    base: Mapping[str, str],
    folder: RunFolder,
    settings: Settings,
    *,
    bootstrap: bool,
    knobs: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """The job's environment: the user's own, armed, and with the knobs that --set turns."""
    env = {**base, "DSPROF": "1", "DSPROF_RUN": str(folder.path), "DSPROF_LEVEL": settings.level}
    env["DSPROF_RANKS"] = settings.ranks
    env |= {"DSPROF_STEPS": settings.steps, "DSPROF_DELAY": settings.delay, "DSPROF_DURATION": settings.duration}
    env |= {"DSPROF_DEEP": settings.deep}
    if settings.deep not in ("", NEVER):
        env.setdefault("KINETO_LOG_LEVEL", KINETO_SILENT)
    env["DSPROF_LIMIT"] = settings.limit
    env["DSPROF_WITHOUT"] = settings.without
    env["DSPROF_SCRATCH"] = scratch.absolute(settings.scratch)
    env["DSPROF_EXIT_WAIT"] = settings.exit_wait
    env["DSPROF_NATIVE"] = settings.native
    env["DSPROF_HANG_TIMEOUT"] = settings.hang_timeout
    env.pop("DSPROF_ENGINE", None)
    env.pop(OVERRIDES, None)
    if knobs:
        variables = {key.partition(".")[2]: value for key, value in knobs.items() if key.startswith("env.")}
        env |= variables
        env[OVERRIDES] = json.dumps({key: None if key.startswith("env.") else value for key, value in knobs.items()})
    if settings.engine == "dsprof":
        env["DSPROF_ENGINE"] = "dsprof"
    if bootstrap:
        starter = str(home() / "dsprof" / "collectors" / "bootstrap")
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [starter, base.get("PYTHONPATH", "")]))
        env["DSPROF_HOME"] = str(home())
    return env


def versions() -> dict[str, str]:
    """Of what matters to a trace, without importing any of it."""
    found = {"dsprof": dsprof.__version__, "python": platform.python_version()}
    with suppress(importlib.metadata.PackageNotFoundError):
        found["torch"] = importlib.metadata.version("torch")
    return found
