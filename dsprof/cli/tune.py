"""`dsprof tune`: propose, predict, verify, keep, and again, until nothing worth it is left."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dsprof.launch import LaunchError
from dsprof.launch.again import RepeatedJob, beside
from dsprof.names import new_run_id
from dsprof.redact import redact_data
from dsprof.run import DEFAULT_PARENT, RunError, RunFolder

from .runs import UNREADABLE, fail, find_run, reading
from .trials import StepsOption, YesOption, changed_files, findings_of, place_beside, refuse_to_save, runner, say, split

if TYPE_CHECKING:
    from dsprof.fix import Attempt, Journal, Proposal

NOTHING_KEPT: Final = 4
"""Exit status; that of `dsprof fix` where it is undecided."""
JOURNAL: Final = "tune.json"
PATCH: Final = "tune.patch"


def command(
    job: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN | SCRIPT.py | -- FLAGS SCRIPT.py",
            show_default=False,
            help="A run, or what to run first: the words of `dsprof run`, after `--` where there are flags among them. "
            f"Default: the newest run in {DEFAULT_PARENT}",
        ),
    ] = None,
    *,
    budget: Annotated[
        float, typer.Option("--budget", metavar="SECONDS", min=1, help="How long all jobs together may run.")
    ] = 3600.0,
    most: Annotated[
        int, typer.Option("--changes", metavar="N", min=1, max=1000, help="How many changes to try at most.")
    ] = 12,
    pairs: Annotated[
        int, typer.Option("--pairs", metavar="N", min=3, max=50, help="Pairs of jobs for one change at most.")
    ] = 6,
    steps: StepsOption = None,
    yes: YesOption = False,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="The result as JSON, on stdout.")] = False,
) -> int:
    """Try what a run's findings offer, keep what pays, and try again, until nothing is left that should save 2 %.

    Each change is predicted, then measured as by `dsprof fix --verify`: with and without it, in turns. None
    of your files is changed: at the end you are told what pays and how to apply it. A change whose job fails or hangs
    is withdrawn, and the next one is tried. Interrupted, the same command goes on where it stopped. The exit status is
    0 if a change is kept, 4 if none is.
    """
    from dsprof.fix import Journal, Tuning, Unreadable, joint_proposals, proposals

    folder = _run_of(job or [])
    run = runner(folder, steps)
    refuse_to_save(folder, yes=yes)
    place = place_beside(folder, "tune", steps)

    def propose(path: Path) -> list[Proposal]:
        found = findings_of(RunFolder(path))
        return [*proposals(found), *joint_proposals(found)]

    try:
        with reading(folder):
            findings_of(folder)
        journal = Journal.read(place / JOURNAL)
    except RunError as error:
        fail(error, UNREADABLE)
    except Unreadable as error:
        raise LaunchError(str(error), UNREADABLE) from error
    say(f"tuning in {place}")
    Tuning(folder.path, place, propose, run, say, budget, most, pairs).tune(journal)
    if as_json:
        print(json.dumps(redact_data(journal.to_dict())))
    else:
        _tell(folder, place, journal)
    return 0 if journal.kept else NOTHING_KEPT


def _run_of(words: list[str]) -> RunFolder:
    """The run that is named, or that of a job which is run now. Raises LaunchError."""
    if len(words) < 2 and not any(word.endswith(".py") for word in words):
        try:
            return find_run(Path(words[0] if words else DEFAULT_PARENT))
        except RunError as error:
            if not words or not words[0].startswith("-"):
                fail(error, UNREADABLE)
    again = RepeatedJob.of_words(words, split(words), python=sys.executable, cwd=os.getcwd())
    if not again.job:
        raise LaunchError("nothing to run: give a run, a script, or -- and the words of `dsprof run`")
    script = next((word for word in again.job if word not in ("-m", "--")), "run")
    parent = Path(DEFAULT_PARENT).absolute()
    parent.mkdir(exist_ok=True)
    path = parent / new_run_id(Path(script).stem)
    say(f"the job as it is, in {path}")
    why = again.run(path, {}, say)
    folder = RunFolder(path)
    try:
        status = folder.read_info().status
    except RunError:
        status = None
    if status != 0:
        how = f"ended with status {status}" if status is not None else "left no run"
        raise LaunchError(f"the job {why or how}; what it wrote is in {beside(path, 'txt')}", status or 2)
    say(f"interrupted, this goes on with: dsprof tune {path}")
    return folder


def _tell(folder: RunFolder, place: Path, journal: Journal) -> None:
    """What was tried, and what it takes to apply what is kept."""
    from dsprof.fix import CannotEdit, Proposal

    for line in table(journal):
        print(line)
    print(f"\nended: {journal.ended}")
    if journal.together is not None:
        print(f"all together: {_measured(journal.together)}, {journal.together['outcome']}")
    if not journal.kept:
        print("nothing is kept: the job is best as it is, as far as was tried")
        return
    kept = Proposal("", "", journal.kept)
    print(f"kept: {kept.shown}\n")
    try:
        found, cwd = changed_files(folder, journal.kept)
        diff = found.diff(cwd)
        for line in [*diff.splitlines(), *(f"by hand: {one}" for one in found.left)]:
            print(f"  {line}".rstrip())
        if diff:
            (place / PATCH).write_text(diff, encoding="utf-8", newline="")
            print(f"\npatch  {place / PATCH}")
    except (CannotEdit, OSError) as error:
        print(f"  by hand: {error}")
    print(f"apply  dsprof fix {folder.path} {kept.shown} --in-place")
    print(f"or     dsprof run {kept.shown} ...")


def table(journal: Journal) -> list[str]:
    """A line for each change that was tried: what was predicted, how trials corrected that, and what was measured."""
    from dsprof.analyzer.text import aligned

    if not journal.attempts:
        return ["nothing was tried"]
    rows: list[tuple[str, ...]] = [
        ("change", "predicted", "corrected", "measured, with 95 % interval", "outcome", "in interval")
    ]
    rows += [_row(one) for one in journal.attempts]
    lines = aligned(rows, left=len(rows[0]))
    return [line for pair in zip(lines, ["", *map(_why, journal.attempts)], strict=True) for line in pair if line]


def _row(one: Attempt) -> tuple[str, ...]:
    held = {True: "yes", False: "no", None: ""}[one.held]
    change = one.proposal.shown.replace("--set ", "")
    return change, _saved(one.predicted), _saved(one.corrected), _measured(one.measured), one.outcome or "-", held


def _why(one: Attempt) -> str:
    why = "" if one.measured is None else one.measured.get("why", "")
    return f"    {why}" if why else ""


def _saved(gain: Mapping[str, Any] | None) -> str:
    from dsprof.analyzer.text import ms, percent

    return "-" if gain is None else f"{'-' if gain['ms'] < 0 else ''}{ms(abs(gain['ms']))} ({percent(gain['percent'])})"


def _measured(measured: Mapping[str, Any] | None) -> str:
    from dsprof.analyzer.text import with_interval

    if not measured or "ms" not in measured:
        return "-"
    return with_interval(measured["ms"], measured["low"], measured["high"], measured["percent"])
