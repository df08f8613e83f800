"""The newest part of a run while its job runs: read beside the job, and nothing is written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from dsprof import regular_files
from dsprof.run import RunFolder

from .capture import Capture, read_capture
from .derive import trace_rows
from .files import brief
from .group_facts import StatedGroups
from .load import Trace, concat_rows
from .merge import add_rank, captures_by_rank, note_groups, warn
from .merge_rank import summarize

CHUNKS: Final = 2
"""Of each rank, besides its first: a chunk has 16,000 records, so some hundred steps at least."""


def load_recent(folder: RunFolder, *, chunks: int = CHUNKS, written_first: Iterable[Path] = ()) -> Trace:
    """The beginning and the newest records of each rank's newest process.

    written_first: folders of this host in which ranks may write captures that are moved into the run folder
    (`collectors/capture/scratch.py`). What cannot be read of a rank is a warning in `run`. Raises RunError where
    run.json is unreadable.
    """
    info = folder.read_info()
    info.warnings, info.ranks, info.facts = [], [], []
    places: dict[int, list[tuple[int, Path]]] = {rank: list(found) for rank, found in captures_by_rank(folder).items()}
    for place in written_first:
        for name, path in RunFolder(place).captures():
            places.setdefault(name.rank, []).append((name.restart, path))
    tables, stated = [], StatedGroups()
    for rank, found in sorted(places.items()):
        try:
            restart, capture = _newest(found, chunks)
            table = trace_rows(capture, rank, restart)
        except Exception as error:  # whatever is wrong with one rank, the others count
            warn(info, f"rank {rank}: its capture cannot be read as yet ({type(error).__name__}: {brief(error)})")
            continue
        # What is odd about it as yet, such as a part that is still to be copied, is no problem of the run.
        add_rank(rank, summarize(rank, {restart: capture}, {restart: table}) | {"problems": []}, info, stated)
        tables.append(table)
    note_groups(info)
    return Trace.of(info, concat_rows(tables))


def _newest(found: list[tuple[int, Path]], chunks: int) -> tuple[int, Capture]:
    """The capture of the rank's last restart. Where it lies in two folders, it is written in the one with the newest
    chunk, and moved from there to the other."""
    restart = max(number for number, _ in found)
    paths = [path for number, path in found if number == restart]
    paths.sort(key=lambda path: max((chunk.name for chunk in regular_files.files(path, "chunk-*.bin")), default=""))
    path = paths[-1]
    other = next((one for one in paths[:-1] if one.name == path.name), None)
    return restart, read_capture(path, newest=chunks, moved_to=other)
