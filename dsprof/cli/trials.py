"""What `dsprof fix --verify` and `dsprof tune` share: the findings of a run, its job run again, what is told of it."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dsprof.launch import LaunchError
from dsprof.launch.again import RepeatedJob
from dsprof.launch.outputs import places_of, written_between
from dsprof.run import RunFolder, RunInfo

from .split import split_at_job

if TYPE_CHECKING:
    from dsprof.fix import Changes, Proposal, Run

StepsOption = Annotated[
    int | None,
    typer.Option(
        "--steps",
        metavar="N",
        min=10,
        show_default=False,
        help="End each job after so many steps, on all ranks at the same one. Default: the job ends by itself.",
    ),
]
YesOption = Annotated[
    bool,
    typer.Option("--yes", metavar="", help="Also where the job writes files, which each job overwrites."),
]
TIMES_THE_FIRST: Final = 5.0
LONGER_BY_S: Final = 120.0
"""A job may take so many times as long as the first run did, and so much longer, before it is ended."""
MOST_NAMED: Final = 3
"""Files that a job wrote which a message names."""


def say(text: str) -> None:
    print(f"[dsprof] {text}", file=sys.stderr, flush=True)


COMPARISONS: Final = ("tune", "fix-")
"""What folders of `place_beside` are called, behind the name of the run."""


def place_beside(folder: RunFolder, what: str, steps: int | None) -> Path:
    """The folder of the jobs that are compared, made where it is not there: jobs of another length have another."""
    place = folder.path.with_name(f"{folder.path.name}-{what}{f'-{steps}-steps' if steps else ''}")
    place.mkdir(mode=0o700, exist_ok=True)
    return place


def findings_of(folder: RunFolder) -> dict[str, Any]:
    """findings.json, made where it is not there yet. Raises RunError."""
    from dsprof import reports

    if not folder.findings_json.exists():
        reports.finish(folder, report=False)
    found: dict[str, Any] = json.loads(folder.findings_json.read_text())
    return found


def split(words: list[str]) -> int:
    """Where the job begins in the words after `dsprof run`."""
    from . import takes_value

    return split_at_job(words, takes_value())


def refuse_to_save(folder: RunFolder, *, yes: bool) -> None:
    """Raises LaunchError for a job that was seen to write checkpoints, or that wrote other files while it ran."""
    if yes:
        return
    again = "and each job of the comparison would write them again, to the same place; give --yes if that does no harm"
    info = folder.read_info()
    if any(fact.get("fact") == "checkpoint" for fact in info.facts):
        raise LaunchError(f"{folder.path}: this job writes checkpoints, {again}")
    written = _written(folder, info)
    if written:
        more = f" and {len(written) - MOST_NAMED} more" if len(written) > MOST_NAMED else ""
        named = ", ".join(str(path) for path in written[:MOST_NAMED])
        raise LaunchError(f"{folder.path}: this job wrote files ({named}{more}), {again}")


def _written(folder: RunFolder, info: RunInfo) -> list[Path]:
    """Files that the job of a run wrote, as far as they lie where it ran or where its command line says."""
    try:
        began, ended = (datetime.datetime.fromisoformat(one) for one in (info.started, info.ended or ""))
    except ValueError:  # a run that was imported, say
        return []
    places = places_of(info.command, Path(info.cwd or "."))
    found = written_between(places, began.timestamp(), ended.timestamp() + 1, _printed(folder))
    return [path for path in found if not _is_of_a_comparison(path, folder, ended.timestamp())]


def _is_of_a_comparison(path: Path, folder: RunFolder, ended_s: float) -> bool:
    """Whether a file that was written after the run had ended lies in a folder of `place_beside`: an earlier comparison
    may have begun at once."""
    run, file = folder.path.resolve(), path.resolve()
    if not file.is_relative_to(run.parent) or path.stat().st_mtime <= ended_s:
        return False
    first, *inside = file.relative_to(run.parent).parts
    return bool(inside) and first.startswith(tuple(f"{run.name}-{what}" for what in COMPARISONS))


def _printed(folder: RunFolder) -> list[str] | None:
    """The files that have what the job printed; None: that is not known."""
    try:
        again = json.loads(folder.rerun_json.read_text())
    except (OSError, ValueError):
        return None
    printed = again.get("printed") if isinstance(again, dict) else None
    return [str(path) for path in printed] if isinstance(printed, list) else None


def runner(folder: RunFolder, steps: int | None) -> Run:
    """What runs the job of a run again, up to so many steps; None: to its end. Raises LaunchError."""
    from dsprof.knobs import typed

    if folder.read_info().nnodes:
        raise LaunchError(
            f"{folder.path}: a job of several hosts is not run again from one of them; compare runs by hand"
        )
    again, limit_s = RepeatedJob.of_run(folder, split), _longest(folder)
    trial = json.dumps({"steps": steps or 0})

    def run(path: Path, knobs: Mapping[str, Any]) -> str:
        return again.run(path, {key: typed(key, value) for key, value in knobs.items()}, say, limit_s, trial)

    return run


def _longest(folder: RunFolder) -> float | None:
    """Seconds after which a job of a comparison is ended; None: the first run does not say how long it took."""
    info = folder.read_info()
    with suppress(TypeError, ValueError):
        took = datetime.datetime.fromisoformat(info.ended or "") - datetime.datetime.fromisoformat(info.started)
        return TIMES_THE_FIRST * took.total_seconds() + LONGER_BY_S
    return None


def changed_files(folder: RunFolder, knobs: Mapping[str, Any]) -> tuple[Changes, Path]:
    """What is to be changed in the user's files, and where the job ran. Raises CannotEdit or OSError."""
    from dsprof.fix import changes

    run = folder.read_info()
    cwd = Path(run.cwd or ".")
    return changes(knobs, run.facts_by_kind(), cwd, run.knobs), cwd


def keep(folder: RunFolder, chosen: Proposal, verified: Mapping[str, Any]) -> None:
    """Have findings.json and the reports of the run tell what was measured."""
    from dsprof import reports

    if not chosen.code:
        return
    info = folder.read_info()
    info.verified = {**info.verified, chosen.code: {"set": dict(chosen.knobs), **verified}}
    folder.write_info(info)
    reports.finish(folder, report=folder.report_html.exists())
