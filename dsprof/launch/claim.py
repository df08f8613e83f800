"""Making the folder of a new run, and making room for it, without ever removing anything else."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from dsprof import regular_files
from dsprof.names import host_name
from dsprof.permissions import make_folder, make_named_folder
from dsprof.run import RunError, RunFolder, RunInfo

from .talk import shown


def claim(path: Path, info: RunInfo, *, force: bool = False) -> RunFolder:
    """A new run folder at `path`, holding run.json. With `force` a run that lies there makes way. Raises RunError."""
    folder = RunFolder(Path(os.path.abspath(path)))
    try:
        if folder.path.is_dir() and any(folder.path.iterdir()):
            if not is_run(folder):
                raise RunError(f"{shown(folder.path)}: holds something other than a run; give another folder with -o")
            if not force:
                raise RunError(f"{shown(folder.path)}: exists; replace it with --force, or give another folder with -o")
            if (process := _under_way(folder)) is not None:
                raise RunError(
                    f"{shown(folder.path)}: a job is still running there (process {process} is one of its ranks); wait "
                    "for it or end it, or give another folder with -o"
                )
            folder.remove()
        make_named_folder(folder.path)
        make_folder(folder.capture, exist_ok=False)  # fails if another launcher was quicker
    except FileExistsError as error:
        why = "another run has just begun there" if folder.capture.is_dir() else "is not a folder"
        raise RunError(f"{shown(folder.path)}: {why}; give another folder with -o") from error
    except OSError as error:
        raise _cannot_write(folder, error) from error
    try:
        folder.write_info(info)
    except OSError as error:
        with suppress(OSError):
            folder.remove()
        raise _cannot_write(folder, error) from error
    return folder


def _under_way(folder: RunFolder) -> int | None:
    """A process of this host that is captured into the folder, of a run that has not ended; None: there is none."""
    try:
        if regular_files.read_json(folder.run_json).get("ended"):
            return None
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    for name, _ in folder.captures():
        if name.host == host_name() and Path(f"/proc/{name.pid}").exists():
            return name.pid
    return None


def is_run(folder: RunFolder) -> bool:
    """Whether dsprof made this folder, judged by what it holds and not by names that others use too."""
    if any(regular_files.folders(folder.capture, "rank[0-9]*.*")):
        return True
    try:
        return "id" in regular_files.read_json(folder.run_json)
    except (OSError, ValueError, TypeError):
        return False


def _cannot_write(folder: RunFolder, error: OSError) -> RunError:
    why = error.strerror or str(error)
    return RunError(f"{shown(folder.path)}: cannot be written ({why}); give another run folder with -o DIR")
