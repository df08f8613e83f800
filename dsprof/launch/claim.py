"""Making the folder of a new run, and making room for it, without ever removing anything else."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from dsprof.run import RunError, RunFolder, RunInfo
from dsprof.schema import CONTROL_FILE, HANGS_FILE

from .talk import shown

ERROR_LOG: Final = "dsprof-error.log"
RUN_PARTS: Final = (
    "run.json", "capture", "trace", "memory", "exits", "hosts", "findings.json", "report.html", "tensorboard",
    "layer_costs.json", CONTROL_FILE, HANGS_FILE, ERROR_LOG,
)  # fmt: skip
LEFT_BY_PROCESSES: Final = re.compile(r"error\.\d+\.txt|hint\.\d+\.json")
"""Beside RUN_PARTS, all that dsprof writes into a run folder: see `collectors.errors.report_failure`, `run.Hint`."""


def claim(path: Path, info: RunInfo, *, force: bool = False) -> RunFolder:
    """A new run folder at `path`, holding run.json. With `force` a run that lies there makes way. Raises RunError."""
    folder = RunFolder(Path(os.path.abspath(path)))
    try:
        if folder.path.is_dir() and any(folder.path.iterdir()):
            if not is_run(folder):
                raise RunError(f"{shown(folder.path)}: holds something other than a run; give another folder with -o")
            if not force:
                raise RunError(f"{shown(folder.path)}: exists; replace it with --force, or give another folder with -o")
            remove_run(folder)
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.capture.mkdir()  # fails if another launcher was quicker
    except FileExistsError as error:
        why = "another run has just begun there" if folder.capture.is_dir() else "is not a folder"
        raise RunError(f"{shown(folder.path)}: {why}; give another folder with -o") from error
    except OSError as error:
        raise _cannot_write(folder, error) from error
    try:
        folder.write_info(info)
    except OSError as error:
        with suppress(OSError):
            remove_run(folder)
        raise _cannot_write(folder, error) from error
    return folder


def is_run(folder: RunFolder) -> bool:
    """Whether dsprof made this folder, judged by what it holds and not by names that others use too."""
    if any(folder.capture.glob("rank[0-9]*.*")):
        return True
    try:
        return "id" in json.loads(folder.run_json.read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def remove_run(folder: RunFolder) -> None:
    """Remove the run, and the folder with it unless something else lies there too. Raises OSError."""
    left = [path.name for path in folder.path.glob("*.*.*") if LEFT_BY_PROCESSES.fullmatch(path.name)]
    for part in (*RUN_PARTS, *left):
        item = folder.path / part
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        else:
            item.unlink(missing_ok=True)
    with suppress(OSError):
        folder.path.rmdir()


def _cannot_write(folder: RunFolder, error: OSError) -> RunError:
    why = error.strerror or str(error)
    return RunError(f"{shown(folder.path)}: cannot be written ({why}); give another run folder with -o DIR")
