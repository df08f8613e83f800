"""What a job has written: files below its folders that changed while it ran.

A comparison runs a job again and again, and each of them writes these anew. They are found afterwards, from when files
were last written, as no hook sees all that a library may write; so what a job writes elsewhere is not found.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final

MOST_ENTRIES: Final = 20_000
"""Files and folders that are looked at."""
NO_OUTPUT: Final = (".py", ".pyc", ".lock", ".pid")
"""Ends of names that do not count."""
PRINTED: Final = (".log", ".txt", ".out", ".err")
"""Ends of names that do not count either where it is not known who wrote what the job printed: `tee`, a scheduler."""
OF_TORCHRUN: Final = ("stdout.log", "stderr.log")
"""What torchrun writes of what its ranks print, into a folder of each start."""
SKIPPED: Final = frozenset({"__pycache__", "site-packages", "node_modules", "tmp", "temp", "cache", "caches"})
"""Folders of what a job may write again without harm."""
TEMPORARY: Final = re.compile(r"(torchinductor|torchelastic|triton)_.+|.+[_-]cache|tmp[a-z0-9_]{8}")
"""The same, by patterns: what libraries call theirs, and what Python's tempfile does."""
CACHE_TAG: Final = "CACHEDIR.TAG"
"""In a folder that says of itself that it is a cache (bford.info/cachedir)."""
RUN_FILE: Final = "run.json"
BESIDE_RUN_FILE: Final = frozenset({"capture", "trace", "findings.json", "report.html"})
"""In a folder of dsprof's there is the first, and one of these."""
CACHES: Final = (
    "TMPDIR", "XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR",
    "TRITON_CACHE_DIR", "MPLCONFIGDIR",
)  # fmt: skip
"""Variables of the environment that name folders for what is temporary, or a cache."""


def printed_to(streams: Sequence[int] = (1, 2)) -> list[str] | None:
    """The files to which what this process prints goes, and what its job prints: none where that is a terminal. None
    where another process reads it, and may write it to a file that is not known."""
    found = []
    for stream in streams:
        try:
            mode = os.fstat(stream).st_mode
            if stat.S_ISREG(mode):
                found.append(os.path.realpath(f"/proc/self/fd/{stream}"))
            elif not stat.S_ISCHR(mode):
                return None
        except OSError:  # it is closed
            continue
    return list(dict.fromkeys(found))


def places_of(words: Iterable[str], cwd: Path) -> list[Path]:
    """Where a job may have written: the folder that it ran in, and folders and files that its command line names."""
    found = [cwd]
    for value in (value for word in words for value in (word, word.partition("=")[2]) if value):
        path = cwd / value
        try:
            if path.exists():
                found.append(path)
        except (OSError, ValueError):  # a word that can be no path
            continue
    return list(dict.fromkeys(path.resolve() for path in found))


def written_between(
    places: Sequence[Path], began_s: float, ended_s: float, printed: Sequence[str] | None = None
) -> list[Path]:
    """Files at or below these places that were last written between two times, as `time.time()` has them, but hidden
    ones, those of run folders, and what is temporary or a cache. At most MOST_ENTRIES are looked at.

    printed: files that have what the job printed (`printed_to`); None: that is not known
    """
    found: dict[Path, None] = {}
    no_output = NO_OUTPUT if printed is not None else (*NO_OUTPUT, *PRINTED)
    for path in (*filter(Path.is_file, places), *_files(places)):
        try:
            written = path.stat().st_mtime
        except OSError:
            continue
        known = path.name.endswith(no_output) or path.name in OF_TORCHRUN or os.path.realpath(path) in (printed or ())
        if began_s <= written <= ended_s and not known:
            found[path] = None
    return list(found)


def _files(folders: Sequence[Path]) -> Iterator[Path]:
    seen, waiting, been = 0, list(folders), _caches() - set(map(_identity, filter(Path.exists, folders)))
    while waiting:
        folder = waiting.pop(0)
        try:
            itself = _identity(folder)
            if itself in been:  # by a link, or below another of them
                continue
            been.add(itself)
            with os.scandir(folder) as all_of_it:
                entries = list(islice(all_of_it, MOST_ENTRIES))
        except OSError:
            continue
        names = {entry.name for entry in entries}
        if CACHE_TAG in names or (RUN_FILE in names and names & BESIDE_RUN_FILE):
            continue
        for entry in entries:
            seen += 1
            if seen > MOST_ENTRIES:
                return
            if entry.name.startswith("."):
                continue
            try:
                if entry.is_dir():  # or a link to one, as to a larger disk
                    if entry.name not in SKIPPED and not TEMPORARY.fullmatch(entry.name):
                        waiting.append(Path(entry.path))
                elif entry.is_file():
                    yield Path(entry.path)
            except OSError:  # a link to itself
                continue


def _caches() -> set[tuple[int, int]]:
    """Identities of the folders that CACHES name."""
    found = set()
    for name in CACHES:
        with suppress(OSError):
            found.add(_identity(os.environ.get(name, "")))
    return found


def _identity(path: str | Path) -> tuple[int, int]:
    """Of a file or folder, by whatever links it is reached. Raises OSError."""
    status = os.stat(path)
    return status.st_dev, status.st_ino
