"""The job of a run, run again: as `dsprof run` ran it, in a folder of its own, with other knobs turned."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from dsprof.run import RunFolder

from .job import LaunchError
from .supervise import end_with

OF_THE_FIRST_RUN: Final = {
    "-o": True, "--output": True, "--force": False, "--json": False, "-q": False, "--quiet": False,
    "--no-report": False,
}  # fmt: skip
"""Flags that are not those of a job that is run again -> whether a value follows."""
OF_A_TRIAL: Final = ("--force", "--no-report", "-q", "--on-hang", "abort")
"""Flags of such a job: nobody reads its report, and one that hangs is to end."""
TRACKERS: Final = {
    "WANDB_MODE": "offline", "WANDB_DIR": "{folder}", "MLFLOW_TRACKING_URI": "file://{folder}/mlruns",
    "NEPTUNE_MODE": "offline", "CLEARML_OFFLINE_MODE": "1",
}  # fmt: skip
"""Variables by which trackers write beside the folder of a trial, which is no experiment of the user's."""
KILL_AFTER_S: Final = 30.0
"""How long a job that is told to end by SIGTERM may take for it."""
LOOK_S: Final = 0.2

Say = Callable[[str], None]


@dataclass(frozen=True)
class RepeatedJob:
    """How a job is run again.

    python: the interpreter; cwd: where it ran
    flags:  of `dsprof run`, but those of the first run alone
    job:    what follows them: a script, `-m`, or `--` and a command
    """

    python: str
    flags: tuple[str, ...]
    job: tuple[str, ...]
    cwd: str

    @staticmethod
    def of_words(words: Sequence[str], job: int, *, python: str, cwd: str) -> RepeatedJob:
        """words: what follows `dsprof run`; job: index of the first word of the job in them."""
        return RepeatedJob(python, tuple(_of_every_run(words[:job])), tuple(words[job:]), cwd)

    @staticmethod
    def of_run(folder: RunFolder, split: Callable[[list[str]], int]) -> RepeatedJob:
        """That of a run. split: where the job begins in the words after `dsprof run`. Raises LaunchError."""
        try:
            again = json.loads(folder.rerun_json.read_text())
            words, cwd, python = [str(word) for word in again["command"]], str(again["cwd"]), str(again["python"])
        except (OSError, ValueError, KeyError, TypeError):
            raise LaunchError(
                f"{folder.path}: how to run this job again is not known, as `dsprof run` did not start it here; run it "
                "once with `dsprof run`"
            ) from None
        if words[:2] != ["dsprof", "run"]:
            raise LaunchError(f"{folder.path}: it was started by {words[0]}; run it once with `dsprof run`")
        if not Path(cwd).is_dir():
            raise LaunchError(f"{cwd}: the job ran there, and there is no such folder now")
        python = python if Path(python).is_file() else sys.executable
        return RepeatedJob.of_words(words[2:], split(words[2:]), python=python, cwd=cwd)

    def line(self, path: Path, settings: Mapping[str, str]) -> list[str]:
        """The command line that runs it into a run folder. settings: what `--set` is to turn, as it is typed, by key;
        of the other keys stays what the first run turned."""
        turned = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        kept = _without_settings(self.flags, settings)
        return [self.python, "-m", "dsprof", "run", "-o", str(path), *OF_A_TRIAL, *turned, *kept, *self.job]

    def run(
        self, path: Path, settings: Mapping[str, str], say: Say, limit_s: float | None = None, trial: str = ""
    ) -> str:
        """Run it to its end; what it writes goes into `path` with .txt.

        trial: what its ranks are told by DSPROF_TRIAL; it is then no experiment of the user's, and trackers write into
        `path` with .trackers. Gives why it was ended; empty: it ended by itself. At Ctrl-C it raises KeyboardInterrupt
        when the job has ended; its folder is gone then.
        """
        environment = dict(os.environ)
        if trial:
            place = beside(path.absolute(), "trackers")
            place.mkdir(exist_ok=True)
            environment |= {name: value.format(folder=place) for name, value in TRACKERS.items()}
            environment["DSPROF_TRIAL"] = trial
        line = self.line(path, settings)
        with open(beside(path, "txt"), "w", encoding="utf-8") as output:
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            before = partial(end_with, os.getpid())
            child = subprocess.Popen(line, cwd=self.cwd, env=environment, preexec_fn=before, **streams)
            try:
                return _await(child, path, say, limit_s)
            finally:
                with suppress(OSError):  # there is none, or something is in it
                    beside(path, "trackers").rmdir()


def beside(path: Path, ending: str) -> Path:
    """What lies beside a run folder under its name: `original-1.txt`, what its job wrote."""
    return path.with_name(f"{path.name}.{ending}")


def _await(child: subprocess.Popen[bytes], path: Path, say: Say, limit_s: float | None) -> str:
    """Wait for a job's end. Its folder does not count as that of a job that ended where Ctrl-C ended it; a second one
    kills it."""
    began, told_to_end = time.monotonic(), 0.0
    interrupted: KeyboardInterrupt | None = None
    while child.poll() is None:
        try:
            child.wait(None if limit_s is None else LOOK_S)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
            if told_to_end and now - told_to_end > KILL_AFTER_S:
                child.kill()
            elif limit_s is not None and not told_to_end and not interrupted and now - began > limit_s:
                child.send_signal(signal.SIGTERM)
                told_to_end = now
        except KeyboardInterrupt as typed:
            child.send_signal(signal.SIGINT)  # which it passes over where the terminal has sent it one, too
            if interrupted is None:
                say("interrupted: waiting for the job to end (Ctrl-C again kills it)")
            interrupted = typed
    if interrupted is not None:
        shutil.rmtree(path, ignore_errors=True)
        say("the same command goes on with this job")
        raise interrupted
    return f"it was not done after {limit_s:.0f} s, and was ended" if told_to_end else ""


def _of_every_run(words: Sequence[str]) -> list[str]:
    """Flags of `dsprof run` without those of the first run alone."""
    kept: list[str] = []
    flags = iter(words)
    for word in flags:
        name, equals = _name(word)
        if name not in OF_THE_FIRST_RUN:
            kept.append(word)
        elif OF_THE_FIRST_RUN[name] and not equals and word == name:
            next(flags, None)
    return kept


def _without_settings(words: Sequence[str], turned: Mapping[str, str]) -> list[str]:
    """Flags of `dsprof run` without what they turn of these keys."""
    kept: list[str] = []
    flags = iter(words)
    for word in flags:
        name, equals = _name(word)
        if name != "--set":
            kept.append(word)
            continue
        change = word.partition("=")[2] if equals else next(flags, "")
        if change.partition("=")[0].strip() not in turned:
            kept += ["--set", change]
    return kept


def _name(word: str) -> tuple[str, bool]:
    """A flag without its value, and whether an equals sign followed it."""
    name, equals, _ = word.partition("=") if word.startswith("--") else (word[:2], "", "")
    return name, bool(equals)
