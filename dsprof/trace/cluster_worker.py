"""What a worker of a cluster has to have in common with the process that analyzes: the files, and what reads them.

Asked before a worker gets ranks, and again with each task, as workers come and go.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa

from dsprof.regular_files import open_file
from dsprof.run import RunFolder

from .merge import captures_by_rank, parquet_files
from .strings import plain_strings

COMPARED_FILES: Final = 8
COMPARED_BYTES: Final = 1 << 16
"""Of each file, from its beginning."""
ROOMS: Final = (".", "analyzer", "live", "run", "trace")
"""Folders of dsprof whose code runs on a worker."""


class WorkerRefused(Exception):
    """A worker cannot take ranks; the message says why, and what to do."""


@dataclass(frozen=True)
class Common:
    """What must be the same on a worker.

    versions: of Python and of packages, by name; code: digest of dsprof's own code
    folder:   the run folder, absolute
    files:    some files of it: name in it, size in bytes, and digest of its beginning
    """

    versions: tuple[tuple[str, str], ...]
    code: str
    folder: Path
    files: tuple[tuple[str, int, str], ...]


def common_with(folder: RunFolder) -> Common:
    """What a worker has to have that is to analyze ranks of this run."""
    here = folder.path.absolute()
    captures, merged = captures_by_rank(folder), parquet_files(folder)
    # Merging changes run.json, and the Parquet file of a rank that has a capture.
    lasting = [captures[rank][0][1] / "meta.json" if rank in captures else merged[rank]
               for rank in sorted(captures.keys() | merged.keys())]  # fmt: skip
    chosen = lasting[:: max(len(lasting) // COMPARED_FILES, 1)][:COMPARED_FILES]
    files = []
    for path in chosen:
        with suppress(OSError):  # one that is damaged tells nothing of a worker
            files.append((str(path.absolute().relative_to(here)), *_beginning(path)))
    return Common(_versions(), _code(), here, tuple(files))


@functools.lru_cache(maxsize=8)
def check(common: Common) -> None:
    """Raises WorkerRefused where this process has not all of it."""
    mine = dict(_versions())
    for name, wanted in common.versions:
        if mine[name] != wanted:
            raise WorkerRefused(
                f"it has {name} {mine[name]}, and {wanted} is here, so its answers could differ; install the same "
                "versions on all workers"
            )
    if _code() != common.code:
        raise WorkerRefused("its dsprof is not the one that is installed here; install the same version on all workers")
    for name, size, digest in common.files:
        path = common.folder / name
        try:
            same = _beginning(path) == (size, digest)
        except OSError as error:
            raise WorkerRefused(
                f"it cannot read {path} ({error.strerror or error}); put the run folder on a file system that all "
                "workers have at this same path"
            ) from None
        if not same:
            raise WorkerRefused(
                f"its {path} is another file than the one here; put the run folder on a file system that all workers "
                "share"
            )


def call(common: Common, function: Callable[..., Any], packed: bytes, *args: Any) -> bytes:
    """On a worker: `function` of what `packed` holds and of `args`; its result, pickled. Each call has its own copy, as
    a worker may have several threads. Raises WorkerRefused."""
    check(common)
    with plain_strings():
        return pickle.dumps(function(pickle.loads(packed), *args), pickle.HIGHEST_PROTOCOL)


def sentence(refused: Sequence[tuple[str, str]]) -> str:
    """Workers and why each of them is refused, in words; those with one reason together."""
    by_reason: dict[str, list[str]] = {}
    for worker, why in refused:
        by_reason.setdefault(why, []).append(worker)
    return "; ".join(
        f"{'worker' if len(workers) == 1 else f'{len(workers)} workers,'} {', '.join(sorted(workers)[:3])}"
        f"{', ...' if len(workers) > 3 else ''}: {why}"
        for why, workers in by_reason.items()
    )


def _versions() -> tuple[tuple[str, str], ...]:
    python = ".".join(platform.python_version_tuple()[:2])
    versions = {"Python": python, "numpy": np.__version__, "pandas": pd.__version__, "pyarrow": pa.__version__}
    return tuple(versions.items())


@functools.cache
def _code() -> str:
    """Digest of the code that reads and analyzes ranks."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((root / room).glob("*.py" if room == "." else "**/*.py")):
            digest.update(f"{path.relative_to(root)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _beginning(path: Path) -> tuple[int, str]:
    """A file's size, and the digest of its beginning. Raises OSError."""
    with open_file(path) as file:
        return path.stat().st_size, hashlib.sha256(file.read(COMPARED_BYTES)).hexdigest()
