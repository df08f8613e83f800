"""After the job: how it ended, the analysis, the verdict. Nothing that goes wrong here is more than a warning."""

from __future__ import annotations

import datetime
import json
import shutil
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from .claim import ERROR_LOG
from .run import RankExit, RunError, RunFolder, RunInfo, failures
from .talk import Talk, shown

FULL: Final = 64 << 10
"""A disk with fewer bytes free is full."""


def now() -> str:
    """UTC, for run.json."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class Conclusion:
    """What is done with a run whose job has ended."""

    folder: RunFolder
    talk: Talk
    report: bool = True
    """Write the HTML report and the TensorBoard files."""
    as_json: bool = False
    """End with findings.json as one line instead of the verdict."""

    def draw(self, info: RunInfo, status: int) -> None:
        """Write the job's end into run.json, analyze, and say what came of it and what to do next."""
        self._attempt("recording how the job ended", lambda: self._record_end(info, status))
        analysis = self._attempt("the analysis", self._analyze)
        if analysis is not None:
            self._attempt("the verdict", lambda: self._show(analysis))
        with suppress(OSError):
            if shutil.disk_usage(self.folder.path).free < FULL:
                self.talk.warn(f"warning: the disk of {shown(self.folder.path)} is full; the capture may be incomplete")
        if not self.as_json:
            self._say_next()

    def _attempt(self, what: str, act: Callable[[], Any]) -> Any:
        """What `act` returns; None and one line if it fails, with the traceback in the run folder."""
        try:
            return act()
        except RunError as error:  # says in itself what is wrong
            self.talk.warn(f"warning: {error}")
        except Exception as error:
            where = shown(self.folder.path)
            self.talk.warn(f"warning: {what} failed ({type(error).__name__}: {error}); the capture is kept in {where}")
            with suppress(OSError), (self.folder.path / ERROR_LOG).open("a") as log:
                traceback.print_exc(file=log)
        return None

    def _record_end(self, info: RunInfo, status: int) -> None:
        info.ended, info.status, info.exits = now(), status, self.folder.read_exits()[0]
        if status:
            self.talk.say(describe_end(status, info.exits))
        self.folder.write_info(info)

    def _analyze(self) -> Any:
        from dsprof import reports

        return reports.finish(self.folder, report=self.report)

    def _show(self, analysis: Any) -> None:
        if self.as_json:
            print(json.dumps(json.loads(self.folder.findings_json.read_bytes())), file=sys.stderr)
        elif not self.talk.quiet:
            from dsprof.reports import terminal

            terminal.render(analysis, sys.stderr, color=None, width=None)

    def _say_next(self) -> None:
        run = shown(self.folder.path)
        if self.folder.report_html.exists():
            self.talk.say(f"report: {shown(self.folder.report_html)}")
        self.talk.say(f"next: dsprof report {run}")
        self.talk.say(f"      dsprof tensorboard {run}")


def describe_end(status: int, exits: list[RankExit]) -> str:
    """One line: the job's status, and the rank it comes from where that is known."""
    first = next(iter(failures(exits)), None)
    if first is None:  # interrupted, or a command of which no more is known
        return f"the job ended with status {status}"
    return f"the job ended with status {status}: rank {first.rank} on {first.host} failed first ({first.how})"
