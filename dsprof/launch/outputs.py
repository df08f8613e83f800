"""What a job has written: files below its folders that changed while it ran.

A comparison runs a job again and again, and each of them writes these anew. They are found afterwards, from when files
were last written, as no hook sees all that a library may write; so what a job writes elsewhere is not found.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

MOST_ENTRIES: Final = 20_000
"""Files and folders that are looked at."""
NO_OUTPUT: Final = (".log", ".txt", ".out", ".err", ".py", ".pyc", ".lock", ".pid")
"""Ends of names that do not count: a shell or a scheduler may have written what the job printed."""
SKIPPED: Final = frozenset({"__pycache__", "site-packages", "node_modules"})
RUN_FILE: Final = "run.json"
"""In a folder of dsprof's."""


def folders_of(words: Iterable[str], cwd: Path) -> list[Path]:
    """Where a job may have written: the folder that it ran in, and folders that its command line names."""
    found = [cwd]
    for word in words:
        value = word.partition("=")[2] if word.startswith("-") else word
        path = cwd / value if value else cwd
        try:
            if path.is_dir():
                found.append(path)
        except (OSError, ValueError):  # a word that can be no path
            continue
    return list(dict.fromkeys(path.resolve() for path in found))


def written_between(folders: Sequence[Path], began_s: float, ended_s: float) -> list[Path]:
    """Files below these folders that were last written between two times, as `time.time()` has them, but hidden ones
    and those of run folders. At most MOST_ENTRIES are looked at."""
    found: dict[Path, None] = {}
    for path in _files(folders):
        try:
            written = path.stat().st_mtime
        except OSError:
            continue
        if began_s <= written <= ended_s and not path.name.endswith(NO_OUTPUT):
            found[path] = None
    return list(found)


def _files(folders: Sequence[Path]) -> Iterator[Path]:
    seen, waiting = 0, list(folders)
    while waiting:
        folder = waiting.pop(0)
        try:
            with os.scandir(folder) as all_of_it:
                entries = list(islice(all_of_it, MOST_ENTRIES))
        except OSError:
            continue
        if any(entry.name == RUN_FILE for entry in entries):
            continue
        for entry in entries:
            seen += 1
            if seen > MOST_ENTRIES:
                return
            if entry.name.startswith(".") or entry.name in SKIPPED:
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting.append(Path(entry.path))
            elif entry.is_file():
                yield Path(entry.path)
