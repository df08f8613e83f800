"""Other tools' traces as runs of dsprof: a file a format, which is told by content.

    straggler.py        tables of 'Understanding Stragglers in Large Model Training Using What-if Analysis' (OSDI '25);
                        straggler_table.py reads and checks them
    memory_snapshot.py  CUDA memory snapshots of torch.cuda.memory._dump_snapshot (read by dsprof.trace.snapshot), one
                        file a rank
    kineto.py           traces of torch.profiler, one file a rank
    flight_recorder.py  what each rank had issued and not seen end (torch's Flight Recorder), a file a rank

A format's module has a DESCRIPTION, `recognizes(path)`, which looks at one file and never raises, and `read(path)`, its
`Trace`; what is wrong with the file is a RunError that says what, where, and what to write instead. All but tables may
be several, one a rank (rank_names.py: which rank, by a file's name).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol, cast

from dsprof import regular_files
from dsprof.run import RunError
from dsprof.trace import Trace

FORMATS: Final = ("straggler", "memory_snapshot", "flight_recorder", "kineto")
MOST_NAMED: Final = 8
"""Files of a folder that are named, of those one could mean."""


class Format(Protocol):
    """What the module of a format has."""

    DESCRIPTION: str
    __name__: str

    def recognizes(self, path: Path) -> bool: ...

    def read(self, path: Path) -> Trace: ...


def import_trace(path: Path, comm_kernels: Sequence[str] = ()) -> Trace:
    """The trace in a file, or in the one of a folder that a format recognizes, or, of a format whose files are one a
    rank, in all of them. `comm_kernels`: see `kineto.read`. Raises RunError."""
    from . import flight_recorder, memory_snapshot

    formats = [cast(Format, importlib.import_module(f".{name}", __name__)) for name in FORMATS]
    if not path.exists():
        raise RunError(f"{path}: no such file or folder; name a trace, or the folder that holds one")
    try:
        files = regular_files.files(path) if path.is_dir() else [_named(path)]
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}); make it readable") from error
    found = [(file, known) for file in files for known in formats if known.recognizes(file)]
    traces_of_profiler = bool(found) and all(known.__name__.endswith(".kineto") for _, known in found)
    if comm_kernels and not traces_of_profiler:
        raise RunError(f"{path}: no trace of torch.profiler, which --comm-kernels is for; leave the flag out")
    if traces_of_profiler:
        from . import kineto

        return kineto.read(path if len(found) > 1 else found[0][0], comm_kernels)
    kinds = {known.__name__ for _, known in found}
    if len(found) > 1:  # of one job, a file a rank
        if kinds == {flight_recorder.__name__}:
            return flight_recorder.read_all([file for file, _ in found])
        if kinds == {memory_snapshot.__name__}:
            return memory_snapshot.read_all([file for file, _ in found])
    if len({file for file, _ in found}) > 1:
        names = ", ".join(file.name for file, _ in found[:MOST_NAMED]) + (", ..." if len(found) > MOST_NAMED else "")
        raise RunError(f"{path}: holds {len(found)} traces ({names}); name one of them")
    if not found:
        known = "; ".join(each.DESCRIPTION for each in formats)
        raise RunError(f"{path}: {_what(path, files)}; what can be imported is {known}")
    file, chosen = found[0]
    return chosen.read(file)


def _named(path: Path) -> Path:
    """A file that somebody named, by whatever links. Raises RunError where it is none: reading a pipe would wait."""
    refused = regular_files.why_not(path.stat())
    if refused:
        raise RunError(f"{path}: {refused}; name a trace, or the folder that holds one")
    return path


def _what(path: Path, files: list[Path]) -> str:
    """Why there is nothing to import, of what no format recognizes."""
    if path.is_dir():
        if not files and any(regular_files.entries(path)):
            return "no files in it (what is behind links is not read)"
        return f"none of its {len(files)} files is a trace that dsprof knows" if files else "an empty folder"
    return "not a trace that dsprof knows" if path.stat().st_size else "an empty file"
