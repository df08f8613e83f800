"""`dsprof fix`: what to change, and on request the proof: both jobs in turns, predicted against measured."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TextIO

import typer

from dsprof.launch import LaunchError
from dsprof.launch.supervise import end_with
from dsprof.redact import redact_data, redact_words
from dsprof.run import DEFAULT_PARENT, RunError, RunFolder

from .run import read_changes
from .runs import UNREADABLE, RunArgument, fail, find_run, reading
from .split import split_at_job

if TYPE_CHECKING:
    from dsprof.fix import Changes, Proposal

STATUS: Final = {"kept": 0, "withdrawn": 1, "undecided": 4}
"""Outcome -> exit status."""
OF_THE_FIRST_RUN: Final = {
    "-o": True, "--output": True, "--force": False, "--json": False, "-q": False, "--quiet": False,
    "--no-report": False,
}  # fmt: skip
"""Flags that are not those of the jobs that are compared -> whether a value follows."""


def command(
    run: RunArgument = Path(DEFAULT_PARENT),
    *,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", show_default=False, help="Try this instead of what the run's findings offer."
        ),
    ] = None,
    number: Annotated[
        int, typer.Option("--number", "-n", metavar="N", min=1, help="Which of the changes that are listed.")
    ] = 1,
    verify: Annotated[
        bool, typer.Option("--verify", metavar="", help="Run the job with and without the change, in turns.")
    ] = False,
    pairs: Annotated[
        int, typer.Option("--pairs", metavar="N", min=3, max=50, help="Pairs of jobs after which it stays undecided.")
    ] = 6,
    yes: Annotated[
        bool,
        typer.Option("--yes", metavar="", help="Also where the job writes checkpoints, which each job overwrites."),
    ] = False,
    write: Annotated[
        bool,
        typer.Option("--write", metavar="", help="Write the changed files beside the originals, as NAME.fixed.EXT."),
    ] = False,
    in_place: Annotated[bool, typer.Option("--in-place", metavar="", help="Change the files themselves.")] = False,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="The result as JSON, on stdout.")] = False,
) -> int:
    """List the changes that a run's findings offer; write one into your files, or prove that it pays.

    The job is run again as it was and with the change, in turns and in processes of their own, until the difference of
    the pairs decides. It has to end by itself, and should take at least 50 steps. The exit status is 0 if the change is
    kept, 1 if it is withdrawn as it does not pay, 4 if that is undecided. Interrupted, it goes on where it stopped.
    """
    from dsprof.fix import Proposal, proposals

    try:
        folder = find_run(run)
        with reading(folder):
            findings = _findings(folder)
    except RunError as error:
        fail(error, UNREADABLE)
    offered = list(proposals(findings))
    if changes:
        knobs = read_changes(changes)
        same = [one for one in offered if dict(one.knobs) == knobs]
        chosen = same[0] if same else Proposal("", "what --set asks for", knobs)
    elif not offered:
        raise LaunchError(
            f"{folder.path}: no finding of this run offers a change that --set can make; give one with --set KEY=VALUE "
            "(`dsprof knobs` lists them)"
        )
    elif number > len(offered):
        raise LaunchError(f"-n {number}: there are {len(offered)}; `dsprof fix {folder.path}` lists them")
    else:
        chosen = offered[number - 1]
    if write or in_place:
        return _write(folder, chosen, in_place=in_place)
    if not verify:
        return _list(folder, [chosen] if changes else offered, as_json=as_json)
    return _verify(folder, findings, chosen, pairs, yes=yes, as_json=as_json)


def _findings(folder: RunFolder) -> dict[str, Any]:
    from dsprof import reports

    if not folder.findings_json.exists():
        reports.finish(folder, report=False)
    found: dict[str, Any] = json.loads(folder.findings_json.read_text())
    return found


def _list(folder: RunFolder, offered: Sequence[Proposal], *, as_json: bool) -> int:
    if as_json:
        print(
            json.dumps(
                [{"code": one.code, "title": one.title, "set": dict(one.knobs), "gain": one.gain} for one in offered]
            )
        )
        return 0
    for place, one in enumerate(offered, 1):
        print(f"{place}. {one.code}  {one.title}")
        print(f"   {_predicted(one.gain)}")
        _show_files(folder, one.knobs)
        print(f"   try    dsprof run {_typed(one)} ...")
        print(f"   prove  dsprof fix {folder.path} -n {place} --verify")
    return 0


def _show_files(folder: RunFolder, knobs: Mapping[str, Any]) -> None:
    """The diff, indented; or why there is none."""
    from dsprof.fix import CannotEdit

    try:
        found, cwd = _files(folder, knobs)
    except (CannotEdit, OSError) as error:
        print(f"   files  {error}")
        return
    for line in [*found.left, *found.diff(cwd).splitlines()]:
        print(f"     {line}".rstrip())


def _files(folder: RunFolder, knobs: Mapping[str, Any]) -> tuple[Changes, Path]:
    """What is to be changed in the user's files, and where the job ran. Raises CannotEdit or OSError."""
    from dsprof.fix import changes

    run = folder.read_info()
    cwd = Path(run.cwd or ".")
    return changes(knobs, run.facts_by_kind(), cwd, run.knobs), cwd


def _write(folder: RunFolder, chosen: Proposal, *, in_place: bool) -> int:
    """Write the changed files. Raises LaunchError, with nothing written, where one of them cannot be."""
    from dsprof.fix import CannotEdit

    try:
        found, _ = _files(folder, chosen.knobs)
        places = {
            path: path.resolve() if in_place else path.with_name(f"{path.stem}.fixed{path.suffix}")
            for path in found.texts
        }
        there = [str(place) for place in places.values() if place.exists() and not in_place]
        if there:
            raise LaunchError(f"{there[0]}: is there already; move it away, or give --in-place to change the original")
        found.write(places)
    except (CannotEdit, OSError) as error:
        raise LaunchError(f"{error}; nothing was written") from error
    for place in places.values():
        print(f"written: {place}")
    for line in found.left:
        print(f"by hand: {line}")
    return 0


def _predicted(gain: Mapping[str, Any] | None) -> str:
    if not gain or gain.get("method") == "none":
        return "gain   not predicted"
    from dsprof.fix import with_interval

    return f"gain   {with_interval(gain['ms'], gain['low'], gain['high'], gain['percent'])}"


def _verify(
    folder: RunFolder, findings: Mapping[str, Any], chosen: Proposal, pairs: int, *, yes: bool, as_json: bool
) -> int:
    from dsprof.fix import Proposal, TrialFailed, Turns, with_interval

    python, words, cwd = _job(folder)
    if not yes and _saves(folder):
        raise LaunchError(
            f"{folder.path}: this job writes checkpoints, and each job of the comparison would write them again, to "
            "the same place; give --yes if that does no harm"
        )
    place = folder.path.with_name(f"{folder.path.name}-fix-{_slug(chosen.knobs)}")
    place.mkdir(mode=0o700, exist_ok=True)
    _say(f"comparing in {place}: {_typed(chosen)}")

    def start(path: Path, knobs: Mapping[str, Any]) -> None:
        flags = Proposal("", "", knobs).flags
        own = ["-o", str(path), "--force", "--no-report", "-q", "--on-hang", "abort"]
        with open(path.with_suffix(".txt"), "w", encoding="utf-8") as output:  # a log of its own
            _run([python, "-m", "dsprof", "run", *own, *flags, *_without(words, knobs)], cwd, output)

    try:
        comparison = Turns(place, chosen.knobs, start, _say, pairs).compare()
    except TrialFailed as failed:
        _keep(folder, chosen, {"outcome": "withdrawn" if failed.side == "changed" else "undecided", "why": str(failed)})
        raise LaunchError(str(failed), status=1 if failed.side == "changed" else 4) from failed
    decision = comparison.decision
    assert decision is not None
    verified = {**decision.to_dict(), "pairs": [list(pair) for pair in comparison.pairs]}
    _keep(folder, chosen, verified)
    if as_json:
        print(
            json.dumps({"code": chosen.code, "set": dict(chosen.knobs), "predicted": chosen.gain, "measured": verified})
        )
    else:
        measured = with_interval(decision.saved_ms, decision.low, decision.high, decision.percent)
        print(f"predicted  {_predicted(chosen.gain).removeprefix('gain   ')}")
        print(f"measured   {measured}, {len(comparison.pairs)} pairs")
        print(f"{decision.outcome}: {_typed(chosen)}")
    return STATUS[decision.outcome]


def _run(line: list[str], cwd: str, output: TextIO) -> None:
    """Run a job to its end. At Ctrl-C it is given the time to end by itself, and its folder does not count as one of a
    job that ended; a second one kills it."""
    parent = os.getpid()
    streams: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
    child = subprocess.Popen(line, cwd=cwd, preexec_fn=partial(end_with, parent), **streams)
    interrupted: KeyboardInterrupt | None = None
    while child.returncode is None:
        try:
            child.wait()
        except KeyboardInterrupt as typed:
            child.send_signal(signal.SIGINT)  # which it passes over where the terminal has sent it one, too
            if interrupted is None:
                _say("interrupted: waiting for the job to end (Ctrl-C again kills it)")
            interrupted = typed
    if interrupted is not None:
        shutil.rmtree(line[line.index("-o") + 1], ignore_errors=True)
        _say("the same command goes on with this job")
        raise interrupted


def _job(folder: RunFolder) -> tuple[str, list[str], str]:
    """The Python, the words of `dsprof run` and the folder that the job ran with. Raises LaunchError."""
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
    return python if Path(python).is_file() else sys.executable, words[2:], cwd


def _without(words: list[str], turned: Collection[str]) -> list[str]:
    """The words of `dsprof run` without what is of the first run alone, and without what it turned of these keys."""
    from . import takes_value

    job = split_at_job(words, takes_value())
    kept: list[str] = []
    flags = iter(words[:job])
    for word in flags:
        name, equals, value = word.partition("=") if word.startswith("--") else (word[:2], "", "")
        if name == "--set":
            change = value if equals else next(flags, "")
            if change.partition("=")[0].strip() not in turned:
                kept += [name, change]
        elif name not in OF_THE_FIRST_RUN:
            kept.append(word)
        elif OF_THE_FIRST_RUN[name] and word == name:
            next(flags, None)
    return kept + words[job:]


def _saves(folder: RunFolder) -> bool:
    """Whether the job was seen to write checkpoints."""

    return any(fact.get("fact") == "checkpoint" for fact in folder.read_info().facts)


def _slug(knobs: Mapping[str, Any]) -> str:
    """A folder's name for a change; another change has another one."""
    text = "-".join(f"{key}-{value}" for key, value in knobs.items())
    shown = "-".join(f"{key}-{redact_data({key: value})[key]}" for key, value in knobs.items())
    slug = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in shown)[:80]
    return slug if slug == text else f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _keep(folder: RunFolder, chosen: Proposal, verified: Mapping[str, Any]) -> None:
    """Have findings.json and the reports of the run tell what was measured."""
    from dsprof import reports

    if not chosen.code:
        return
    info = folder.read_info()
    info.verified = {**info.verified, chosen.code: {"set": dict(chosen.knobs), **verified}}
    folder.write_info(info)
    reports.finish(folder, report=folder.report_html.exists())


def _typed(proposal: Proposal) -> str:
    """The flags of a change as one types them in a shell, without secrets."""
    return shlex.join(redact_words(proposal.flags))


def _say(text: str) -> None:
    print(f"[dsprof] {text}", file=sys.stderr, flush=True)
