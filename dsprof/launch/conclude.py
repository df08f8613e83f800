"""After the job: how it ended, the analysis, the verdict. Nothing that goes wrong here is more than a warning."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from dsprof import regular_files
from dsprof.atomic import write_atomically
from dsprof.names import host_name
from dsprof.permissions import make_folder
from dsprof.redact import redact_text
from dsprof.run import RankExit, RunError, RunFolder, RunInfo, failures, now

from .gather import Gathering
from .oom import note_oom_kills
from .peak import measure_here, note_peaks
from .supervise import HUNG, Ending
from .talk import Talk, shown

FULL: Final = 64 << 10
"""A disk with fewer bytes free is full."""
ENDED_BY_US: Final = f"the job ended with status {HUNG}: dsprof ended it, since it hung (--on-hang abort)"


@dataclass(frozen=True)
class Conclusion:
    """What is done with a run whose job has ended."""

    folder: RunFolder
    talk: Talk
    report: bool = True
    """Write the HTML report and the TensorBoard files."""
    as_json: bool = False
    """End with findings.json as one line instead of the verdict."""
    advice: Callable[[], list[str]] = list
    """What to type instead, of a job that did not end well."""

    is_process: bool = False
    """The job is one process: a script that Python itself runs."""
    places: tuple[Path, ...] = ()
    """What may stand for the run folder on this host while the job runs."""

    def draw(self, info: RunInfo, ending: Ending) -> None:
        """Write the job's end into run.json, analyze, and say what came of it and what to do next."""
        self.gather()
        self._attempt("recording how the job ended", lambda: self._record_end(info, ending))
        self._attempt("measuring what the CPU can compute", lambda: note_peaks(self.folder, info))
        self.judge()

    def judge(self) -> None:
        """Analyze, and say what came of it and what to do next."""
        analysis = self._attempt("the analysis", self._analyze)
        if analysis is not None:
            self._attempt("the verdict", lambda: self._show(analysis))
        with suppress(OSError):
            if shutil.disk_usage(self.folder.path).free < FULL:
                self.talk.warn(f"warning: the disk of {shown(self.folder.path)} is full; the capture may be incomplete")
        if not self.as_json:
            self._attempt("the next commands", lambda: self._say_next(analysis))

    def gather(self) -> None:
        """Have all captures of this host in the run folder, or say which are not."""
        self._attempt("bringing the captures together", Gathering(self.folder, self.talk, self.places).finish)

    def measure_peaks(self, info: RunInfo, status: int) -> list[dict[str, Any]]:
        """What the CPU of this host, one of several of the run, can compute, for `HostPart.cpu_peaks`."""
        ended = replace(info, status=status)
        return self._attempt("measuring what the CPU can compute", lambda: measure_here(self.folder, ended)) or []

    def _attempt(self, what: str, act: Callable[[], Any]) -> Any:
        """What `act` returns; None and one line if it fails, with the traceback in the run folder."""
        try:
            return act()
        except RunError as error:  # says in itself what is wrong
            self.talk.warn(f"warning: {error}")
        except Exception as error:
            where = shown(self.folder.path)
            self.talk.warn(f"warning: {what} failed ({type(error).__name__}: {error}); the capture is kept in {where}")
            with suppress(OSError):
                self.folder.log_error()
        return None

    def _record_end(self, info: RunInfo, ending: Ending) -> None:
        info.ended, info.ended_ns, info.status = now(), ending.ended_ns, ending.status
        with suppress(OSError):  # no exit is less than no end at all
            self._record_exit(ending)
        info.exits = self.folder.read_exits()[0]
        self._attempt("asking the kernel whom it killed for want of memory", lambda: note_oom_kills(self.folder, info))
        if info.status:
            self.talk.say(ENDED_BY_US if ending.hung else describe_end(info.status, info.exits))
            hints = self.advice()
            info.hints = [redact_text(hint) for hint in hints]
            for hint in hints:  # as it is to be typed
                self.talk.warn(hint)
        self.folder.write_info(info)

    def _record_exit(self, ending: Ending) -> None:
        """Write down how the process that we started ended, if it was a rank itself.

        It is none where it is torchrun, or a script that spawns its ranks: that these ended well or badly is not to
        be read from it. A script that failed before there was any rank is rank 0.
        """
        host = host_name()
        place = self.folder.rank_of(host, ending.pid)
        if place is None and self.is_process and ending.status and not any(self.folder.captures()):
            place = 0, 0
        file = self.folder.exits / f"{host}.json"
        if place is None or file.exists():
            return
        rank, restart = place
        end = RankExit(
            rank=rank,
            host=host,
            pid=ending.pid,
            code=ending.code,
            signal=ending.signal,
            ended_ns=ending.ended_ns,
            restart=restart,
            stopped=ending.interrupted,
        )
        make_folder(self.folder.exits)
        write_atomically(file, json.dumps([asdict(end)], indent=2) + "\n")

    def _analyze(self) -> Any:
        from dsprof import reports

        return reports.finish(self.folder, report=self.report)

    def _show(self, analysis: Any) -> None:
        if self.as_json:
            print(json.dumps(regular_files.read_json(self.folder.findings_json)), file=sys.stderr)
        elif not self.talk.quiet:
            from dsprof.reports import terminal

            terminal.render(analysis, sys.stderr, color=None, width=None)

    def _say_next(self, analysis: Any) -> None:
        from dsprof.reports import wording

        run = shown(self.folder.path)
        if self.folder.report_html.exists():
            self.talk.say(f"report: {shown(self.folder.report_html)}")
        self.talk.say(f"next: dsprof report {run}")
        self.talk.say(f"      dsprof tensorboard {run}")
        for command, does in [] if analysis is None else wording.next_commands(analysis, run):
            self.talk.say(f"      {command}    # {does}")


def describe_end(status: int, exits: list[RankExit]) -> str:
    """One line: the job's status, and the rank it comes from where that is known."""
    first = next(iter(failures(exits)), None)
    if first is None:  # interrupted, or a command of which no more is known
        return f"the job ended with status {status}"
    if len(exits) == 1:
        return f"the job ended with status {status}{'' if first.signal is None else f' ({first.how})'}"
    return f"the job ended with status {status}: rank {first.rank} on {first.host} failed first ({first.how})"
