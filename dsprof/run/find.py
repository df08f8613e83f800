"""Which run a path names: one itself, or the newest of those below it."""

from __future__ import annotations

import datetime
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from .folder import DEFAULT_PARENT, RunError, RunFolder, open_run

_STAMP: Final = re.compile(r"-(\d{8}T\d{6})Z-[0-9a-f]+$")


def find_run(path: Path) -> RunFolder:
    """The run at `path`, or the newest one right below it. Raises RunError if there is none."""
    runs = find_runs(path)
    return max(runs, key=began)


def find_runs(path: Path) -> list[RunFolder]:
    """The run at `path`, or all those right below it, by name. Raises RunError if there is none."""
    if path.is_dir() and not RunFolder(path).is_run() and (below := runs_below(path)):
        return below
    if not path.exists() and path == Path(DEFAULT_PARENT):
        raise RunError(f"{path}/: no such folder, so no run to take; name a run folder, or make one with `dsprof run`")
    return [open_run(path)]


def runs_below(path: Path) -> list[RunFolder]:
    """The runs right below a folder, by name; none where it is no folder."""
    children = sorted(path.iterdir()) if path.is_dir() else []
    return [folder for child in children if child.is_dir() and (folder := RunFolder(child)).is_run()]


def began(folder: RunFolder) -> tuple[float, str]:
    """When a run began: by its name, else by the age of its capture or run.json."""
    stamp = _STAMP.search(folder.path.resolve().name)
    if stamp:
        with suppress(ValueError):  # the thirteenth month
            moment = datetime.datetime.strptime(stamp[1], "%Y%m%dT%H%M%S").replace(tzinfo=datetime.UTC)
            return moment.timestamp(), folder.path.name
    sources = [path for path in (folder.capture, folder.run_json, folder.trace) if path.exists()]
    return min((path.stat().st_mtime for path in sources), default=0.0), folder.path.name
