"""`dsprof fix`: what to change, and on request the proof: both jobs in turns, predicted against measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dsprof.launch import LaunchError
from dsprof.redact import redact_data
from dsprof.run import DEFAULT_PARENT, RunError, RunFolder

from .run import read_changes
from .runs import UNREADABLE, RunArgument, fail, find_run, reading
from .trials import (
    StepsOption,
    YesOption,
    changed_files,
    findings_of,
    keep,
    place_beside,
    refuse_to_save,
    runner,
    say,
)

if TYPE_CHECKING:
    from dsprof.fix import LossCheck, Proposal

STATUS: Final = {"kept": 0, "withdrawn": 1, "undecided": 4}
"""Outcome -> exit status."""


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
    steps: StepsOption = None,
    yes: YesOption = False,
    write: Annotated[
        bool,
        typer.Option("--write", metavar="", help="Write the changed files beside the originals, as NAME.fixed.EXT."),
    ] = False,
    in_place: Annotated[bool, typer.Option("--in-place", metavar="", help="Change the files themselves.")] = False,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="The result as JSON, on stdout.")] = False,
) -> int:
    """List the changes that a run's findings offer; write one into your files, or prove that it pays.

    The job is run again as it was and with the change, in turns and in processes of their own, until the difference of
    the pairs decides. It has to end by itself or by --steps, and should take at least 50 steps. The exit status is 0 if
    the change is kept, 1 if it is withdrawn as it does not pay or fails, 4 if that is undecided. Interrupted, it goes
    on where it stopped.
    """
    from dsprof.fix import Proposal, proposals

    try:
        folder = find_run(run)
        with reading(folder):
            findings = findings_of(folder)
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
        return _list(folder, findings, [chosen] if changes else offered, asked=bool(changes), as_json=as_json)
    return _verify(folder, chosen, pairs, steps, yes=yes, as_json=as_json)


def _list(
    folder: RunFolder, findings: Mapping[str, Any], offered: Sequence[Proposal], *, asked: bool, as_json: bool
) -> int:
    """asked: by `--set`, and not one of those that the run offers, by number."""
    if as_json:
        listed = [{"code": one.code, "title": one.title, "set": dict(one.knobs), "gain": one.gain} for one in offered]
        print(json.dumps(redact_data(listed)))
        return 0
    from dsprof.knobs.memory import in_words_with

    facts = folder.read_info().facts_by_kind()
    for place, one in enumerate(offered, 1):
        print(f"{place}. {'  '.join(filter(None, (one.code, one.title)))}")
        print(f"   {_predicted(one.gain)}")
        memory = in_words_with(one.knobs, findings, facts)
        if memory:
            print(f"   memory {memory}")
        _show_files(folder, one.knobs)
        print(f"   try    dsprof run {one.shown} ...")
        print(f"   prove  dsprof fix {folder.path} {one.shown if asked else f'-n {place}'} --verify")
    return 0


def _show_files(folder: RunFolder, knobs: Mapping[str, Any]) -> None:
    """The diff, indented; or why there is none."""
    from dsprof.fix import CannotEdit

    try:
        found, cwd = changed_files(folder, knobs)
    except (CannotEdit, OSError) as error:
        print(f"   files  {error}")
        return
    for line in [*found.left, *found.diff(cwd).splitlines()]:
        print(f"     {line}".rstrip())


def _write(folder: RunFolder, chosen: Proposal, *, in_place: bool) -> int:
    """Write the changed files. Raises LaunchError, with nothing written, where one of them cannot be."""
    from dsprof.fix import CannotEdit

    try:
        found, _ = changed_files(folder, chosen.knobs)
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
    from dsprof.analyzer.text import with_interval

    return f"gain   {with_interval(gain['ms'], gain['low'], gain['high'], gain['percent'])}"


def _verify(folder: RunFolder, chosen: Proposal, pairs: int, steps: int | None, *, yes: bool, as_json: bool) -> int:
    from dsprof.analyzer.text import with_interval
    from dsprof.fix import Turns, slug

    run = runner(folder, steps)
    refuse_to_save(folder, yes=yes)
    place = place_beside(folder, f"fix-{slug(chosen.knobs)}", steps)
    say(f"comparing in {place}: {chosen.shown}")
    whole, predicted = chosen.is_of_whole_run, chosen.interval_ms
    comparison = Turns(place, chosen.knobs, run, say, pairs, whole=whole, predicted=predicted).compare()
    verified, decision = comparison.to_dict(), comparison.decision
    keep(folder, chosen, verified)
    if as_json:
        shown = redact_data(dict(chosen.knobs))
        print(json.dumps({"code": chosen.code, "set": shown, "predicted": chosen.gain, "measured": verified}))
    if comparison.failed:
        raise LaunchError(comparison.why, STATUS[comparison.outcome])
    if not as_json and decision is not None:
        measured = with_interval(decision.saved_ms, decision.low, decision.high, decision.percent)
        print(f"predicted  {_predicted(chosen.gain).removeprefix('gain   ')}")
        print(f"measured   {measured}, {len(comparison.pairs)} pairs")
        if comparison.losses is not None:
            print(f"losses     {_told(comparison.losses)}")
        print(f"{comparison.outcome}: {chosen.shown}")
    return STATUS[comparison.outcome]


def _told(losses: LossCheck) -> str:
    if losses.apart is None:
        return f"not compared: {losses.why}"
    from dsprof.analyzer.text import percent

    return losses.broken or f"of the first steps differ by {percent(100 * losses.apart)}, as they may"
